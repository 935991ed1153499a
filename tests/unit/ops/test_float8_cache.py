"""The paged cache in float8: its layout, and every kernel that reads or writes it, with everything poisoned that must
not be read. Without a GPU the Triton kernels run in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from float8_cases import everything, float8_cache, poison
from graft.ops import OPS, choose
from graft.ops.cached_attention import op as reading
from graft.ops.cached_attention.decode.triton import split_kv
from graft.ops.cached_attention.existing import cached_attention_sdpa
from graft.ops.cached_attention.triton import cached_attention_triton
from graft.ops.paged_attention.triton import paged_attention_triton
from graft.ops.paged_batches import make
from graft.ops.paged_cache import block_of, raw, rows_of, scales_of, write
from graft.ops.rope_attention import op as whole
from graft.ops.rope_kv_write import op as writing
from graft.ops.rope_kv_write import triton as rope_kv_write
from graft.ops.rope_kv_write.cases import CASES as ROPE_CASES
from graft.weights.quantize import FP8, rows_to_fp8
from marks import examples, short

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AT = {
    argument.name: index for index, argument in enumerate(torch.ops.graft.cached_attention.default._schema.arguments)
}
PLAIN = (None, None, False)
ROUNDING = 2.0**-4  # of a number that is rounded to 3 bits behind the first
# some of a head is rotated and the rest copied
PARTLY = [next(case for case in ROPE_CASES if case.name == "norms, 32 of 80")]


@pytest.fixture(autouse=True)
def any_device(monkeypatch):
    """The interpreter runs on a CPU too."""
    for module in (reading, writing):
        monkeypatch.setattr(module, "needs_triton", lambda *_: None)


def batch(new, old, h, kv, d, options=PLAIN, dtype=torch.float32):
    """Arguments of cached_attention over float8 caches, and what it must give: float64 over what those hold."""
    g = torch.Generator().manual_seed(0)
    q, _, _, k_cache, v_cache, _, *rest = make(new, old, h, kv, d, options, DEVICE, torch.float32, g)
    caches = [float8_cache(cache * 3) for cache in (k_cache, v_cache)]
    q, rest[-1] = q.to(dtype), rest[-1] if rest[-1] is None else rest[-1].to(dtype)
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in rest]
    expected = OPS["cached_attention"].reference(q.double(), *caches, *wide)
    poison(caches, rest[1], rest[3])
    return (q, *caches, *rest), expected


def split(args, **options):
    named = [args[AT[name]] for name in ("q", "k_cache", "v_cache", "block_tables", "seq_lens")]
    return split_kv(*named, *args[AT["scale"] :], **options)


def close(left, right, tolerance=2e-5):
    return torch.allclose(left.double(), right, rtol=tolerance, atol=tolerance)


@given(block=st.integers(1, 200), d=st.integers(1, 300))
def test_a_block_is_found_from_its_rows(block, d):
    rows = rows_of(block, d, FP8)
    assert block_of(torch.empty((1, rows, 1, d), dtype=FP8, device="meta")) == block
    assert (rows - block) * d >= 4 * block > (rows - block - 1) * d  # room for the scales, and no row too many
    assert rows_of(block, d, torch.bfloat16) == block


def test_a_token_of_eight_billion_takes_little_more_than_half():
    assert rows_of(16, 128, FP8) == 17 and rows_of(16, 64, FP8) == 17 and rows_of(16, 32, FP8) == 18


@settings(max_examples=examples(20), deadline=None)
@given(d=st.sampled_from([4, 16, 24, 64]), kv=st.integers(1, 3), power=st.integers(-30, 30), seed=st.integers(0, 99))
def test_what_is_written_is_read_back_to_three_bits(d, kv, power, seed):
    """Whatever the magnitude of a head: its neighbours, and what is not written, stay as they were."""
    g = torch.Generator().manual_seed(seed)
    heads = torch.randn(5, kv, d, generator=g) * 2.0**power
    cache = float8_cache(torch.randn(3, 16, kv, d, generator=g).to(DEVICE))
    before, slots = everything(cache), torch.randperm(48, generator=g)[:5].to(DEVICE)
    write(cache, slots, heads.to(DEVICE))
    after = everything(cache).flatten(0, 1)
    apart = (after[slots].cpu() - heads).abs()
    steps = heads.abs().amax(-1, keepdim=True) / 448 * 2.0**-10  # half a step of the smallest numbers
    assert (apart <= heads.abs() * ROUNDING + steps).all()
    rest = torch.ones(48, dtype=torch.bool, device=DEVICE).index_fill_(0, slots, False)
    assert torch.equal(after[rest], before.flatten(0, 1)[rest])


def test_a_head_that_is_no_number_is_read_back_as_none():
    heads = torch.ones(1, 3, 4)
    heads[0, 0, 1], heads[0, 1, 2] = torch.nan, torch.inf
    cache = float8_cache(torch.zeros(1, 16, 3, 4))
    write(cache, torch.tensor([3]), heads)
    found = everything(cache)[0, 3]
    assert found[0].isnan().all() and found[1].isnan().any() and torch.equal(found[2], heads[0, 2])


OPTIONS = st.tuples(st.sampled_from([None, None, 7, 40]), st.sampled_from([None, None, 5.0]), st.booleans())


@settings(max_examples=examples(15), deadline=None)
@given(
    old=st.lists(st.sampled_from([0, 1, 15, 16, 63, 65, 270]), min_size=1, max_size=3),
    group=st.sampled_from([1, 3]),
    d=st.sampled_from([16, 24]),
    options=OPTIONS,
    splits=st.sampled_from([1, 4]),
    kind=st.sampled_from([{"early": True}, {"early": False}, {"even": True}]),
)
def test_decoding_agrees_with_float64_over_the_same_cache(old, group, d, options, splits, kind):
    args, expected = batch((1,) * len(old), tuple(old), 2 * group, 2, d, options)
    assert close(split(args, splits=splits, **kind), expected)


@settings(max_examples=examples(8), deadline=None)
@given(
    layout=st.lists(st.tuples(st.sampled_from([1, 2, 16, 20]), st.sampled_from([0, 1, 50])), min_size=1, max_size=3),
    d=st.sampled_from([16, 24]),
    options=OPTIONS,
)
def test_prompts_agree_with_float64_over_the_same_cache(layout, d, options):
    new, old = zip(*sorted(layout, key=lambda pair: pair[0] > 1), strict=True)
    args, expected = batch(new, old, 4, 2, d, options)
    assert close(cached_attention_triton(*args), expected)


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_kernel_takes_the_scales_into_account(dtype):
    """And a wrong one, which leaves out those of the keys or of the values, is caught."""
    tolerance = 1e-2 if dtype is torch.float16 else 2e-5  # float16: keys are rounded twice, and scores reach 20
    kernels = [
        partial(split, early=False),
        partial(split, early=True),
        partial(split, even=True),
        lambda a: cached_attention_sdpa(*a),
    ]
    for new, old, runs in (((1, 1), (40, 20), kernels), ((20, 3), (0, 40), [lambda a: cached_attention_triton(*a)])):
        args, expected = batch(new, old, 4, 2, 16, dtype=dtype)
        for run in runs:
            assert close(run(args), expected, tolerance)
        for name in ("k_cache", "v_cache"):
            wrong = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            scales = scales_of(wrong[AT[name]])
            scales.copy_(torch.where(scales.isnan(), scales, scales.nanmean()))
            for run in runs:
                assert not close(run(wrong), expected, tolerance)


def test_small_values_do_not_leave_the_range_of_float16():
    args, _ = batch((1,), (200,), 4, 2, 16, dtype=torch.float16)
    scales_of(args[AT["v_cache"]]).mul_(2.0**-12)
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args[3:]]
    expected = OPS["cached_attention"].reference(args[0].double(), *args[1:3], *wide)
    for early in (False, True):
        found = split(args, early=early).double()
        assert (found - expected).norm() / expected.norm() < 4e-3


@pytest.mark.parametrize("few", [rope_kv_write.FEW, 0], ids=["few tokens", "many"])
@pytest.mark.parametrize("case", short(ROPE_CASES, *PARTLY), ids=lambda case: case.name)
def test_the_cache_holds_what_the_reference_writes_and_nothing_else_changes(case, few):
    args = list(case.make(DEVICE, torch.float32, torch.Generator().manual_seed(0)))
    args[5:7] = [float8_cache(cache) for cache in args[5:7]]
    mine, theirs = ([t.clone() for t in args[5:7]] for _ in range(2))
    with mock.patch("graft.ops.paged_attention.reference.clear_new_blocks"):  # the kernel masks instead
        expected = OPS["rope_kv_write"].reference(*args[:5], *theirs, *args[7:])
    with mock.patch.object(rope_kv_write, "FEW", few):
        found = rope_kv_write.rope_kv_write_triton(*args[:5], *mine, *args[7:])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for new, right in zip(mine, theirs, strict=True):
        same(new, right)


def same(new, right):
    """Equal but for numbers between two float8 ones, which sums in another order may round to the other."""
    torch.testing.assert_close(scales_of(new), scales_of(right), rtol=1e-5, atol=0)
    differ = raw(new)[:, : block_of(new)] != raw(right)[:, : block_of(right)]
    assert differ.float().mean() < 0.01
    steps = 2 * ROUNDING
    torch.testing.assert_close(everything(new), everything(right), rtol=steps, atol=1e-3)


@pytest.mark.some(1)
@pytest.mark.parametrize(("new", "old"), [((1, 1), (40, 15)), ((7, 1, 3), (0, 33, 16))])
def test_rotation_write_and_attention_in_one(new, old):
    """The kernel that does it all writes and gives what the steps do; scales of the new tokens left out are seen."""
    g = torch.Generator().manual_seed(0)
    q, k, v, k_cache, v_cache, *rest = make(new, old, 4, 2, 16, PLAIN, DEVICE, torch.float32, g)
    angle = torch.randn(1, 1, sum(new), 8, generator=g).repeat(1, 1, 1, 2).to(DEVICE)
    caches = [float8_cache(cache) for cache in (k_cache, v_cache)]
    runs = {}
    kernels = [OPS["rope_attention"].reference, whole.run_steps] + [whole.run_whole] * (max(new) == 1)
    for kernel in kernels:
        own = [cache.clone() for cache in caches]
        runs[kernel.__name__] = kernel(q, k, v, angle.cos(), angle.sin(), *own, *rest), own
    (expected, right), *others = runs.values()
    for found, own in others:
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        for mine, theirs in zip(own, right, strict=True):
            fed = rest[0] // 16, rest[0] % 16
            torch.testing.assert_close(everything(mine)[fed], everything(theirs)[fed], rtol=2 * ROUNDING, atol=1e-3)


def test_a_prompt_sees_what_the_cache_holds_and_not_what_was_given():
    """So that it is the same in one piece and in several."""
    g = torch.Generator().manual_seed(0)
    q, k, v, k_cache, v_cache, *rest = make((20,), (0,), 4, 2, 16, PLAIN, DEVICE, torch.float32, g)
    caches = [float8_cache(cache * 0) for cache in (k_cache, v_cache)]
    for run in (OPS["paged_attention"].reference, paged_attention_triton):
        found = run(q, k, v, *caches, *rest)
        held = [everything(c).flatten(0, 1)[rest[0]].transpose(0, 1)[None] for c in caches]
        exact = OPS["attention"].reference(q.double(), *(t.double() for t in held), None, 0.25, True)
        assert close(found, exact)
        given_ones = OPS["attention"].reference(q.double(), k.double(), v.double(), None, 0.25, True)
        assert not close(found, given_ones)


def test_which_kernels_take_a_float8_cache_is_said(monkeypatch):
    spec = OPS["cached_attention"]
    args, _ = batch((1, 3), (4, 0), 4, 2, 16)
    call = spec.call(*args)
    assert choose(spec, spec.call(*batch((1, 1), (4, 0), 4, 2, 16)[0])).name == "split_kv"
    assert choose(spec, call).name == "sdpa"
    strided = args[1].repeat(1, 2, 1, 1)[:, : args[1].shape[1]]
    assert "must be contiguous" in spec.kernel("triton").varies(call._replace(k_cache=strided))
    assert "it takes 16 and 32 bits" in spec.kernel("triton").problem(call._replace(v_cache=args[0]))
    old = mock.patch.object(reading, "float8_missing", lambda _: "compute capability 8.0 has no float8")
    with old:
        assert choose(spec, call).name == "reference"
    problem = reading.native_problem(call)
    assert problem is not None and "float8" in problem


def test_rounding_is_to_the_nearest():
    x = torch.tensor([[448.0, 1.0, 1.0624, 1.0626, -0.002, 27.9]])
    codes, scales = rows_to_fp8(x.float())
    assert scales.tolist() == [1.0]
    assert codes.float().tolist() == [[448.0, 1.0, 1.0, 1.125, -0.001953125, 28.0]]
