"""Recurrences over packed sequences: states as they are written, any chunks, and slots that others have used."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.ops import OPS
from graft.ops.gated_delta_rule import cases as rule_cases
from graft.ops.packed_states import held_states, make_layout
from graft.ops.selection import problem_of
from graft.ops.stateful_causal_conv.cases import CASES as CONVS
from graft.ops.stateful_delta_rule.cases import CASES as RULES
from marks import examples

STATEFUL = {
    "stateful_causal_conv": (CONVS, 3),
    "stateful_delta_rule": (RULES, 5),
}  # cases, argument
CASES = [(name, case) for name, (cases, _) in STATEFUL.items() for case in cases]
PLAIN = {name: [kernel for kernel in OPS[name].table if kernel.kind != "triton"] for name in STATEFUL}  # any dtype
NAMES = ("state_slots", "token_to_seq", "cu_seqlens", "seq_lens", "lens_cpu")


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}: {case.name}" for name, case in CASES])
def test_all_kernels_write_the_same_states(name, case):
    """Into the slots of their sequences and no others."""
    index, written = STATEFUL[name][1], []
    for kernel in OPS[name].table:
        args = list(case.make("cpu", torch.float32, torch.Generator().manual_seed(0)))
        before = args[index].clone()
        kernel.run(*args)
        slots = set(args[index + 1].tolist())
        others = [slot for slot in range(len(before)) if slot not in slots]
        assert torch.equal(args[index][others], before[others])
        written.append(args[index])
    assert len(written) == 3 and not torch.equal(written[0], before)
    for other in written[1:]:
        torch.testing.assert_close(other, written[0], rtol=1e-5, atol=1e-5)


def test_a_sequence_without_tokens_keeps_its_state():
    case = next(case for case in CONVS if "without tokens" in case.name)
    for kernel in OPS["stateful_causal_conv"].table:
        args = case.make("cpu", torch.float32, torch.Generator().manual_seed(0))
        state, slots = args[3], args[4]
        before = state[slots[1]].clone()
        kernel.run(*args)
        assert torch.equal(state[slots[1]], before)


def layout(new: int, old: int) -> list[torch.Tensor]:
    found = make_layout((new,), (old,), "cpu")
    return [found[name] for name in NAMES]


def conv_in_chunks(kernel, x, weight, state, cuts):
    parts = []
    for first, last in pairwise((0, *cuts, x.shape[2])):
        parts.append(kernel.run(x[:, :, first:last], weight, None, state, *layout(last - first, first), "silu"))
    return torch.cat(parts, 2)


def rule_in_chunks(kernel, operands, state, cuts):
    parts = []
    for first, last in pairwise((0, *cuts, operands[0].shape[1])):
        slots, _, *rest = layout(last - first, first)
        parts.append(kernel.run(*(t[:, first:last] for t in operands), state, slots, *rest, True))
    return torch.cat(parts, 1)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 140), st.lists(st.sampled_from([1, 2, 3, 4, 63, 64, 65, 127, 128, 129]), max_size=4))
def test_chunks_give_what_the_whole_sequence_gives(length, cuts):
    """From a slot that somebody else has left something in."""
    cuts = sorted({cut for cut in cuts if cut < length})
    g = torch.Generator().manual_seed(length)
    x, weight = torch.randn(1, 6, length, generator=g, dtype=torch.float64), torch.randn(6, 4, generator=g).double()
    whole = torch.ops.graft.causal_conv(x, weight, None, "silu")
    for kernel in PLAIN["stateful_causal_conv"]:
        state = torch.full((3, 6, 3), torch.nan, dtype=torch.float64)
        torch.testing.assert_close(conv_in_chunks(kernel, x, weight, state, cuts), whole)
    operands = rule_cases.operands(1, length, 2, 4, 8, "cpu", torch.float64, g)
    whole = torch.ops.graft.gated_delta_rule(*operands, True)
    for kernel in PLAIN["stateful_delta_rule"]:
        state = torch.full((3, 2, 4, 8), torch.nan, dtype=torch.float64)
        torch.testing.assert_close(rule_in_chunks(kernel, operands, state, cuts), whole)


def test_a_slot_that_is_not_taken_for_new_is_seen(monkeypatch):
    """The wrong variant of the property above: what another sequence left is read."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 6, 9, generator=g), torch.randn(6, 4, generator=g)
    whole = torch.ops.graft.causal_conv(x, weight, None, "silu")
    monkeypatch.setattr("graft.ops.stateful_causal_conv.reference.held_states", lambda state, slots, *_: state[slots])
    for kernel in PLAIN["stateful_causal_conv"]:
        found = conv_in_chunks(kernel, x, weight, torch.ones(3, 6, 3), [4])
        assert not torch.allclose(found, whole, atol=1e-2)


