"""Norm, activation and residual sum go into the linear layers: what fuses, to what numbers, and what must not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decode_cases import DECODE, NAMED, Block, D, norm, only, run_transforms, targets, transformed, x_of
from graft.base.errors import ConfigError, TransformError
from graft.ir.edit import second_module
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op, module_path, source_line
from graft.ir.trace import export_graph
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.library.matvec import fuse_swiglu_into_matvec
from graft.passes.pipeline import order_transforms, run_pipeline

MATVEC = ("fuse_residual_into_matvec", "fuse_norm_into_matvec", "fuse_swiglu_into_matvec")
OPS = torch.ops.graft
BEFORE = [
    "aten.add.Tensor",
    "aten.linear",
    "aten.slice.Tensor",
    "graft.add_rms_norm",
    "graft.rms_norm",
    "graft.swiglu",
]


def counts(report):
    return {name: len(report.transforms[name].matches) for name in MATVEC}


def reasons(report, name):
    record = report.transforms[name]
    return [record.reason, *(miss.reason for miss in record.near_misses)]


def said(report, name, text):
    return any(text in reason for reason in reasons(report, name))


def left_alone(module, args, name, text, *first):
    """Nothing matches, the reason says `text`, and the graph is what it was without the transform."""
    captured = export_graph(module, args)
    plain, _ = run_transforms(second_module(captured), *first)
    gm, report = run_transforms(captured, *first, name)
    assert report.transforms[name].status == "no_match" and said(report, name, text), reasons(report, name)
    assert graph_text(gm.graph) == graph_text(plain.graph)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_becomes_four_gemms(dtype, bias):
    module, x = Block(dtype, bias), x_of(1, 5, D, dtype=dtype)
    captured = export_graph(module, (x,))
    plain, _ = run_transforms(second_module(captured), *NAMED)
    assert set(BEFORE) <= set(targets(plain))
    gm, report = run_transforms(captured, *NAMED, *MATVEC)
    assert counts(report) == dict(zip(MATVEC, (2, 2, 1), strict=True))
    assert targets(gm) == ["graft.fused_linear", "aten.sin", *["graft.fused_linear"] * 3]
    assert torch.equal(gm(x), plain(x))  # the reference rounds where eager does
    assert all(match.numeric_check for name in MATVEC for match in report.transforms[name].matches)


GOLDEN = """\
%fused_linear_default_2 = graft.fused_linear(%x, %qkv_weight, None, None, %g1, 1e-05) : f32[1, 5, 16]
%sin = aten.sin(%fused_linear_default_2) : f32[1, 5, 16]
%fused_linear_default = graft.fused_linear(%sin, %o_weight, None, None, None, 0.0, 0.0, False, none, False, %x) : f32[1, 5, 16]
%fused_linear_default_4 = graft.fused_linear(%fused_linear_default, %gate_up_weight, None, None, %g2, 1e-05, 0.0, False, silu) : f32[1, 5, 32]
%fused_linear_default_1 = graft.fused_linear(%fused_linear_default_4, %down_weight, None, None, None, 0.0, 0.0, False, none, False, %fused_linear_default) : f32[1, 5, 16]
"""  # noqa: E501


@cache
def fused_layer():
    """For tests that leave it as it is."""
    return transformed(Block(), (x_of(1, 5, D),), *NAMED, *MATVEC)


def test_the_graph_of_a_layer():
    gm, _ = fused_layer()
    lines = [line.partition("    #")[0] for line in graph_text(gm.graph).splitlines()]
    text = "".join(f"{line}\n" for line in lines if " = graft." in line or " = aten." in line)
    assert text == GOLDEN


def test_new_nodes_keep_value_module_and_maker():
    gm, report = fused_layer()
    made = [node for node in calls(gm.graph) if is_op(node, OPS.fused_linear.default)]
    assert [module_path(node) for node in made] == ["qkv", "o", "", "down"]
    makers = [
        "fuse_norm_into_matvec",
        "fuse_residual_into_matvec",
        "fuse_swiglu_into_matvec",
        "fuse_residual_into_matvec",
    ]
    assert [node.meta["made_by"] for node in made] == makers
    for node in made:
        assert node.meta["val"].shape == (1, 5, 32 if "swiglu" in node.meta["made_by"] else D) and source_line(node)
    assert {match.pattern for match in report.transforms["fuse_residual_into_matvec"].matches} == {
        "add_rms_norm",
        "add",
    }


def test_dynamic_token_counts():
    module, x = Block(), x_of(1, 5, D)
    shapes = ({1: torch.export.Dim("s")},)
    gm, report = transformed(module, (x,), *NAMED, *MATVEC, dynamic_shapes=shapes)
    assert counts(report) == dict(zip(MATVEC, (2, 2, 1), strict=True))
    x = x_of(1, 11, D, seed=3)
    torch.testing.assert_close(gm(x), module(x))


# ── what each must leave alone ──────────────────────────────────────────────────────────────────────────────────


class Linear(nn.Module):
    """A function of x and one linear layer, and a second weight."""

    def __init__(self, function, n=D, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(2)
        self.function, self.w = function, nn.Parameter(torch.randn(n, D).to(dtype) / 4)
        self.g = nn.Parameter(torch.rand(D).to(dtype) + 0.5)

    def forward(self, *xs):
        return self.function(*xs, self.w, self.g)


ADDED = {
    "has a second reader": lambda x, r, w, g: (y := F.linear(x, w)) + r + y.exp(),
    "is broadcast": lambda x, r, w, g: F.linear(x, w) + r[:, :1],
    "the GEMM's result torch.float32": lambda x, r, w, g: F.linear(x, w) + r.to(torch.float64),
    "norms the GEMM's result before": lambda x, r, w, g: norm(F.linear(x, w), g) + r,
    "scales the GEMM's result, by no number of its own": lambda x, r, w, g: F.linear(x, w) * g + r,
    "adds a multiple": lambda x, r, w, g: torch.add(r, F.linear(x, w), alpha=2),
    "computed in the graph": lambda x, r, w, g: F.linear(x, w.exp()) + r,
    "reshapes the GEMM's result": lambda x, r, w, g: F.linear(x.flatten(0, 1), w).view(2, 3, D) + r,
    "[k, n] weight": lambda x, r, w, g: torch.addmm(g, x.flatten(0, 1), w).view(2, 3, D) + r,
    "is the residual of the match, and a part of it": lambda x, r, w, g: (y := F.linear(x, w)) + y,
    "no linear layer of the graph is followed by a sum": lambda x, r, w, g: x.exp() + r,
}


@pytest.mark.parametrize("reason", ADDED)
def test_sums_that_are_no_epilogue(reason):
    args = (x_of(2, 3, D), x_of(2, 3, D, seed=1))
    left_alone(Linear(ADDED[reason]), args, "fuse_residual_into_matvec", reason, "fuse_rms_norm")


def test_either_order_of_the_summands_and_two_linear_layers():
    x, r = x_of(2, 3, D), x_of(2, 3, D, seed=1)
    for function in (lambda x, r, w, g: F.linear(x, w) + r, lambda x, r, w, g: r + F.linear(x, w)):
        module = Linear(function)
        gm, report = transformed(module, (x, r), "fuse_residual_into_matvec")
        assert counts(report)["fuse_residual_into_matvec"] == 1 and torch.equal(gm(x, r), module(x, r))
    both = Linear(lambda x, r, w, g: F.linear(x, w) + F.linear(r, w))
    gm, report = transformed(both, (x, r), "fuse_residual_into_matvec")
    assert targets(gm) == ["aten.linear", "graft.fused_linear"] and torch.equal(gm(x, r), both(x, r))


def test_a_sum_without_linear_layer_stays_with_its_norm():
    """Mixture-of-experts: what is added comes from no linear layer, so sum and norm stay one op."""
    module = Linear(lambda x, r, w, g: (s := x.exp() + r, F.linear(norm(s, g), w)))
    args = (x_of(2, 3, D), x_of(2, 3, D, seed=1))
    gm, report = transformed(module, args, "fuse_rms_norm", "fuse_add_rms_norm", *MATVEC)
    assert said(report, "fuse_residual_into_matvec", "neither") and "graft.add_rms_norm" in targets(gm)
    assert said(report, "fuse_norm_into_matvec", "also adds a residual that no linear layer could take")
    assert counts(report) == dict.fromkeys(MATVEC, 0)


def test_norms_that_others_read_stay():
    module = Linear(lambda x, w, g: (F.linear(n := norm(x, g), w), n.sin()))
    left_alone(module, (x_of(2, 3, D),), "fuse_norm_into_matvec", "is read by %sin", "fuse_rms_norm")


class Several(nn.Module):
    def __init__(self, count):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(D, 4 + i) for i in range(count))
        self.g = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x):
        n = norm(x, self.g)
        return tuple(layer(n) for layer in self.layers)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_up_to_three_linear_layers_take_the_norm(count):
    module, x = Several(count), x_of(2, 3, D)
    gm, report = transformed(module, (x,), "fuse_rms_norm", "fuse_norm_into_matvec")
    matches = report.transforms["fuse_norm_into_matvec"].matches
    assert [match.pattern for match in matches] == ["normed_linear"] * count
    assert targets(gm) == ["graft.fused_linear"] * count
    for got, wanted in zip(gm(x), module(x), strict=True):
        assert torch.equal(got, wanted)


def test_four_linear_layers_do_not():
    text = "is read by 4 linear layers and would be computed that often"
    left_alone(Several(4), (x_of(2, 3, D),), "fuse_norm_into_matvec", text, "fuse_rms_norm")


def test_a_norm_of_another_dtype_stays():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.w = nn.Parameter(torch.rand(D)), nn.Parameter(torch.randn(4, D))

        def forward(self, x):
            return F.linear(OPS.rms_norm(x, self.g, 1e-5), self.w)

    text = "the input is torch.bfloat16, the norm's weight is torch.float32"
    left_alone(Mixed(), (x_of(2, 3, D, dtype=torch.bfloat16),), "fuse_norm_into_matvec", text)


def test_a_norm_that_is_input_and_residual_stays():
    module = Linear(lambda x, w, g: F.linear(n := norm(x, g), w) + n)
    gm, report = transformed(module, (x_of(2, 3, D),), "fuse_rms_norm", *MATVEC)
    assert said(report, "fuse_norm_into_matvec", "is the residual of the match, and a part of it")
    assert targets(gm) == ["graft.rms_norm", "graft.fused_linear"]


def test_layer_norm_is_no_prologue():
    module = Linear(lambda x, w, g: F.linear(F.layer_norm(x, (D,), g), w))
    left_alone(module, (x_of(2, 3, D),), "fuse_norm_into_matvec", "no graft::rms_norm", "fuse_layer_norm")


GATED = {
    "gate in its second half": lambda y: F.silu(y[..., D:]) * y[..., :D],
    "expected the value": lambda y: F.silu(y[..., : D - 2]) * y[..., D - 2 : 2 * D - 4],
    "expected aten.slice": lambda y: F.silu(y) * y.exp(),
    "has a second reader": lambda y: (F.silu(y[..., :D]) * y[..., D:], y),
    "is aten.exp, expected aten.linear": lambda y: F.silu((z := y.exp())[..., :D]) * z[..., D:],
}


@pytest.mark.parametrize("reason", GATED)
def test_gates_that_are_no_epilogue(reason):
    module = Linear(lambda x, w, g: GATED[reason](F.linear(x, w)), n=2 * D)
    left_alone(module, (x_of(2, 3, D),), "fuse_swiglu_into_matvec", reason, "fuse_swiglu")


def test_gate_and_up_of_two_gemms_stay():
    module = Linear(lambda x, r, w, g: F.silu(F.linear(x, w)[..., :D]) * F.linear(r, w)[..., D:], n=2 * D)
    args = (x_of(2, 3, D), x_of(2, 3, D, seed=1))
    left_alone(module, args, "fuse_swiglu_into_matvec", "again, found", "fuse_swiglu")


def test_interleaved_gates_stay():
    module = Linear(lambda x, w, g: F.silu((y := F.linear(x, w))[..., ::2]) * y[..., 1::2], n=2 * D)
    left_alone(module, (x_of(2, 3, D),), "fuse_swiglu_into_matvec", "slice", "fuse_swiglu")


def test_an_activation_after_a_residual_stays():
    module = Linear(lambda x, r, w, g: F.silu((y := F.linear(x, w) + r)[..., :D]) * y[..., D:], n=2 * D)
    args = (x_of(2, 3, D), x_of(2, 3, 2 * D, seed=1))
    gm, report = transformed(module, args, "fuse_swiglu", *MATVEC)
    assert said(report, "fuse_swiglu_into_matvec", "in the pattern: residual")
    assert counts(report)["fuse_residual_into_matvec"] == 1 and torch.equal(gm(*args), module(*args))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_every_activation(activation):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2 * D, D) / 4)

        def forward(self, x):
            y = F.linear(x, self.w)
            return OPS.swiglu(y[..., :D], y[..., D:], activation, True)

    module, x = Gated(), x_of(2, 3, D)
    gm, report = transformed(module, (x,), "fuse_swiglu_into_matvec")
    (match,) = report.transforms["fuse_swiglu_into_matvec"].matches
    (fused,) = calls(gm.graph)
    assert match.pattern == "gated" and fused.args[8:] == (activation, True)
    assert torch.equal(gm(x), module(x))


def test_what_is_written_in_place_meanwhile_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(D, D))

        def forward(self, x, r):
            y = F.linear(x, self.w)
            r.mul_(2)
            x.add_(1)
            return y + r

    gm = export_graph(Writes(), (x_of(2, D), x_of(2, D, seed=1)))
    config = only("fuse_residual_into_matvec", verify="structure")
    record = run_pipeline(gm, config, Context(route="decoder")).transforms["fuse_residual_into_matvec"]
    assert not record.matches and "written in place" in record.reason


# ── where they run ──────────────────────────────────────────────────────────────────────────────────────────────


def test_on_a_cpu_they_are_skipped_and_the_graph_stays():
    gm = export_graph(Block(), (x_of(1, 5, D),))
    before = graph_text(gm.graph)
    config = load_config({"transforms": {n: {"enabled": n in MATVEC} for n in load_config().transforms}})
    report = run_pipeline(gm, config, Context(route="decoder"))
    for name in MATVEC:
        record = report.transforms[name]
        assert record.status == "skipped" and "on cpu the GEMM runs by itself" in record.reason
    assert graph_text(gm.graph) == before


def test_a_module_outside_the_engine_and_another_device_are_skipped():
    gm = export_graph(Block(), (x_of(1, 5, D),))
    report = run_pipeline(gm, only(*NAMED, *MATVEC), Context(route="module"))
    assert all("no decode steps" in report.transforms[name].reason for name in MATVEC)
    with torch.device("meta"):
        module, x = Block(), torch.empty(1, 5, D)
    report = run_pipeline(export_graph(module, (x,)), only(*NAMED, *MATVEC), Context(route="decoder"))
    assert all("the graph is on meta, the transform is for cpu" in report.transforms[n].reason for n in MATVEC)


def test_devices_are_checked():
    assert set(MATVEC) | {"tabulate_rope"} <= set(DECODE)
    assert load_config().transforms["fuse_norm_into_matvec"].devices == ("cuda", "native")
    for wrong in (["gpu"], "cpu", [1]):
        with pytest.raises(ConfigError, match=r"transforms\.fuse_norm_into_matvec\.devices must be"):
            load_config({"transforms": {"fuse_norm_into_matvec": {"devices": wrong}}})


def test_they_run_after_the_cache_and_before_gemms_are_widened():
    order = order_transforms(load_config())
    places = [order.index(name) for name in ("insert_kv_cache", *MATVEC, "tabulate_rope", "widen_linear")]
    assert places == sorted(places)


def test_a_wrong_replacement_is_caught_by_the_check(monkeypatch):
    """The halves of the gate-up GEMM in the wrong order: the same shapes, other numbers."""
    wrong = replace(fuse_swiglu_into_matvec.REWRITES[1], refuse="")  # as if the gate came first
    monkeypatch.setattr(fuse_swiglu_into_matvec, "REWRITES", (wrong,))
    module = Linear(lambda x, w, g: F.silu((y := F.linear(x, w))[..., D:]) * y[..., :D], n=2 * D)
    with pytest.raises(TransformError, match="is off by"):
        transformed(module, (x_of(2, 3, D),), "fuse_swiglu", "fuse_swiglu_into_matvec")
