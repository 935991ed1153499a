"""Triton kernels of norms and linear layers: rows and vectors that do not lie as a kernel reads them."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.fx import Graph

import graft.ops.fused_linear.triton as linear_kernels
from graft.backends.native.ops.linear import check_vector
from graft.backends.native.program import NotLowered
from graft.ops import OPS
from graft.ops.add_rms_norm.reference import add_rms_norm
from graft.ops.add_rms_norm.triton import add_rms_norm_triton
from graft.ops.fused_linear import op as linear_op
from graft.ops.fused_linear.kinds import BalancedGemm, Gemm, Matvec
from graft.ops.fused_linear.reference import fused_linear
from graft.ops.l2_norm.reference import l2_norm
from graft.ops.l2_norm.triton import l2_norm_triton
from graft.ops.layer_norm.reference import layer_norm
from graft.ops.layer_norm.triton import layer_norm_triton
from graft.ops.rms_norm.reference import rms_norm
from graft.ops.rms_norm.triton import rms_norm_triton
from graft.ops.rope_attention.cases import CASES

D = 24


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def channels_last(seed=0):
    """As ConvNeXt norms its channels: of one picture, `reshape` gives a view whose rows do not lie side by side."""
    return randn(1, D, 3, 5, seed=seed).permute(0, 2, 3, 1)


NORMS = {
    "layer_norm": (layer_norm_triton, layer_norm, lambda: (channels_last(), randn(D), randn(D, seed=1), 1e-5)),
    "rms_norm": (rms_norm_triton, rms_norm, lambda: (channels_last(), randn(D), 1e-5)),
    "a residual": (
        rms_norm_triton,
        rms_norm,
        lambda: (randn(1, 3, 5, D), randn(D), 1e-5, 0.0, False, None, channels_last(2)),
    ),
    "add_rms_norm": (add_rms_norm_triton, add_rms_norm, lambda: (channels_last(), channels_last(2), randn(D), 1e-5)),
    "l2_norm": (l2_norm_triton, l2_norm, lambda: (channels_last(), 1e-5)),
}


@pytest.mark.parametrize("name", NORMS)
def test_rows_of_a_permuted_tensor(name):
    kernel, reference, make = NORMS[name]
    torch.testing.assert_close(kernel(*make()), reference(*make()))


def test_a_vector_that_does_not_lie_side_by_side_has_no_kernel():
    x, strided, one = randn(2, 3, D), randn(2 * D)[::2], randn(1)
    norm, layer, added = OPS["rms_norm"], OPS["layer_norm"], OPS["add_rms_norm"]
    for vector in (strided, one, one.expand(D)):
        for spec, call in (
            (norm, norm.call(x, vector, 1e-5)),
            (layer, layer.call(x, vector, None, 1e-5)),
            (layer, layer.call(x, None, vector, 1e-5)),
            (added, added.call(x, x, vector, 1e-5)),
        ):
            assert f"not {D} in a row" in spec.kernel("triton").problem(call)


@pytest.mark.parametrize(("op", "kernel"), [("rope_kv_write", "triton"), ("rope_attention", "steps")])
def test_norms_of_heads_that_do_not_lie_side_by_side_have_no_kernel(op, kernel):
    spec = OPS[op]
    case = next(one for one in CASES if one.name == "qwen3 decode, norms")
    call = OPS["rope_attention"].call(*case.make("cpu", torch.float32, torch.Generator().manual_seed(0)))
    given = {name: getattr(call, name) for name in spec.call._fields if name != "asker"}
    strided = spec.call(**given | {"k_norm": randn(2 * call.q.shape[-1])[::2]})
    problem = spec.kernel(kernel).problem
    assert "in a row" in problem(strided) and "in a row" not in problem(spec.call(**given))


def test_a_linear_layer_whose_bias_is_spread_has_no_kernel(monkeypatch):
    """torch adds a bias of one value to every row; a kernel would read what lies behind it."""
    monkeypatch.setattr(linear_op, "needs_triton", lambda *_: None)
    x, weight, spec = randn(1, 2, D), randn(8, D), OPS["fused_linear"]
    kernels = [kernel for kernel in spec.table if kernel.kind == "triton" or kernel.name == "library"]
    for given in (
        {"bias": randn(1)},
        {"bias": randn(2, 8)},
        {"bias": randn(16)[::2]},
        {"norm": randn(1)},
        {"norm": randn(D), "norm_bias": randn(2 * D)[::2], "center": True},
        {"residual": randn(1, 1, 8)},
    ):
        assert all(kernel.problem(spec.call(x, weight, **given)) for kernel in kernels), given
    plain = spec.call(x, weight, bias=randn(8), residual=randn(1, 2, 8), norm=randn(D))
    assert spec.kernel("gemm").problem(plain) is None


def test_a_native_step_leaves_a_linear_layer_whose_bias_is_spread():
    bias = Graph().placeholder("bias")
    bias.meta["val"] = randn(1)
    check_vector(None, 8)
    check_vector(bias, 1)
    with pytest.raises(NotLowered, match=r"bias is \[1\], not 8 values"):
        check_vector(bias, 8)


def test_a_residual_that_is_spread_has_no_kernel():
    spec = OPS["rms_norm"]
    call = spec.call(randn(2, 3, D), randn(D), 1e-5, residual=randn(1, 3, D))
    assert "it is broadcast" in spec.kernel("triton").problem(call)


def test_a_layer_norm_of_float64_has_no_kernel_of_float32():
    spec = OPS["layer_norm"]
    call = spec.call(randn(2, D).double(), randn(D).double(), None, 1e-5)
    assert spec.kernel("triton").problem(call) == "it computes in float32"


HOWS = [Matvec(2, 4), Gemm(rows=16, tokens=16, depth=32, warps=4, stages=2), BalancedGemm(rows=16, tokens=64), None]


@pytest.mark.parametrize("how", HOWS, ids=lambda how: type(how).__name__)
def test_a_layer_norm_without_a_weight_is_no_identity(how):
    x, weight = randn(3, D) + 2, randn(8, D, seed=1)
    call = linear_kernels.LinearCall(x, weight, eps=1e-5, center=True)
    torch.testing.assert_close(linear_kernels.run_as(call, how), fused_linear(x, weight, eps=1e-5, center=True))


# ── what is read ahead of the wait ──────────────────────────────────────────────────────────────────────────────


class Launches:
    """Stands for a kernel, and keeps whether it would have been launched early."""

    def __init__(self):
        self.early = []

    def __getitem__(self, _):
        return lambda *_, PDL, **__: self.early.append(PDL)


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "layer_norm"])
def test_only_parameters_are_read_before_the_kernel_ahead_has_ended(op, monkeypatch):
    """A weight that the graph computes may be what that kernel still writes."""
    module, launches = importlib.import_module(f"graft.ops.{op}.triton"), Launches()
    monkeypatch.setattr(module, f"{op}_kernel", launches)
    monkeypatch.setattr("graft.ops.launch.pdl_supported", lambda _: True)
    run, x = getattr(module, f"{op}_triton"), torch.randn(2, 8)
    held = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    rest = {"layer_norm": (None, 1e-5)}.get(op, (1e-5,))
    for weight in (held, held * 1):
        run(*([x] * (1 + (op == "add_rms_norm"))), weight, *rest)
    assert launches.early == [True, False]
