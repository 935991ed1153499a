"""graft::rope_attention: its kernels against float64, what they write, and which one takes a call.

Without a GPU the Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.ops import OPS, choose
from graft.ops.cached_attention import op as reading
from graft.ops.cached_attention.decode import triton as decode
from graft.ops.paged_batches import make
from graft.ops.rope_attention import op
from graft.ops.rope_kv_write import op as writing
from graft.ops.selection import problem_of
from marks import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = OPS["rope_attention"]
AT = {argument.name: index for index, argument in enumerate(torch.ops.graft.rope_attention.default._schema.arguments)}
PLAIN = (None, None, False)
EMPTY = torch.empty


def batch(new, old, h, kv, d, options=PLAIN, r=None, interleaved=False, norm=False, offset=0.0):
    """Arguments in float32."""
    g = torch.Generator().manual_seed(0)
    q, k, v, *rest = make(new, old, h, kv, d, options, DEVICE, torch.float32, g)
    angle = torch.randn(1, 1, sum(new), (r or d) // 2, generator=g)
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    cos, sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
    norms = [torch.rand(d, generator=g).to(DEVICE) + 0.5 for _ in range(2)] if norm else [None, None]
    more = interleaved, *norms, 1e-5 if norm else 0.0, offset, offset != 0.0
    return [q, k, v, cos, sin, *rest, *more]


def cloned(args):
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def wide(args):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in cloned(args)]


def poison(args):
    """The same, with NaN in the cache beyond the tokens that were there: it belongs to nobody yet."""
    args = cloned(args)
    new, seq_lens = args[AT["lens_cpu"]].T.tolist()
    seen = torch.zeros(args[AT["k_cache"]].shape[:2], dtype=torch.bool, device=DEVICE)
    for table, n, length in zip(args[AT["block_tables"]].tolist(), new, seq_lens, strict=True):
        for place in range(length - n):
            seen[table[place // 16], place % 16] = True
    for cache in args[5:7]:
        cache[~seen] = torch.nan
    return args


def poisoned(*args, **options):
    made = EMPTY(*args, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made


def agrees(run, args, given=None):
    """Whether `run` gives what the reference gives of `args` in float64, writes the same and nothing else."""
    exact, mine, slots = wide(args), poison(given or args), args[AT["slot_mapping"]]
    expected = SPEC.reference(*exact)
    before = cloned(mine[5:7])
    with mock.patch.object(torch, "empty", poisoned):
        found = run(*mine)
    pairs = [(found, expected)]
    for new, old, right in zip(mine[5:7], before, exact[5:7], strict=True):
        flat, was, wanted = (t.view(-1, *t.shape[2:]) for t in (new, old, right))
        pairs.append((flat[slots], wanted[slots]))
        was[slots] = flat[slots]
        assert torch.equal(flat.nan_to_num(7.0), was.nan_to_num(7.0)), "another place of the cache was written"
    return all(torch.allclose(a.double(), b, rtol=2e-5, atol=2e-5) for a, b in pairs)


@pytest.fixture(autouse=True)
def any_device(monkeypatch):
    """The interpreter runs on a CPU too."""
    for module in (reading, writing):
        monkeypatch.setattr(module, "needs_triton", lambda *_: None)


def takes(kernel, args):
    return problem_of(SPEC.kernel(kernel), SPEC.call(*args)) is None


def chosen(*args):
    return choose(SPEC, SPEC.call(*args)).name


OPTIONS = st.tuples(
    st.sampled_from([None, None, 1, 7, 40, 130]), st.sampled_from([None, None, 5.0]), st.booleans()
)  # window, soft cap, sinks
OLD = st.lists(st.sampled_from([0, 1, 15, 16, 63, 255, 256, 257, 300, 700]), min_size=1, max_size=3)


@settings(max_examples=examples(30), deadline=None)
@given(old=OLD, group=st.sampled_from([1, 3, 4]), d=st.sampled_from([16, 24, 32]), options=OPTIONS)
def test_one_kernel_agrees_with_float64_and_writes_the_newest_alone(old, group, d, options):
    args = batch((1,) * len(old), tuple(old), 2 * group, 2, d, options)
    assert takes("whole", args)
    assert agrees(op.run_whole, args)


@settings(max_examples=examples(12), deadline=None)
@given(
    old=OLD,
    r=st.sampled_from([8, 16]),
    interleaved=st.booleans(),
    norm=st.booleans(),
    options=OPTIONS,
)
def test_whatever_a_kernel_takes_it_computes(old, r, interleaved, norm, options):
    args = batch((1,) * len(old), tuple(old), 4, 2, 16, options, r, interleaved, norm)
    able = [kernel for kernel in SPEC.kernels if takes(kernel.name, args)]
    ran = [kernel.name for kernel in able if agrees(kernel.run, args)]
    assert ran == [kernel.name for kernel in able]
    assert {"whole", "steps"} <= set(ran)


WAYS = {"early": {"early": True}, "split": {"early": False, "even": False}, "balanced": {"even": True}}
TURNS = {
    "halves": {},
    "a part": {"r": 8},
    "pairs of a part": {"r": 12, "interleaved": True},
    "norms": {"norm": True},
    "norms, pairs": {"norm": True, "interleaved": True},
    "norms, a part": {"norm": True, "r": 4},
    "Gemma's norms": {"norm": True, "offset": 1.0},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("turn", TURNS)
def test_every_kernel_of_decoding_turns_heads_as_the_model_does(way, turn):
    args = batch((1, 1, 1), (300, 0, 16), 6, 2, 24, **TURNS[turn])
    run = partial(whole_by, WAYS[way])
    assert agrees(run, args)
    for name in ("cos", "q_norm", "k_norm"):
        if args[AT[name]] is not None:
            wrong = cloned(args)
            wrong[AT[name]] = wrong[AT[name]] * 1.01
            assert not agrees(run, args, wrong), f"a percent of {name} is seen"


def whole_by(way, *given):
    """run_whole by a kernel that the shapes would not choose."""
    with mock.patch.object(decode, "split_kv", partial(decode.split_kv, **way)):
        return op.run_whole(*given)


@pytest.mark.some(1)
@pytest.mark.parametrize(("new", "old"), [((7,), (0,)), ((1, 6), (20, 3)), ((5, 9), (33, 0))])
def test_prompts_take_the_two_kernels_that_it_replaces(new, old):
    args = batch(new, old, 4, 2, 16)
    assert chosen(*args) == "steps" and agrees(op.run_steps, args)


@pytest.mark.parametrize(
    ("angles", "turn"),
    [
        (torch.float16, {}),
        (torch.float32, {}),
        (torch.float16, {"r": 8}),
        (torch.float16, {"r": 12, "interleaved": True}),
    ],
)
def test_16_bit_keys_are_rounded_as_the_reference_rounds_them(angles, turn):
    """Bit for bit in the cache, so that it does not matter which kernel wrote a token; elsewhere nothing changes."""
    given = batch((1, 1), (300, 40), 4, 2, 16, **turn)
    args = [a.half() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in given]
    args[3:5] = [t.to(angles) for t in args[3:5]]
    mine, theirs, before = cloned(args), cloned(args), cloned(args)
    found, expected = op.run_whole(*mine), SPEC.reference(*theirs)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    assert all(torch.equal(one, other) for one, other in zip(mine[5:7], theirs[5:7], strict=True))
    assert not torch.equal(mine[5], before[5])
    mine = cloned(args)
    op.run_whole(*mine[:4], mine[4] * 1.01, *mine[5:])
    assert not torch.equal(mine[5], theirs[5]), "a percent of a sine is seen"


@pytest.mark.some(1)
@pytest.mark.parametrize("run", [op.run_whole, op.run_steps])
def test_a_wrong_variant_is_caught(run):
    """Turned the other way, a scale that is off, values of another head, one key too many or too few."""
    args = batch((1, 1), (300, 40), 4, 2, 16, (200, None, False))
    assert agrees(run, args)
    flipped = [t.flip(1) for t in args[1:3]]
    for at, other in ((4, -args[4]), (13, args[13] * 1.05), (1, flipped[0]), (2, flipped[1]), (14, 201), (14, 199)):
        assert not agrees(run, args, [*args[:at], other, *args[at + 1 :]]), at


def test_rows_without_a_sequence_write_nothing():
    """Rows that fill up a CUDA graph's batch have no tokens; the sequence beside them is not disturbed."""
    args = poison(batch((1, 1), (40, 20), 4, 2, 16))
    whole = cloned(args)
    expected = op.run_whole(*whole)
    args[AT["seq_lens"]][1] = 0
    before = cloned(args)
    found = op.run_whole(*args)
    assert torch.equal(found[0, 0], expected[0, 0]) and not found[0, 1].any()
    for new, old, both in zip(args[5:7], before[5:7], whole[5:7], strict=True):
        flat, was, full = (t.view(-1, *t.shape[2:]) for t in (new, old, both))
        slot, unused = args[AT["slot_mapping"]].tolist()
        assert torch.equal(flat[slot], full[slot]) and was[slot].isnan().all()
        assert flat[unused].isnan().all(), "what belongs to nobody stays as it was"


def test_which_kernel_takes_a_call(monkeypatch):
    args = batch((1,), (20,), 4, 2, 16)
    assert chosen(*args) == "whole"
    table = torch.zeros(1, 200_000 // 16, dtype=torch.int64, device=DEVICE)
    assert chosen(*args[:9], table, *args[10:]) == "whole"  # long contexts too
    several = batch((2,), (20,), 4, 2, 16)
    assert chosen(*several) == "steps" and not takes("whole", several)
    monkeypatch.undo()
    if DEVICE == "cpu":
        assert chosen(*args) == "reference"
        assert all("run on a GPU" in SPEC.kernel(name).problem(SPEC.call(*args)) for name in ("whole", "steps"))