def test_new_sequences_hold_zeros_whatever_is_in_their_slot():
    state = torch.tensor([[torch.nan], [2.0], [torch.inf]])
    found = held_states(state, torch.tensor([0, 1, 2]), torch.tensor([0, 4, 5, 6]), torch.tensor([4, 3, 1]))
    assert found.tolist() == [[0.0], [2.0], [0.0]]


# ── our kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────


def packed_step(name, lengths, generator):
    """A step of sequences (new, old) in slots of their own that all hold NaN where nothing is to be read; padding
    behind it: sequences of nobody's in one slot, with and without tokens."""
    real = len(lengths)
    new, old = zip(*lengths, (1, 0), (0, 1), (3, 0), strict=True)
    made = make_layout(new, old, "cpu")
    made["state_slots"][real:] = made["state_slots"][real]  # nobody's
    if name == "stateful_causal_conv":
        x = torch.randn(1, sum(new), 5, generator=generator).transpose(1, 2)
        given, shape, layout = (x, torch.randn(5, 4, generator=generator), None), (5, 3), made.values()
    else:
        given, shape = rule_cases.operands(1, sum(new), 2, 8, 16, "cpu", torch.float32, generator), (2, 8, 16)
        layout = [made[key] for key in NAMES if key != "token_to_seq"]
    state = torch.full((2 * len(new) + 1, *shape), torch.nan)
    for row, before in enumerate(old[:real]):
        if before:
            state[made["state_slots"][row]] = torch.randn(shape, generator=generator)
    return [*given, state, *layout, "silu" if name == "stateful_causal_conv" else True], made["state_slots"][:real]


def agrees(name, lengths, seed=0):
    """Results of all tokens and states of all sequences, as the reference has them, and nothing else written."""
    step, slots = packed_step(name, lengths, torch.Generator().manual_seed(seed))
    index, ours = STATEFUL[name][1], [t.clone() if isinstance(t, torch.Tensor) else t for t in step]
    before = step[index].clone()
    tokens = sum(new for new, _ in lengths)
    wanted, found = OPS[name].reference(*step), OPS[name].kernel("triton").run(*ours)
    cut = (slice(None), slice(None), slice(tokens)) if name == "stateful_causal_conv" else (0, slice(tokens))
    pairs = ((found[cut], wanted[cut]), (ours[index][slots], step[index][slots]))
    used = set(step[index + 1].tolist())
    others = [slot for slot in range(len(before)) if slot not in used]
    assert before[others].isnan().all() and ours[index][others].isnan().all(), "a slot of nobody in the step"
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)


STEPS = {
    "decode, one of them new": [(1, 5), (1, 0), (1, 70)],
    "as many tokens as sequences, but not one each": [(0, 3), (2, 4), (1, 0), (1, 9), (0, 1), (1, 2), (2, 0)],
    "a prompt and those that decode": [(1, 3), (7, 0), (1, 1)],
    "prompts of several tiles, begun and new": [(33, 2), (1, 9), (40, 0), (2, 1)],
}


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_our_kernels_go_on_from_what_each_sequence_holds(lengths):
    for name in STATEFUL:
        assert agrees(name, lengths)


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)).filter(any), min_size=1, max_size=5))
def test_our_kernels_take_any_step(lengths):
    for name in STATEFUL:
        assert agrees(name, lengths)


def test_a_part_of_a_prompt_is_one_program_s(monkeypatch):
    """Programs run one after the other here, part 0 first: who reads a state behind it finds the new one."""
    from graft.ops.causal_conv.triton import split_count
    from graft.ops.stateful_causal_conv import triton as ours

    assert split_count(1, 4, torch.device("cpu")) == 4 and split_count(100, 4, torch.device("cpu")) == 1
    parts, at_once = [], ours.split_count
    monkeypatch.setattr(ours, "split_count", lambda *sizes: parts.append(at_once(*sizes)) or parts[-1])
    assert agrees("stateful_causal_conv", [(100, 2)])
    assert parts == [4]


def test_the_kernel_of_a_delta_rule_is_chosen_by_the_shapes_of_a_step():
    from graft.ops.stateful_delta_rule.op import FEW, length_problem

    def told(new):
        step, _ = packed_step("stateful_delta_rule", [(new, 0)], torch.Generator())
        return length_problem(OPS["stateful_delta_rule"].call(*step))

    assert told(FEW) is None  # 4 tokens of padding behind it, in sequences as many as those and one more
    assert "chunks of a prompt" in told(FEW + 1)


def test_our_kernels_are_for_float32_and_less():
    def told(name, index=None):
        step, _ = packed_step(name, [(1, 2)], torch.Generator())
        if index is not None:
            step[index] = step[index].double()
        return problem_of(OPS[name].kernel("triton"), OPS[name].call(*step))

    assert "torch.float64" in told("stateful_delta_rule", 5) and "float32" in told("stateful_causal_conv", 1)
    assert "on a GPU" in told("stateful_delta_rule") and "on a GPU" in told("stateful_causal_conv")
