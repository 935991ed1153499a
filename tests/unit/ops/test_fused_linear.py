"""graft::fused_linear: every kernel with every option against float64, on poisoned memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graft.ops.fused_linear.triton as kernels
from graft.base.errors import KernelUnavailable
from graft.ops import OPS, bind, choose
from graft.ops.cases import tolerance
from graft.ops.fused_linear import op
from graft.ops.fused_linear.cases import LinearCase, make
from graft.ops.fused_linear.choice import Gemm, Matvec
from graft.ops.fused_linear.dequantize import dequantize_triton
from graft.ops.fused_linear.kinds import BalancedGemm, Int4Gemm, IntegerGemm
from graft.ops.fused_linear.op import int4_gemm_call_problem
from graft.ops.fused_linear.reference import fused_linear
from graft.ops.fused_linear.round_rows import FINER, round_rows
from graft.ops.launch import ring
from graft.ops.selection import problem_of
from graft.weights.packing import dequantize, unpack_bytes
from marks import FULL, examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = OPS["fused_linear"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is no number."""
    monkeypatch.setattr(
        kernels, "room", lambda device, dtype, *size: torch.full(size, torch.nan, dtype=dtype, device=device)
    )


def wide(args):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def agrees(run, args, dtype, k):
    exact = fused_linear(*wide(args))
    got = kernels.with_rows(run, *args)
    bound = 4 * tolerance(dtype, k)
    return got.shape == exact.shape and torch.allclose(got.double(), exact, rtol=bound, atol=bound)


SHAPES = st.builds(
    LinearCase,
    rows=st.integers(1, 4),
    n=st.sampled_from([4, 12, 18]),
    k=st.sampled_from([8, 136, 512, 1032]),
    weight=st.sampled_from(["plain", "plain", "int8", "fp8"]),
    bias=st.booleans(),
    norm=st.sampled_from(["", "plain", "cast_last", "layer", "layer_bias"]),
    activation=st.sampled_from(["none", "silu", "gelu_tanh", "relu_squared"]),
    residual=st.booleans(),
    glu=st.booleans(),
    alpha=st.sampled_from([1.0, 0.22]),
)


def arguments(shape, dtype, seed=0):
    return make(shape, DEVICE, dtype, torch.Generator().manual_seed(seed))


