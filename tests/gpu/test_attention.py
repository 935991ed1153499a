"""Attention over the paged cache on a GPU: every kernel against float64, no waits, and replays of recorded calls."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch

from graft.ops import OPS
from graft.ops.cached_attention.cases import CASES
from graft.ops.cached_attention.decode.triton import split_kv
from graft.ops.cached_attention.decode_call import NewHeads
from graft.ops.cases import tolerance
from graft.ops.paged_batches import make
from graft.ops.rope_kv_write.cases import CASES as ROPE_CASES
from graft.ops.selection import problem_of

SPEC = OPS["cached_attention"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLAIN = (None, None, False)
AT = {
    argument.name: index for index, argument in enumerate(torch.ops.graft.cached_attention.default._schema.arguments)
}


def wide(args):
    """The same values in float64."""
    return [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]


def cached(new, old, h, kv, d, options, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, _, _, k_cache, v_cache, _, *rest = make(new, old, h, kv, d, options, "cuda", dtype, g)
    return q, k_cache, v_cache, *rest


def named(args):
    """What split_kv takes of the op's arguments."""
    return [args[AT[name]] for name in ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "scale")]


def assert_close(found, expected, dtype, reduction, what=""):
    """Relative to the largest value of each head: the mean of 9,000 values is small, and so must its error be."""
    error = (found.double() - expected).abs().amax(-1) / expected.abs().amax(-1)
    worst, bound = error.max().item(), 4 * tolerance(dtype, reduction)
    assert worst <= bound, f"{what}: off by {worst:.2e} of the largest value, {bound:.2e} is allowed"


