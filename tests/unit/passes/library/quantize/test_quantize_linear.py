"""quantize_linear: what is quantized, what is left alone and why, and what a wrong weight or format raises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from conftest import graph_of
from graft.base.errors import ConfigError, TransformError, UsageError
from graft.ir.edit import second_module
from graft.ir.io.text import graph_text
from graft.ir.nodes import options_of
from graft.models.load import load_model
from graft.passes.config import load_config, quantize_sets, with_sets
from graft.passes.library.quantize import quantize_linear
from graft.passes.library.quantize.quantization import pattern_fits
from graft.passes.library.quantize.quantize_linear import operands
from graft.passes.pipeline import run_pipeline
from graft.weights import quantize as quantizing
from graft.weights.packing import dequantize
from linear_cases import Products
from quantize_cases import FORMATS, MLP, compiled, fused_calls, on, only, reasons

# ── what is rewritten ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_every_linear_layer_reads_quantized_weights(kind, dtype, bias):
    """The result is that of a module with the weights that the stored ones stand for, the dtype's rounding aside."""
    torch.manual_seed(0)
    module, x = MLP(bias).to(dtype), torch.randn(3, 24).to(dtype)
    record, made = compiled(module, x, kind=kind)
    assert record.status == "applied" and len(record.matches) == 2 and not record.unchecked
    assert all(m.numeric_check.error <= m.numeric_check.limit and m.pattern == kind for m in record.matches)
    standing = MLP(bias).double()
    for name, parameter in standing.named_parameters():
        if name.endswith("bias"):
            parameter.data = module.get_parameter(name).double()
        else:
            q, scale = (made.graph_module.get_parameter(f"{name}_{part}") for part in (kind, "scale"))
            parameter.data = dequantize(q, scale, parameter.shape[1], torch.float64)
    with torch.no_grad():
        exact, original = standing(x.double()), module(x)
        error = (made(x).double() - exact).abs().max() / exact.abs().max()
        assert error <= 8 * torch.finfo(dtype).eps
        assert (original.double() - exact).abs().max() / exact.abs().max() > error  # rounded weights do differ


def test_the_graph_before_and_after():
    module = MLP(bias=True)
    _, made = compiled(module, torch.randn(3, 24))
    text = graph_text(made.graph_module.graph)
    assert "graft.fused_linear" in text and "aten.linear" not in text
    node = fused_calls(made)[0]
    assert [str(getattr(a, "target", a)) for a in node.args] == ["x", "up.weight_int8", "up.bias", "up.weight_scale"]
    assert node.meta["made_by"] == "quantize_linear" and "up" in str(node.meta["nn_module_stack"])
    assert set(dict(made.graph_module.named_parameters())) == {
        f"{layer}.{leaf}" for layer in ("up", "down") for leaf in ("weight_int8", "weight_scale", "bias")
    }


class Fused(nn.Module):
    def __init__(self, cast_last: bool = False, parameter: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 24))
        self.cast_last = cast_last
        if parameter:
            self.norm = nn.Parameter(torch.rand(24))
        else:
            self.register_buffer("norm", torch.rand(24))

    def forward(self, x, r):
        return torch.ops.graft.fused_linear(
            x, self.w, norm=self.norm, eps=1e-5, activation="silu", residual=r, offset=1.0, cast_last=self.cast_last
        )


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("cast_last", [False, True])
def test_what_is_fused_already_stays_fused_and_the_norms_weight_goes_into_the_products(cast_last, kind):
    """What is added to it too (Gemma), or not: then it is only there where the cast comes last."""
    torch.manual_seed(1)
    module, x, r = Fused(cast_last), torch.randn(2, 24), torch.randn(2, 8)
    record, made = compiled(module, x, r, kind=kind)
    assert len(record.matches) == 1 and ", times norm," in record.matches[0].note, reasons(record)
    (node,) = fused_calls(made)
    given = operands(node)
    assert given["norm"] is None and given["normed"] and given["activation"] == "silu" and given["eps"] == 1e-5
    assert given["residual"].name == "r" and given["offset"] == 0.0 and given["bias"] is None
    assert given["weight"].target == f"w_{kind}" and given["scale"].target == "w_scale"
    stored = dequantize(
        *(made.graph_module.get_parameter(f"w_{leaf}") for leaf in (kind, "scale")), 24, torch.float32
    )
    for shift in (0.0, 1.0):
        meant = module.w * (module.norm + shift)
        near = (stored - meant).norm() / meant.norm() < {"int8": 0.01, "fp8": 0.05, "int4": 0.2}[kind]
        assert near == (shift == float(cast_last))
    with torch.no_grad():
        expected = torch.ops.graft.fused_linear(
            x, stored, norm=torch.ones(24), eps=1e-5, activation="silu", residual=r
        )
        torch.testing.assert_close(made(x, r), expected)
    again = run_pipeline(made.graph_module, load_config(on())).transforms["quantize_linear"]
    assert again.status == "no_match" and again.reason == "the graph has no linear layer"  # they have a scale


