"""graft::fused_linear on a GPU: every format at every batch size, as the tables choose and by each kernel by name."""

from __future__ import annotations

import pytest
import torch

from graft.ops import OPS, bind
from graft.ops.cases import tolerance
from graft.ops.fused_linear.cases import LinearCase, make
from graft.ops.fused_linear.kinds import BalancedGemm, Int4Gemm
from graft.ops.fused_linear.reference import fused_linear
from graft.ops.fused_linear.triton import run_as, with_rows
from graft.ops.selection import problem_of

SPEC = OPS["fused_linear"]
TOKENS = (1, 2, 3, 4, 5, 16, 17, 64, 65, 128, 129, 300, 2048)


def arguments(shape, dtype):
    return make(shape, "cuda", dtype, torch.Generator().manual_seed(shape.rows))


def off_by(got, args):
    """How far from float64, in units of the tolerance."""
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    exact = fused_linear(*wide)
    bound = 4 * tolerance(args[0].dtype, args[0].shape[-1])
    return ((got.double() - exact).abs() / (bound * (1 + exact.abs()))).max().item()


def as_measured(*args):
    """As a graph calls it: bound once, and chosen by the tokens of every call."""
    return bind(SPEC, SPEC.call(*args)).run(*args)


@pytest.mark.parametrize(
    "options", [{"norm": "plain", "activation": "silu"}, {"residual": True}], ids=["gated", "sum"]
)
@pytest.mark.parametrize("weight", ["plain", "int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_batch_is_right_and_again(dtype, weight, options):
    """Twice each: the second run finds the counters as the first left them."""
    for tokens in TOKENS if dtype is torch.bfloat16 else (1, 3, 16, 65, 129):
        args = arguments(LinearCase(tokens, 512, 1152, weight=weight, **options), dtype)
        for _ in range(2):
            assert off_by(as_measured(*args), args) < 1, tokens


@pytest.mark.parametrize("kernel", SPEC.kernels, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("weight", ["plain", "int8", "fp8", "int4"])
def test_every_kernel_by_name_is_right_and_what_is_wrong_is_caught(kernel, weight):
    for tokens in (1, 4, 40, 200):
        args = arguments(
            LinearCase(tokens, 384, 1024, weight=weight, norm="plain", bias=True, residual=True), torch.bfloat16
        )
        if problem_of(kernel, SPEC.call(*args)) is not None:
            continue
        got = kernel.run(*args)
        assert off_by(got, args) < 1
        assert off_by(got.roll(1, -1), args) > 10


@pytest.mark.parametrize(
    "how",
    [
        BalancedGemm(112, 64, 128, 1, 4, 3),
        BalancedGemm(128, 64, 64, 4, 4, 5, 8),
        BalancedGemm(48, 128, 64, 3, 8, 3, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options", [{"norm": "plain", "activation": "silu"}, {"residual": True, "bias": True}], ids=["gated", "sum"]
)
def test_even_shares_are_right_and_again(how, dtype, options):
    for tokens, n, k in ((17, 512, 1152), (64, 1000, 1024), (130, 30, 2056)):
        args = arguments(LinearCase(tokens, n, k, **options), dtype)
        for _ in range(2):
            got = with_rows(lambda call: run_as(call, how), *args)
            assert off_by(got, args) < 1, (tokens, n, k)
        assert off_by(got.roll(1, -1), args) > 10


@pytest.mark.parametrize(
    "how",
    [Int4Gemm(), Int4Gemm(4, 8, 0, 128), Int4Gemm(4, 8, 3), Int4Gemm(8, 4, 0, 96), Int4Gemm(8, 8), Int4Gemm(4, 2)],
)
@pytest.mark.parametrize(
    "options",
    [{"normed": True, "activation": "silu"}, {"norm": "plain", "bias": True}, {"residual": True}],
    ids=["gated", "norm", "sum"],
)
def test_narrow_is_right_and_again(how, options):
    """Words in registers are where the instruction wants them: that is decided by the compiler, for each variant."""
    for tokens, n, k in ((1, 512, 2048), (2, 30, 1024), (5, 1000, 3072), (8, 4096, 4096), (8, 512, 14336)):
        if how.each and k > 4096:
            continue
        args = arguments(LinearCase(tokens, n, k, weight="int4", **options), torch.bfloat16)
        for _ in range(2):
            assert problem_of(SPEC.kernel("int4_gemm"), SPEC.call(*args)) is None
            got = SPEC.kernel("int4_gemm").run(*args, how=how)
            assert off_by(got, args) < 1, (tokens, n, k)
        assert off_by(got.roll(1, -1), args) > 10


@pytest.mark.parametrize("weight", ["int8", "int4"])
@pytest.mark.parametrize(
    "options",
    [{"norm": "plain", "activation": "silu"}, {"residual": True, "bias": True}, {}],
    ids=["gated", "sum", "plain"],
)
def test_weights_widened_ahead_of_tensor_cores_are_right_and_again(weight, options):
    """Tiles that end within rows, tokens and depth; shares of the depth, whose sums are the same bits every time."""
    kernel = SPEC.kernel("mixed_gemm")
    for tokens, n, k in (
        (1, 512, 1152),
        (64, 1000, 1024),
        (65, 24, 2056),
        (128, 4096, 4096),
        (300, 1536, 4104),
        (513, 6144, 512),
    ):
        args = arguments(LinearCase(tokens, n, k, weight=weight, **options), torch.bfloat16)
        assert problem_of(kernel, SPEC.call(*args)) is None
        got = kernel.run(*args)
        assert off_by(got, args) < 1, (tokens, n, k)
        assert off_by(got.roll(1, -1), args) > 10
        for _ in range(3):
            assert torch.equal(kernel.run(*args), got), (tokens, n, k)


@pytest.mark.parametrize("weight", ["int8", "int4"])
def test_a_chain_of_them_in_a_cuda_graph_waits_for_what_it_reads(weight):
    """Each kernel begins while the one before it may still write its x."""
    layers = [arguments(LinearCase(96, 1024, 1024, weight=weight), torch.bfloat16) for _ in range(2)]
    kernel, first = SPEC.kernel("mixed_gemm"), layers[0][0]

    def chain(x):
        for layer in layers * 8:
            x = kernel.run(x, *layer[1:])
            x = x / x.float().abs().amax().to(x.dtype)
        return x

    expected, x = chain(first), first.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, expected)
    x.copy_(first.flip(-2))
    graph.replay()
    assert torch.equal(out, chain(first.flip(-2))) and not torch.equal(out, expected)


def test_one_row_and_odd_depths():
    for n, k in ((1, 512), (7, 1000), (64, 520), (40, 4100)):
        args = arguments(LinearCase(1, n, k, norm="plain"), torch.bfloat16)
        assert off_by(as_measured(*args), args) < 1, (n, k)


def test_nothing_waits_for_the_gpu():
    args = arguments(LinearCase(1, 512, 1024, norm="plain", activation="silu"), torch.bfloat16)
    as_measured(*args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        as_measured(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