def check(args, dtype, reduction, also=()):
    """Runs every kernel that takes the call, and those in `also`, and returns their names."""
    expected = SPEC.reference(*wide(args))
    ran = []
    for kernel in SPEC.kernels:
        if problem_of(kernel, SPEC.call(*args)) is None or kernel.name in also:
            poison = torch.full((4 * args[0].numel(),), torch.nan, dtype=dtype, device="cuda")
            del poison  # the next tensors are made where NaN was
            assert_close(kernel.run(*args), expected, dtype, reduction, kernel.name)
            ran.append(kernel.name)
    return ran


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_agree_with_float64(case, dtype):
    args = case.make("cuda", dtype, torch.Generator().manual_seed(0))
    assert "triton" in check(args, dtype, case.reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h", "kv", "d"), [(32, 8, 128), (32, 8, 64), (8, 8, 96), (8, 1, 256), (9, 3, 64)])
def test_random_batches_agree_with_float64(h, kv, d, dtype):
    chance = random.Random(h * d)
    for seed in range(4):
        n = chance.choice([1, 3, 8])
        old = tuple(chance.choice([0, 15, 16, 255, 1000, 4097, 9000]) for _ in range(n))
        options = chance.choice([PLAIN, (100, None, False), (None, 30.0, False), (1000, None, True)])
        assert "split_kv" in check(cached((1,) * n, old, h, kv, d, options, dtype, seed), dtype, 9000)
        new = (1, *(chance.choice([2, 17, 64, 200]) for _ in range(min(n, 3))))
        some = tuple(chance.choice([0, 16, 255, 2000]) for _ in new)
        assert "triton" in check(cached(new, some, h, kv, d, options, dtype, seed), dtype, 2000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_kernels_take_a_prompt_of_its_own_and_behind_a_prefix(dtype):
    for new, old in (((700,), (0,)), ((130,), (1000,)), ((1, 1, 300, 40), (900, 5, 0, 77))):
        args = cached(new, old, 32, 8, 128, PLAIN, dtype)
        flash = [] if dtype is torch.float32 else ["flash"]
        assert check(args, dtype, 1200, also=("sdpa",)) == [*flash, "sdpa", "triton"]
        assert (problem_of(SPEC.kernel("sdpa"), SPEC.call(*args)) is None) == (dtype is torch.float32)
        expected = SPEC.reference(*wide(args))
        with pytest.raises(AssertionError, match="off by"):
            assert_close(SPEC.kernel("sdpa").run(*args[:8], args[8] * 1.5), expected, dtype, 1200)


def test_long_prompts_go_to_torchs_kernel():
    args = cached((4096,), (0,), 4, 1, 128, PLAIN, torch.bfloat16)
    assert check(args, torch.bfloat16, 4096) == ["flash", "sdpa", "triton"]
    behind = cached((4096,), (16,), 4, 1, 128, PLAIN, torch.bfloat16)
    assert "one launch for all is quicker" in problem_of(SPEC.kernel("sdpa"), SPEC.call(*behind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h", "kv", "d"), [(32, 8, 128), (8, 8, 256), (9, 9, 96)])
def test_very_many_sequences_have_a_warp_each(h, kv, d, dtype):
    old = tuple(range(0, 1700, 13))
    args = cached((1,) * len(old), old, h, kv, d, PLAIN, dtype)
    assert "split_kv" in check(args, dtype, 1700)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("h", "kv", "d"), [(32, 8, 128), (14, 2, 64), (8, 4, 256), (64, 1, 128), (9, 3, 64)])
def test_prompts_on_hopper(h, kv, d, dtype):
    """Prompts beside sequences that decode, behind prefixes, in windows smaller and larger than a tile of keys."""
    for window in (None, 5, 100, 1000):
        for new, old in (((64,), (0,)), ((1, 1, 300, 129), (700, 5, 900, 0)), ((1025, 65, 400), (0, 31, 2000))):
            args = cached(new, old, h, kv, d, (window, None, False), dtype)
            assert "flash" in check(args, dtype, 2500)
            wrong = list(args)
            wrong[AT["seq_lens"]] = args[AT["seq_lens"]] - 1  # keys are one position off
            with pytest.raises(AssertionError, match="off by"):
                assert_close(SPEC.kernel("flash").run(*wrong), SPEC.reference(*wide(args)), dtype, 2500)


def test_a_broken_sequence_breaks_no_other_on_hopper():
    args = cached((100, 200), (0, 60), 32, 8, 128, PLAIN, torch.bfloat16)
    expected = SPEC.reference(*wide(args))
    for name in ("k_cache", "v_cache"):
        args[AT[name]][args[AT["block_tables"]][1, :2]] = torch.nan  # the first blocks of the second
    found = SPEC.kernel("flash").run(*args)
    assert_close(found[:, :100], expected[:, :100], torch.bfloat16, 300)
    assert found[:, 100:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h", "kv", "d"), [(32, 8, 128), (32, 8, 64), (8, 8, 256), (9, 9, 96), (32, 2, 128)])
@pytest.mark.parametrize("options", [PLAIN, (100, None, True), (None, 30.0, False)])
def test_even_shares_agree_with_float64(h, kv, d, options, dtype):
    """And with many programs to a context, and many contexts to a program."""
    for old in (tuple(range(0, 1700, 13)), (9000, 0, 4097, 15), (3,) * 300):
        args = cached((1,) * len(old), old, h, kv, d, options, dtype)
        given = *named(args), *args[AT["scale"] + 1 :]
        assert_close(split_kv(*given, even=True), SPEC.reference(*wide(args)), dtype, max(old))


@pytest.mark.parametrize("kind", [{"early": False}, {"early": True}, {"even": True}], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 16, 64])
def test_parts_are_put_together_many_times(splits, kind):
    """Again and again with the same counters: each call leaves them as it found them."""
    args = cached((1,) * 5, (9, 8000, 300, 64, 2047), 32, 8, 128, PLAIN, torch.bfloat16)
    expected = SPEC.reference(*wide(args))
    q, k_cache, v_cache, tables, seq_lens, scale = named(args)
    for _ in range(50):
        out = torch.full((1, 5, 32, 128), torch.nan, dtype=q.dtype, device="cuda")
        split_kv(q, k_cache, v_cache, tables, seq_lens, scale, out=out, splits=splits, **kind)
        assert_close(out, expected, torch.bfloat16, 8000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: case.name)
def test_rope_kv_write_writes_what_the_reference_writes(case, dtype):
    args = case.make("cuda", dtype, torch.Generator().manual_seed(0))
    exact = wide([t.clone() if isinstance(t, torch.Tensor) else t for t in args])
    expected = OPS["rope_kv_write"].reference(*exact)
    before = [cache.clone() for cache in args[5:7]]
    assert_close(OPS["rope_kv_write"].kernel("triton").run(*args), expected, dtype, case.reduction)
    for new, right, old in zip(args[5:7], exact[5:7], before, strict=True):
        flat, wanted, untouched = (t.view(-1, *t.shape[2:]) for t in (new, right, old))
        assert_close(flat[args[7]], wanted[args[7]], dtype, case.reduction)
        flat[args[7]] = untouched[args[7]]
        assert torch.equal(flat, untouched)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("new", [(1,) * 4, (200, 3)], ids=["decode", "prompts"])
def test_rotations_have_eagers_bits(new, dtype):
    g = torch.Generator().manual_seed(0)
    q, k, v, *caches, slots, _, tables, _, seq_lens, _, scale, _, _, _ = make(
        new, (9,) * len(new), 32, 8, 128, PLAIN, "cuda", dtype, g
    )
    angle = torch.randn(1, 1, sum(new), 64, generator=g).repeat(1, 1, 1, 2).cuda()
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    spec, right, own = OPS["rope_kv_write"], *([cache.clone() for cache in caches] for _ in range(2))
    expected = spec.reference(q, k, v, cos, sin, *right, slots)
    assert torch.equal(spec.kernel("triton").run(q, k, v, cos, sin, *own, slots), expected)
    written = [cache.flatten(0, 1)[slots] for cache in right]  # the reference also clears what lies behind them
    assert all(torch.equal(cache.flatten(0, 1)[slots], new) for cache, new in zip(own, written, strict=True))
    assert torch.equal(OPS["rope"].kernel("triton").run(q, cos, sin), expected)
    if max(new) == 1:
        for even in (False, True):
            own = [cache.clone() for cache in caches]
            split_kv(q, *own, tables, seq_lens, scale, even=even, rotation=NewHeads(k, v, cos, sin))
            assert all(torch.equal(cache.flatten(0, 1)[slots], new) for cache, new in zip(own, written, strict=True))


@pytest.mark.parametrize(
    ("new", "old", "options"),
    [
        ((1,) * 4, (40, 900, 3, 16), PLAIN),
        ((200,), (0,), PLAIN),
        ((1, 30, 64), (77, 500, 0), PLAIN),
        ((1, 30, 64), (77, 500, 0), (None, 20.0, False)),
    ],
)
def test_nobody_waits_for_the_gpu(new, old, options):
    args = cached(new, old, 8, 2, 64, options, torch.bfloat16)
    torch.ops.graft.cached_attention(*args)  # kernels are compiled outside
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.graft.cached_attention(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [{"early": False}, {"early": True}, {"even": True}], ids=str)
def test_a_recorded_decode_follows_the_lengths(kind):
    n, h, kv, d = 3, 32, 8, 128
    args = cached((1,) * n, (9000, 5000, 40), h, kv, d, PLAIN, torch.bfloat16)
    q, k_cache, v_cache, tables, seq_lens, scale = named(args)
    query_lens = args[AT["lens_cpu"]][:, 0]
    out = torch.empty(1, n, h, d, dtype=q.dtype, device="cuda")
    split_kv(q, k_cache, v_cache, tables, seq_lens, scale, out=out, **kind)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        split_kv(q, k_cache, v_cache, tables, seq_lens, scale, out=out, **kind)
    for now in ((9001, 5001, 41), (1, 64, 65), (300, 17, 41), (2, 1, 1), (9001, 1, 16)):
        seq_lens.copy_(torch.tensor(now))
        out.fill_(torch.nan)
        graph.replay()
        lens_cpu = torch.stack((query_lens, torch.tensor(now)), dim=1)
        expected = SPEC.reference(*wide((*args[: AT["lens_cpu"]], lens_cpu, scale)))
        assert_close(out, expected, torch.bfloat16, 9000, str(now))


def test_a_recorded_mixture_takes_its_sizes_from_the_gpu():
    """What the CPU said when it was captured may not stay in the capture."""
    args = cached((1, 6, 9), (40, 20, 0), 8, 2, 64, PLAIN, torch.float32)
    with mock.patch("graft.ops.cached_attention.triton.counted_on_device", lambda *_: True):
        SPEC.kernel("triton").run(*args)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.graft.cached_attention(*args)
    other = cached((5, 1, 10), (12, 25, 0), 8, 2, 64, PLAIN, torch.float32, seed=1)
    for mine, theirs in zip(args[3:7], other[3:7], strict=True):
        mine[..., : theirs.shape[-1]].copy_(theirs[..., : mine.shape[-1]])
    for mine, theirs in zip(args[:3], other[:3], strict=True):
        mine[: theirs.shape[0]].copy_(theirs[: mine.shape[0]])
    graph.replay()
    expected = SPEC.reference(*wide((*args[:7], other[7], *args[8:])))
    assert_close(out, expected, torch.float32, 64)