def test_a_norm_whose_weight_may_change_stays():
    module, x, r = Fused(parameter=False), torch.randn(2, 24), torch.randn(2, 8)
    _, made = compiled(module, x, r)
    (node,) = fused_calls(made)
    given = operands(node)
    assert given["norm"].target == "norm" and not given["normed"] and given["offset"] == 1.0
    with torch.no_grad():
        torch.testing.assert_close(made(x, r), module(x, r), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["mm", "addmm"])
def test_weights_that_lie_the_other_way_are_turned(kind):
    torch.manual_seed(2)
    module, x = Products(kind), torch.randn(3, 24)
    record, made = compiled(module, x)
    assert len(record.matches) == 1, reasons(record)
    assert made.graph_module.get_parameter("w_int8").shape == (40, 64)
    with torch.no_grad():
        torch.testing.assert_close(made(x), module(x), rtol=0.02, atol=0.15)


# ── what is left alone ───────────────────────────────────────────────────────────────────────────────────────────


class Tied(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(20, 24)
        self.head = nn.Linear(24, 20, bias=False)
        if kind == "tied":
            self.head.weight = self.table.weight
        if kind == "view":
            self.head.weight = nn.Parameter(self.table.weight.data.view(20, 24))
        self.register_buffer("w", torch.randn(8, 24))

    def forward(self, ids, given):
        x = self.table(ids)
        if self.kind == "buffer":
            return F.linear(x, self.w)
        if self.kind == "input":
            return F.linear(x, given)
        if self.kind == "computed":
            return F.linear(x, self.head.weight * 2)
        if self.kind == "twice":
            return self.head(x) + self.head(x * 2)
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("tied", "is tied: something else reads it too"),
        ("view", "is tied: something else reads it too"),
        ("twice", "is tied: something else reads it too"),
        ("buffer", "w is a buffer"),
        ("input", "is an input of the graph"),
        ("computed", "the weight is computed"),
    ],
)
def test_what_is_not_the_layers_own_stays(kind, reason):
    module, inputs = Tied(kind), (torch.tensor([[1, 2]]), torch.randn(8, 24))
    record, made = compiled(module, *inputs)
    assert record.status == "no_match" and reason in record.reason, record
    with torch.no_grad():
        torch.testing.assert_close(made(*inputs), module(*inputs))


@pytest.mark.parametrize(("kind", "reason"), [("beta", "beta or alpha"), ("rows", "not one row")])
def test_what_is_no_linear_layer_stays(kind, reason):
    record, _ = compiled(Products(kind), torch.randn(3, 24))
    assert not record.matches and reason in record.reason


def test_other_dtypes_and_empty_graphs():
    record, _ = compiled(MLP().double(), torch.randn(2, 24).double())
    assert "torch.float64" in record.reason
    record, _ = compiled(nn.ReLU(), torch.randn(2, 2))
    assert record.reason == "the graph has no linear layer"


def test_patterns_name_what_stays():
    record, made = compiled(MLP(), torch.randn(2, 24), skip=["do*", "nothing"])
    assert len(record.matches) == 1 and "down.weight is skipped ('do*')" in reasons(record)
    assert any("skip names no weight: 'nothing'" in note for note in made.report.notes)
    names = ["lm_head", "model.layers.0.*", "down_proj", "mlp.down_proj.weight", "layers"]
    assert all(pattern_fits(p, "model.layers.0.mlp.down_proj.weight") for p in names[1:])
    assert pattern_fits("lm_head", "lm_head.weight") and not pattern_fits("lm", "lm_head.weight")


