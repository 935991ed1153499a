"""graft::fused_linear with activations rounded to float8: the kernels around torch's GEMM, against the reference.

Run on a GPU as well: there float8 tensor cores multiply.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graft.ops.fused_linear.scaled as scaled
import graft.ops.fused_linear.triton as kernels
from graft.ops import OPS, choose
from graft.ops.fused_linear import op
from graft.ops.fused_linear.cases import LinearCase, make
from graft.ops.fused_linear.reference import fp8_rows, fused_linear, rounds
from graft.ops.fused_linear.round_rows import round_rows
from graft.ops.selection import problem_of
from marks import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FROM = 3  # tokens
OPTIONS = [
    {},
    {"normed": True, "activation": "silu"},
    {"norm": "plain", "bias": True},
    {"norm": "cast_last", "activation": "gelu_tanh"},
    {"bias": True, "residual": True},
    {"activation": "relu_squared", "residual": True, "glu": False, "alpha": 0.5},
]


def arguments(shape, dtype, seed=0):
    return make(shape, DEVICE, dtype, torch.Generator().manual_seed(seed))


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def agrees(run, args, dtype):
    """In float32 to the order of sums. In 16 bits a value that is rounded another way before the float8 numbers are
    chosen moves some of them: the error of the whole may be what the reference's own rounding makes it."""
    rounding = (*args[:12], FROM, *args[13:])
    got = kernels.with_rows(run, *rounding)
    exact = fused_linear(*args)
    if got.shape != exact.shape:
        return False
    own = distance(fused_linear(*rounding), exact)
    if dtype is torch.float32:
        return distance(got, fused_linear(*rounding)) < (1e-3 if DEVICE == "cuda" else 1e-5)  # fast sums on a GPU
    return 0.5 * own < distance(got, exact) < 1.35 * own + 0.005


@pytest.mark.some(3)
@pytest.mark.parametrize("few", [0, 512], ids=["scaled product", "scales after it"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_give_what_the_reference_does(few, options, dtype, monkeypatch):
    monkeypatch.setattr(scaled, "FEW_TOKENS", few)
    for tokens, n, k in ((FROM, 64, 576), (9, 32, 200)):
        args = arguments(LinearCase(tokens, n, k, weight="fp8", **options), dtype)
        assert agrees(scaled.launch_scaled, args, dtype), (tokens, k)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda call: call._replace(scale=call.scale.roll(1, 0)),
        lambda call: call._replace(norm=None),
        lambda call: call._replace(eps=0.5),
        lambda call: call._replace(residual=None),
        lambda call: call._replace(fp8_from=0),  # weights alone
        lambda call: call._replace(alpha=0.5),
        lambda call: call._replace(x=call.x.roll(1, 1)),
    ],
    ids=[
        "scale of another row",
        "no norm",
        "another eps",
        "no residual",
        "not rounded",
        "another multiple",
        "columns moved",
    ],
)
def test_what_is_wrong_is_caught(wrong):
    args = arguments(LinearCase(9, 32, 576, weight="fp8", norm="plain", residual=True), torch.float32)
    assert agrees(scaled.launch_scaled, args, torch.float32)

    def rounded(call):
        return scaled.launch_scaled(call) if call.fp8_from else kernels.run_as(call, None)

    assert not agrees(lambda call: rounded(wrong(call)), args, torch.float32)


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.integers(1, 5),
    k=st.sampled_from([1, 31, 64, 200, 576]),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
    outlier=st.sampled_from([1.0, 100.0, 1e5]),
    seed=st.integers(0, 99),
)
def test_rows_are_rounded_as_the_reference_rounds_them(rows, k, size, outlier, seed):
    """Each row by itself, whatever its size; zeros stay zeros; what lies beyond k is 0."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * size
    x[0, 0] *= outlier
    x[-1, k // 2] = 0
    weight = torch.zeros((16, -(-k // 64) * 64), dtype=torch.float8_e4m3fn, device=DEVICE)
    q, scales = round_rows(kernels.LinearCall(x, weight, scale=torch.ones(16, device=DEVICE)), weight.shape[1])
    runs = q.float().view(rows, -1, 32, 2).transpose(2, 3).reshape(rows, -1)
    torch.testing.assert_close(runs[:, :k] * scales[:, None], fp8_rows(x), rtol=1e-6, atol=0)
    assert not runs[:, k:].any()


def test_a_row_of_zeros_and_of_no_numbers():
    x = torch.zeros(3, 64, device=DEVICE)
    x[1, 5] = torch.nan
    x[2] = 1.0
    weight = torch.ones((16, 64), device=DEVICE).to(torch.float8_e4m3fn)
    got = scaled.launch_scaled(kernels.LinearCall(x, weight, scale=torch.ones(16, device=DEVICE), fp8_from=2))
    assert (got[0] == 0).all() and got[1].isnan().all() and torch.allclose(got[2], torch.full_like(got[2], 64.0))


def test_from_how_many_tokens_on_and_which_kernel_says_so():
    x = torch.zeros(1, 4, 8)
    assert rounds(x, 4) and rounds(x, 1) and not rounds(x, 5) and not rounds(x, 0)
    spec = OPS["fused_linear"]
    call = spec.call(*arguments(LinearCase(4, 32, 64, weight="fp8"), torch.bfloat16))._replace(fp8_from=4)
    assert "rounded to float8 from 4 tokens on" in spec.kernel("gemm").varies(call)
    assert "rounded to float8 from 4 tokens on" in spec.kernel("matvec").varies(call)
    later, never = call._replace(fp8_from=5), call._replace(fp8_from=0)
    plain = spec.call(*arguments(LinearCase(4, 32, 64), torch.bfloat16))._replace(fp8_from=4)
    with mock.patch.object(op, "needs_triton", lambda *_: None):
        problems = [problem_of(spec.kernel("scaled_mm"), one) for one in (call, later, never, plain)]
        assert choose(spec, call).name == "scaled_mm" and choose(spec, later).name != "scaled_mm"
    assert problems[0] is None and problems[1] == problems[2] == "rows of x are not to be rounded to float8"
    assert "multiplies with float8 weights" in problems[3]
