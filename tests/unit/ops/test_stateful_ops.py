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
from graft.ops.stateful_causal_conv.cases import CASES as CONVS
from graft.ops.stateful_delta_rule.cases import CASES as RULES
from marks import examples

STATEFUL = {
    "stateful_causal_conv": (CONVS, 3),
    "stateful_delta_rule": (RULES, 5),
}  # cases, argument
CASES = [(name, case) for name, (cases, _) in STATEFUL.items() for case in cases]
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
    assert len(written) == 2 and not torch.equal(written[0], before)
    torch.testing.assert_close(*written, rtol=1e-5, atol=1e-5)


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
    for kernel in OPS["stateful_causal_conv"].table:
        state = torch.full((3, 6, 3), torch.nan, dtype=torch.float64)
        torch.testing.assert_close(conv_in_chunks(kernel, x, weight, state, cuts), whole)
    operands = rule_cases.operands(1, length, 2, 4, 8, "cpu", torch.float64, g)
    whole = torch.ops.graft.gated_delta_rule(*operands, True)
    for kernel in OPS["stateful_delta_rule"].table:
        state = torch.full((3, 2, 4, 8), torch.nan, dtype=torch.float64)
        torch.testing.assert_close(rule_in_chunks(kernel, operands, state, cuts), whole)


def test_a_slot_that_is_not_taken_for_new_is_seen(monkeypatch):
    """The wrong variant of the property above: what another sequence left is read."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 6, 9, generator=g), torch.randn(6, 4, generator=g)
    whole = torch.ops.graft.causal_conv(x, weight, None, "silu")
    monkeypatch.setattr("graft.ops.stateful_causal_conv.reference.held_states", lambda state, slots, *_: state[slots])
    for kernel in OPS["stateful_causal_conv"].table:
        found = conv_in_chunks(kernel, x, weight, torch.ones(3, 6, 3), [4])
        assert not torch.allclose(found, whole, atol=1e-2)


def test_new_sequences_hold_zeros_whatever_is_in_their_slot():
    state = torch.tensor([[torch.nan], [2.0], [torch.inf]])
    found = held_states(state, torch.tensor([0, 1, 2]), torch.tensor([0, 4, 5, 6]), torch.tensor([4, 3, 1]))
    assert found.tolist() == [[0.0], [2.0], [0.0]]