# ── checks and errors ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", FORMATS)
def test_a_wrong_scale_does_not_get_through(kind, monkeypatch):
    right = quantizing.QUANTIZERS[kind]

    def wrong(weight, name, **options):
        q, scale = right(weight, name, **options)
        return q, scale.roll(1, 0)

    monkeypatch.setitem(quantizing.QUANTIZERS, kind, wrong)
    with pytest.raises(TransformError, match=r"quantize_linear.*up\.weight"):
        compiled(MLP(), torch.randn(2, 24), kind=kind)
    record, made = compiled(MLP(), torch.randn(2, 24), kind=kind, on_error="skip")
    assert record.status == "rolled_back" and not fused_calls(made)


def test_a_weight_without_a_number_is_named():
    module = MLP()
    module.down.weight.data[3, 3] = float("nan")
    with pytest.raises(TransformError, match=r"down\.weight holds NaN or infinity"):
        compiled(module, torch.randn(2, 24))


def test_formats_are_checked_before_anything_is_loaded():
    with pytest.raises(UsageError, match=r"unknown format 'int3'; did you mean.*Known: fp8, int4, int8"):
        graft.LLM("a model that is not there", quantize="int3")
    with pytest.raises(ConfigError, match="must be one of int8, int4, fp8"):
        load_config(on("int3"))
    assert quantize_sets(None) == ()
    changed = with_sets(load_config(), quantize_sets("fp8"))
    asked = changed.transforms["quantize_linear"]
    assert (asked.enabled, asked.format) == (True, "fp8")
    assert changed.origins["transforms.quantize_linear.format"].endswith("format=fp8")
    assert asked == load_config(sets=quantize_sets("fp8")).transforms["quantize_linear"]


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
def test_a_model_without_weights_gets_shapes():
    model = load_model("tiny-llama", dtype="bfloat16", device="meta")
    gm = graph_of(model.module)
    for kind in FORMATS:
        twin = second_module(gm)
        record = run_pipeline(twin, load_config(only(kind))).transforms["quantize_linear"]
        assert len(record.matches) == 7 * model.layers + 1
        head = "fp8" if kind == "fp8" else "int8"
        assert twin.get_parameter(f"lm_head.weight_{head}").shape[0] == model.module.config.vocab_size
        assert all("no values (meta)" in match.note for match in record.matches)
        made = twin.get_parameter(f"model.layers.0.mlp.down_proj.weight_{kind}")
        real = quantizing.QUANTIZERS[kind](torch.randn(32, 64).bfloat16())
        assert made.is_meta and (made.shape, made.dtype) == (real[0].shape, real[0].dtype)
        scale = twin.get_parameter("model.layers.0.mlp.down_proj.weight_scale")
        assert (scale.shape, scale.dtype) == (real[1].shape, real[1].dtype)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("capability", "tokens", "rounded", "told"),
    [
        ((9, 0), 2, 2, "in steps of 2 tokens and more activations are rounded to float8 too"),
        ((9, 0), 0, 0, "not rounded, because fp8_from is 0"),
        ((8, 6), 2, 0, "not rounded, because compute capability 8.6 does not multiply float8"),
        (None, 2, 0, "not rounded, because there is no GPU"),
    ],
)
def test_activations_are_rounded_where_the_gpu_multiplies_float8_and_the_report_says_so(
    capability, tokens, rounded, told, monkeypatch
):
    if capability is not None:
        monkeypatch.setattr(quantize_linear, "gpu_of", lambda _: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    settings = only("fp8")
    settings["transforms"]["quantize_linear"]["fp8_from"] = tokens
    gm = second_module(graph_of(load_model("tiny-llama", dtype="bfloat16", device="meta").module))
    report = run_pipeline(gm, load_config(settings))
    assert [told in note for note in report.notes if "float8" in note or "activations" in note] == [True]
    calls = [node for node in gm.graph.nodes if node.target is torch.ops.graft.fused_linear.default]
    assert {options_of(node)["fp8_from"] for node in calls} == {rounded}


def test_weights_whose_rows_float8_products_do_not_take_keep_their_activations_and_are_named(monkeypatch):
    monkeypatch.setattr(quantize_linear, "gpu_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    record, made = compiled(MLP(), torch.randn(2, 24), kind="fp8")  # 41 rows, and 24
    assert len(record.matches) == 2
    assert [options_of(node)["fp8_from"] for node in fused_calls(made)] == [0, 0]
    (note,) = [note for note in made.report.notes if "float8" in note]
    assert "but for up.weight, down.weight (2 in all): rows are no multiple of 16" in note