@settings(max_examples=examples(25), deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_matvec_agrees_with_float64(shape, rows, warps):
    args = arguments(shape, torch.float32)
    assert agrees(lambda call: kernels.launch_matvec(call, Matvec(rows, warps)), args, torch.float32, shape.k)


@settings(max_examples=examples(25), deadline=None)
@given(
    SHAPES, st.sampled_from(["", "int4"]), st.integers(1, 40), st.sampled_from([16, 32]), st.sampled_from([1, 2, 3]),
    st.booleans(),
)  # fmt: skip
def test_gemm_agrees_with_float64(shape, int4, tokens, rows, splits, inside):
    shape = replace(shape, rows=tokens, weight=int4 or shape.weight)
    how = Gemm(rows=rows, tokens=16, depth=64, splits=splits, norm_inside=inside)
    args = arguments(shape, torch.float32)
    assert agrees(lambda call: kernels.launch_gemm(call, how), args, torch.float32, shape.k)
    assert not ring(torch.device(DEVICE)).zeros.any()  # counters are left as they were found


@settings(max_examples=examples(12), deadline=None)
@given(
    SHAPES,
    st.integers(1, 40),
    st.sampled_from([16, 48, 112]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([4, 60, 130]),
)
def test_even_shares_agree_with_float64(shape, tokens, rows, splits, n):
    """Rows that are the sum of one, two and three powers of two; a last program with few or none of a tile."""
    shape = replace(shape, rows=tokens, weight="plain", n=n)
    how = BalancedGemm(rows=rows, tokens=16, depth=64, splits=splits)
    args = arguments(shape, torch.float32)
    assert agrees(lambda call: kernels.run_as(call, how), args, torch.float32, shape.k)
    assert not ring(torch.device(DEVICE)).zeros.any()


DEPTHS = st.sampled_from([1024, 2048, 3072] if FULL else [1024, 2048])
NARROW = [Int4Gemm(1, 8), Int4Gemm(2, 4), Int4Gemm(4, 2), Int4Gemm(8, 2), Int4Gemm(4, 2, 1), Int4Gemm(8, 2, 2)]


def narrow_as(how):
    def run(call):
        assert int4_gemm_call_problem(call) is None
        return kernels.launch_int4_gemm(call, how)

    return run


@settings(max_examples=examples(12), deadline=None)
@given(
    SHAPES,
    st.integers(1, 8),
    st.sampled_from(NARROW),
    DEPTHS,
    st.booleans(),
)
def test_narrow_agrees_with_float64(shape, tokens, how, k, normed):
    """Steps that end in the middle, and programs that walk over rows."""
    norm = "" if normed or shape.norm == "cast_last" else shape.norm
    how = how if k <= how.warps * how.ahead * 128 else replace(how, each=0)
    shape = replace(shape, rows=tokens, weight="int4", k=k, norm=norm, normed=normed)
    with mock.patch.object(kernels, "processors", lambda _: 1):
        assert agrees(narrow_as(how), arguments(shape, torch.bfloat16), torch.bfloat16, shape.k)


@cache
def right_narrow():
    """How, which shape, and arguments on which the kernel agrees, as long as nothing is wrong."""
    how, shape = Int4Gemm(4, 2), LinearCase(3, 20, 1024, weight="int4", bias=True, normed=True, residual=True)
    args = list(arguments(shape, torch.bfloat16))
    args[0] = args[0] * 3  # else its root mean square is 1
    assert agrees(narrow_as(how), args, torch.bfloat16, shape.k)
    return how, shape, args


QUANTIZED_WRONG = [
    lambda call: call._replace(x=call.x.flip(0)),
    lambda call: call._replace(x=call.x.roll(1, 1)),
    lambda call: call._replace(residual=call.residual.flip(-1)),
    lambda call: call._replace(weight=call.weight.roll(1, 1)),
    lambda call: call._replace(scale=call.scale.roll(1, 0)),
    lambda call: call._replace(normed=False),
    lambda call: call._replace(bias=call.bias.roll(1)),
]


@pytest.mark.some(1)
@pytest.mark.parametrize("wrong", [*QUANTIZED_WRONG, lambda call: call._replace(scale=call.scale.roll(1, 1))])
def test_what_narrow_has_slightly_wrong_is_caught(wrong):
    how, shape, args = right_narrow()
    assert not agrees(lambda call: narrow_as(how)(wrong(call)), args, torch.bfloat16, shape.k)


def test_what_cannot_be_read_by_16_bytes_goes_another_way():
    """x that begins in the middle of 16 bytes, and one whose rows do; another dtype; a norm's weight of 1 + w."""
    shape = LinearCase(2, 16, 1024, weight="int4", norm="plain")
    x, *rest = arguments(shape, torch.bfloat16)
    with mock.patch.object(op, "needs_triton", lambda *_: None):
        call = SPEC.call(x, *rest)
        assert problem_of(SPEC.kernel("int4_gemm"), call) is None
        moved = torch.cat([x.flatten(), x.flatten()[:4]])[4:].view(1, 2, 1024)
        wide = torch.zeros(1, 2, 1028, dtype=torch.bfloat16, device=DEVICE)
        wide[..., :1024] = x
        for other in (moved, wide[..., :1024]):
            assert "16 bytes at a time" in problem_of(SPEC.kernel("int4_gemm"), call._replace(x=other))
            with pytest.raises(KernelUnavailable, match="16 bytes at a time"):  # asked for by name: that one or none
                choose(SPEC, call._replace(x=other), "int4_gemm")
            run = bind(SPEC, call, "int4_gemm").run  # when it is bound, nothing is known of a call's memory
            with pytest.raises(KernelUnavailable, match="16 bytes at a time"):
                run(other, *rest)
        assert "1 + w" in problem_of(SPEC.kernel("int4_gemm"), call._replace(offset=1.0, cast_last=True))
        halves = arguments(shape, torch.float16)
        assert "not torch.float16" in problem_of(SPEC.kernel("int4_gemm"), SPEC.call(*halves))
    assert agrees(lambda call: kernels.launch_gemm(call, kernels.default_gemm(call)), halves, torch.float16, 1024)


@settings(max_examples=examples(12), deadline=None)
@given(
    SHAPES,
    st.integers(1, 20),
    st.sampled_from(["int8", "int4"]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([(64, 16, 1), (32, 8, 2)]),
    st.booleans(),
)
def test_integers_agree_with_float64(shape, tokens, weight, dtype, sizes, normed):
    """More tokens than a block has, depths that fill no step, splits without a step of their own."""
    rows, block, splits = sizes
    shape = replace(shape, rows=tokens, weight=weight, norm="" if normed else shape.norm, normed=normed)
    how = IntegerGemm(rows, block, 128, splits)
    assert agrees(lambda call: kernels.run_as(call, how), arguments(shape, dtype), dtype, shape.k)
    assert not ring(torch.device(DEVICE)).zeros.any()


@pytest.mark.some(3)
@pytest.mark.parametrize("weight", ["int8", "int4"])
@pytest.mark.parametrize("wrong", QUANTIZED_WRONG)
def test_what_integers_have_slightly_wrong_is_caught(wrong, weight):
    shape = LinearCase(3, 20, 512, weight=weight, bias=True, normed=True, residual=True)
    args = list(arguments(shape, torch.bfloat16))
    args[0] = args[0] * 3  # else its root mean square is 1
    how = IntegerGemm(32, 8, 128, 2)
    assert agrees(lambda call: kernels.run_as(call, how), args, torch.bfloat16, shape.k)
    assert not agrees(lambda call: kernels.run_as(wrong(call), how), args, torch.bfloat16, shape.k)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # numpy's, of NaN as int8
def test_a_row_in_two_rows_of_int8_has_15_bits():
    """Of its largest magnitude; a row of zeros stays one, and one with NaN or infinity gives no number."""
    x = torch.randn(6, 200, device=DEVICE) * torch.tensor([1e-30, 1e-3, 1.0, 1e4, 0.0, 1.0], device=DEVICE)[:, None]
    x[5, 7], x[2, 3] = torch.nan, 700.0
    x = x.to(torch.bfloat16)
    weight = torch.zeros(64, 256, dtype=torch.int8, device=DEVICE)
    q, scale = round_rows(kernels.LinearCall(x, weight, scale=torch.ones(64, device=DEVICE)), 256)
    coarse, fine = unpack_plain(q[:, 0]), unpack_plain(q[:, 1])
    back = (coarse.double() + fine.double() / FINER) * scale.double()[:, None]
    error = (back - x.double()).abs().amax(1)
    assert (error[:4] <= x[:4].double().abs().amax(1) * 2**-15).all() and error[4] == 0
    assert scale[5].isnan()
    coarsely = coarse.double() * scale.double()[:, None]
    assert ((coarsely - x.double()).abs().amax(1)[1:4] > x[1:4].double().abs().amax(1) * 2**-9).all()


def unpack_plain(q):
    """Out of the order of 8-bit weights, of which the sign bit is not turned over here."""
    return unpack_bytes(q.contiguous().view(torch.float8_e4m3fn), 200).view(torch.int8)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_a_layer_norm_takes_the_mean_off(activation, tokens):
    """Rows far from 0 give what they give around it; divided by their root mean square they would not."""
    shape = LinearCase(tokens, 20, 1032, norm="layer_bias", activation=activation)
    args = arguments(shape, torch.float32)
    far = [args[0] + 4.0, *args[1:]]
    run = lambda call: kernels.launch_matvec(call, Matvec(2, 2))  # noqa: E731
    assert agrees(run, far, torch.float32, 1032)
    assert torch.allclose(kernels.with_rows(run, *far), kernels.with_rows(run, *args), rtol=1e-3, atol=1e-3)
    wrong = (lambda call: call._replace(center=False), lambda call: call._replace(norm_bias=None))
    for change in wrong:
        assert not agrees(lambda call, change=change: run(change(call)), far, torch.float32, 1032)


def test_where_there_is_nothing_to_multiply_the_rest_is_there():
    """No kernel takes it; which it would be is asked all the same."""
    assert torch.ops.graft.fused_linear(torch.randn(2, 3, 8), torch.randn(0, 8)).shape == (2, 3, 0)
    bias = torch.randn(5)
    found = torch.ops.graft.fused_linear(torch.randn(2, 3, 0), torch.randn(5, 0), bias)
    assert torch.equal(found, bias.expand(2, 3, 5))
    with mock.patch.object(op, "needs_triton", lambda *_: None):
        call = SPEC.call(torch.randn(2, 3, 0), torch.randn(5, 0), bias)
        assert problem_of(SPEC.kernel("gemm"), call) == "there is nothing to multiply"


def test_of_float32_more_than_15_bits_are_kept():
    shape = LinearCase(3, 20, 512, weight="int8")
    with mock.patch.object(op, "needs_triton", lambda *_: None):
        assert "keeps 15 bits" in problem_of(SPEC.kernel("integer_gemm"), SPEC.call(*arguments(shape, torch.float32)))
        call = SPEC.call(*arguments(shape, torch.bfloat16))
        assert problem_of(SPEC.kernel("integer_gemm"), call) is None
        plain = replace(shape, weight="plain")
        problem = problem_of(SPEC.kernel("integer_gemm"), SPEC.call(*arguments(plain, torch.bfloat16)))
        assert "int8 and int4 weights" in problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [200, 512, 1096])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_weights_are_widened_to_what_they_stand_for(kind, k, dtype):
    """Rows and columns that fill no block, each with the scale of its row or group, rounded once."""
    call = kernels.LinearCall(*arguments(LinearCase(1, 21, k, weight=kind), torch.float32))
    words = kernels.words_of(call.weight)
    found = dequantize_triton(words, call.scale, kind, k, dtype)
    expected = dequantize(call.weight, call.scale, k, torch.float32).to(dtype)
    step = 2**-7 if dtype is torch.bfloat16 else 0  # Triton's interpreter cuts off
    assert found.shape == (21, k) and torch.allclose(found.double(), expected.double(), rtol=step, atol=0)
    wrong = dequantize_triton(words, call.scale.flip(0), kind, k, dtype)
    assert not torch.allclose(wrong.double(), expected.double(), rtol=step, atol=0)


@settings(max_examples=examples(15), deadline=None)
@given(SHAPES, st.sampled_from(["", "int4"]), st.integers(1, 9))
def test_torchs_own_product_agrees_with_float64(shape, int4, tokens):
    shape = replace(shape, rows=tokens, weight=int4 or shape.weight)
    assert agrees(kernels.library, arguments(shape, torch.float32), torch.float32, shape.k)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda call: call._replace(x=call.x + 0.01),
        lambda call: call._replace(norm=call.norm.flip(0)),
        lambda call: call._replace(residual=call.residual.flip(-1)),
        lambda call: call._replace(weight=call.weight.roll(1, 0)),
        lambda call: call._replace(bias=call.bias.roll(1)),
        lambda call: call._replace(eps=call.eps + 0.01),
    ],
)
@pytest.mark.parametrize("kernel", ["matvec", "gemm", "balanced_gemm"])
def test_what_is_slightly_wrong_is_caught(wrong, kernel):
    shape = LinearCase(2, 12, 512, bias=True, norm="plain", residual=True)
    run = {
        "matvec": lambda call: kernels.launch_matvec(call, Matvec(2, 2)),
        "gemm": lambda call: kernels.launch_gemm(call, Gemm(rows=16, tokens=16, depth=64, splits=2)),
        "balanced_gemm": lambda call: kernels.launch_balanced_gemm(call, BalancedGemm(rows=48, tokens=16, splits=2)),
    }[kernel]
    args = arguments(shape, torch.float32)
    assert agrees(run, args, torch.float32, shape.k)
    assert not agrees(lambda call: run(wrong(call)), args, torch.float32, shape.k)


@pytest.mark.parametrize("weight", ["int8", "int4", "fp8"])
def test_a_scale_of_another_row_is_caught(weight):
    shape = LinearCase(1, 16, 512, weight=weight)
    args = arguments(shape, torch.float32)
    run = lambda call: kernels.launch_gemm(call, Gemm(rows=16, tokens=16, depth=64))  # noqa: E731
    assert agrees(run, args, torch.float32, shape.k)
    assert not agrees(lambda call: run(call._replace(scale=call.scale.roll(1, 0))), args, torch.float32, shape.k)


def test_rows_of_any_shape_and_layout_are_taken():
    shape = LinearCase(6, 12, 136, norm="plain", residual=True)
    x, *rest = arguments(shape, torch.float32)
    rest[9] = rest[9].view(2, 3, 12)  # the residual
    across = x.view(2, 3, 136).transpose(0, 1).contiguous().transpose(0, 1)  # the same values, other strides
    assert agrees(
        lambda call: kernels.launch_gemm(call, Gemm(rows=16, depth=64)), [across, *rest], torch.float32, 136
    )
    strided = x.view(2, 3, 136).transpose(1, 2).contiguous().transpose(1, 2)
    assert agrees(lambda call: kernels.run_as(call, None), [strided, *rest], torch.float32, 136)


def test_a_cpu_takes_the_reference_and_says_why():
    args = make(LinearCase(1, 8, 64), "cpu", torch.float32, torch.Generator().manual_seed(0))
    call = SPEC.call(*args)
    chosen = choose(SPEC, call)
    assert chosen.name == "reference" and {name for name, _ in chosen.skipped} == {k.name for k in SPEC.kernels}
    assert "run on a GPU" in dict(chosen.skipped)["gemm"]
    with mock.patch.object(op, "needs_triton", lambda *_: None):
        assert "the weight torch.float32" in SPEC.kernel("gemm").problem(call._replace(x=call.x.half()))
