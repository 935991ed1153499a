"""quantize_linear: what is quantized, what is left alone and why, what is released, and what is saved."""

from __future__ import annotations

import gc
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from typer.testing import CliRunner

import graft
from graft.capture.decoder import capture_decoder
from graft.cli.app import app
from graft.errors import ConfigError, TransformError, UsageError
from graft.graph.edit import second_module
from graft.graph.nodes import calls, is_op
from graft.graph.text import graph_text
from graft.models.load import load_model
from graft.ops.fused_linear import quantize as quantizing
from graft.ops.fused_linear.packing import dequantize
from graft.runtime.build import fingerprint
from graft.transforms.base import Context
from graft.transforms.config import load_config, quantize_sets, with_sets
from graft.transforms.library.quantize_linear import operands
from graft.transforms.pipeline import run_pipeline
from graft.transforms.quantization import pattern_fits
from graft.transforms.report import Report
from graft.workbench.traffic import graph_weight_bytes, weight_bytes

FORMATS = ("int8", "int4", "fp8")
FUSED = torch.ops.graft.fused_linear.default


def on(kind: str = "int8", **options):
    return {"transforms": {"quantize_linear": {"enabled": True, "format": kind, **options}}, "verify": "matches"}


def only(kind: str):
    """quantize_linear and no other transform."""
    off = {name: {"enabled": False} for name in load_config().transforms}
    return {"transforms": off | on(kind)["transforms"], "verify": "matches"}


def compiled(module: nn.Module, *inputs, kind: str = "int8", **options):
    """The record of quantize_linear, and the compiled module."""
    with torch.no_grad():
        made = graft.compile(module.eval(), inputs, backend="eager", config=on(kind, **options))
    return made.report.transforms["quantize_linear"], made


def fused_calls(made) -> list:
    return [node for node in calls(made.graph_module.graph) if is_op(node, FUSED)]


def reasons(record) -> str:
    return "; ".join(miss.reason for miss in record.near_misses)


class MLP(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 41, bias=bias), nn.Linear(41, 24, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


# ── what is rewritten ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_every_linear_layer_reads_quantized_weights_r21(kind, dtype, bias):
    """The result is that of a module with the weights that the stored ones stand for, the dtype's rounding aside."""
    torch.manual_seed(0)
    module, x = MLP(bias).to(dtype), torch.randn(3, 24).to(dtype)
    record, made = compiled(module, x, kind=kind)
    assert record.status == "applied" and len(record.matches) == 2 and not record.unproven
    assert all(m.proof.error <= m.proof.limit and m.pattern == kind for m in record.matches)
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
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 24))
        self.norm = nn.Parameter(torch.rand(24))

    def forward(self, x, r):
        return torch.ops.graft.fused_linear(
            x, self.w, norm=self.norm, eps=1e-5, activation="silu", residual=r, offset=1.0
        )


def test_what_is_fused_already_stays_fused():
    torch.manual_seed(1)
    module, x, r = Fused(), torch.randn(2, 24), torch.randn(2, 8)
    record, made = compiled(module, x, r)
    assert len(record.matches) == 1, reasons(record)
    (node,) = fused_calls(made)
    given = operands(node)
    assert given["norm"].target == "norm" and given["activation"] == "silu" and given["eps"] == 1e-5
    assert given["residual"].name == "r" and given["offset"] == 1.0 and given["bias"] is None
    assert given["weight"].target == "w_int8" and given["scale"].target == "w_scale"
    with torch.no_grad():
        torch.testing.assert_close(made(x, r), module(x, r), rtol=0.05, atol=0.05)
    again = run_pipeline(made.graph_module, load_config(on())).transforms["quantize_linear"]
    assert again.status == "no_match" and again.reason == "the graph has no linear layer"  # they have a scale


class Products(nn.Module):
    """Weights that lie as [k, n], as in GPT-2."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w, self.b = nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(40))

    def forward(self, x):
        if self.kind == "mm":
            return torch.mm(x, self.w)
        if self.kind == "addmm":
            return torch.addmm(self.b, x, self.w)
        if self.kind == "beta":
            return torch.addmm(self.b, x, self.w, beta=0.5)
        return torch.addmm(self.b[None].expand(x.shape[0], 40), x, self.w)


@pytest.mark.parametrize("kind", ["mm", "addmm"])
def test_weights_that_lie_the_other_way_are_turned(kind):
    torch.manual_seed(2)
    module, x = Products(kind), torch.randn(3, 24)
    record, made = compiled(module, x)
    assert len(record.matches) == 1, reasons(record)
    assert made.graph_module.get_parameter("w_int8").shape == (40, 24)
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


# ── proofs and errors ────────────────────────────────────────────────────────────────────────────────────────────


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


def test_a_model_without_weights_gets_shapes():
    model = load_model("tiny-llama", dtype="bfloat16", device="meta")
    gm = capture_decoder(model.module)
    for kind in FORMATS:
        twin = second_module(gm)
        record = run_pipeline(twin, load_config(only(kind))).transforms["quantize_linear"]
        assert len(record.matches) == 7 * model.layers and "lm_head.weight is skipped" in reasons(record)
        assert all("no values (meta)" in match.note for match in record.matches)
        made = twin.get_parameter(f"model.layers.0.mlp.down_proj.weight_{kind}")
        real = quantizing.QUANTIZERS[kind](torch.randn(32, 64).bfloat16())
        assert made.is_meta and (made.shape, made.dtype) == (real[0].shape, real[0].dtype)
        scale = twin.get_parameter("model.layers.0.mlp.down_proj.weight_scale")
        assert (scale.shape, scale.dtype) == (real[1].shape, real[1].dtype)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_tokens_of_tiny_families_run_r21(family):
    llm = graft.LLM(f"tiny-{family}", dtype="float32", device="cpu", quantize="int8", keep_weights=True)
    record = llm.report.transforms["quantize_linear"]
    assert record.status == "applied" and record.matches
    left = reasons(record)
    assert ("experts are no linear layers" in left) == (family == "mixtral")
    assert "lm_head" in left or "tied" in left
    assert any(
        note.startswith("quantize_linear:") and "as int8" in note and left[:20] in note for note in llm.report.notes
    )
    params = graft.SamplingParams(max_tokens=4, ignore_eos=True)
    assert [len(o.token_ids) for o in llm.generate([[5, 9, 77, 31], [8, 3]], params)] == [4, 4]


def test_the_engines_tokens_are_those_of_the_weights_that_the_stored_ones_stand_for():
    """Hugging Face with the dequantized weights in the place of its own generates the same tokens."""
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", quantize="int8")
    state = dict(llm.graph_module.named_parameters())
    module = load_model("tiny-llama", dtype="float32", device="cpu").module
    groups = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    groups |= {"self_attn.o_proj": ("o_proj",), "mlp.down_proj": ("down_proj",)}
    for index, layer in enumerate(module.model.layers):
        for name, parts in groups.items():
            q, scale = (state[f"model.layers.{index}.{name}.weight_{leaf}"] for leaf in ("int8", "scale"))
            full, start = dequantize(q, scale, q.shape[1], torch.float32), 0
            for part in parts:
                linear = getattr(getattr(layer, name.split(".")[0]), part)
                linear.weight.data = full[start : start + linear.out_features]
                start += linear.out_features
    prompt = torch.tensor([[5, 9, 77, 31]])
    with torch.no_grad():
        expected = module.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    (output,) = llm.generate([prompt[0].tolist()], graft.SamplingParams(max_tokens=8, ignore_eos=True))
    assert output.token_ids == expected[0, 4:].tolist()


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_loaded_the_model_gives_up_its_weights():
    """Merged ones too, of which the module's own are views. What is left of the module says so when it is called."""
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", quantize="int8")
    module = llm.model.module
    assert llm.quantized.format == "int8" and 0 < llm.quantized.bytes < sum(p.nbytes for p in module.parameters())
    frequencies = module.model.rotary_emb.inv_freq.nbytes  # a buffer that the graph reads, beside the weights
    read = graph_weight_bytes(llm.graph_module) - frequencies
    assert weight_bytes(module, 1) - read == llm.quantized.bytes
    layer = module.model.layers[0]
    for part in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj):
        assert part.weight.is_meta and part.weight.shape == (part.out_features, part.in_features)
    assert not module.lm_head.weight.is_meta and not module.model.embed_tokens.weight.is_meta
    with pytest.raises(UsageError, match=r"given up when they were quantized.*keep_weights=True"):
        module(torch.tensor([[1, 2]]))
    assert len(llm.generate([[1, 2]], graft.SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_weights_go_layer_by_layer(monkeypatch):
    """When a weight is quantized, the memory of all before it is gone, although the snapshot of the graph is held."""
    seen: list[StorageWeakRef] = []
    right = quantizing.QUANTIZERS["int8"]

    def watched(weight, name, **options):
        gc.collect()
        assert all(ref.expired() for ref in seen), name
        result = right(weight, name, **options)
        seen.append(StorageWeakRef(weight.untyped_storage()))
        return result

    monkeypatch.setitem(quantizing.QUANTIZERS, "int8", watched)
    off = {name: {"enabled": False} for name in ("last_token_logits", "insert_kv_cache")}
    config = {"transforms": on()["transforms"] | off}
    module = load_model("tiny-llama", dtype="float32", device="cpu").module
    run_pipeline(capture_decoder(module), load_config(config), Context(owned=module))
    assert len(seen) == 2 * 4  # qkv, output, gate and up, down
    seen.clear()
    kept = load_model("tiny-llama", dtype="float32", device="cpu").module
    with pytest.raises(TransformError, match="AssertionError: model"):  # the caller's stay, so this sees them
        run_pipeline(capture_decoder(kept), load_config(config), Context())


@pytest.mark.parametrize("how", ["given", "kept"])
def test_the_callers_module_keeps_its_weights(how):
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    ids = torch.tensor([[5, 9, 77]])
    with torch.no_grad():
        before = model.module(ids).logits
    if how == "given":
        llm = graft.LLM(model, quantize="int4")
    else:
        llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", quantize="int4", keep_weights=True)
    with torch.no_grad():
        assert torch.equal(llm.model.module(ids).logits, before)
    assert any("keeps its own weights" in note for note in llm.report.notes)


def test_a_roll_back_finds_the_old_weights(monkeypatch):
    """With on_error: skip nothing is given up, so that the graph can go on with what it had."""
    monkeypatch.setitem(quantizing.QUANTIZERS, "int8", lambda w, *_: (w.to(torch.int8), torch.ones(w.shape[0])))
    settings = {"transforms": on(on_error="skip")["transforms"]}
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", config=settings)
    assert llm.report.transforms["quantize_linear"].status == "rolled_back"
    assert not any(note.startswith("quantize_linear") for note in llm.report.notes)
    ids = torch.tensor([[4, 5]])
    expected = llm.model.module.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    (output,) = llm.generate(ids.tolist(), graft.SamplingParams(max_tokens=4, ignore_eos=True))
    assert output.token_ids == expected[0, 2:].tolist()


def test_the_cache_of_one_format_is_not_that_of_another():
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    gm, prints = capture_decoder(model.module), {}
    for kind in FORMATS:
        graphs = second_module(gm), second_module(gm)
        for graph in graphs:
            run_pipeline(graph, load_config(only(kind)))
        prints[kind] = {fingerprint(model, graph) for graph in graphs}
    assert all(len(found) == 1 for found in prints.values())
    assert len({fingerprint(model, gm), *(next(iter(found)) for found in prints.values())}) == 4


# ── saved modules and reports ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", FORMATS)
def test_quantized_weights_survive_saving(kind, tmp_path):
    torch.manual_seed(4)
    module, x = MLP(bias=True).bfloat16(), torch.randn(3, 24).bfloat16()
    _, made = compiled(module, x, kind=kind)
    made.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    for name, parameter in made.graph_module.named_parameters():
        twin = loaded.graph_module.get_parameter(name)
        assert twin.dtype is parameter.dtype
        assert torch.equal(twin.view(torch.uint8), parameter.view(torch.uint8)), name
    assert torch.equal(loaded(x), made(x))
    match = loaded.report.transforms["quantize_linear"].matches[0]
    assert match.note.startswith(f"up.weight: {kind}, relative error") and match.note.endswith("bytes")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 8)

    def forward(self, x):
        return self.up(x) if x.shape[0] > 3 else self.up(x) * 2


def test_the_variants_of_a_module_share_their_quantized_weights(tmp_path):
    made = graft.compile(
        Branches(),
        (torch.randn(5, 24),),
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
        backend="eager",
        config=on("int4"),
    )
    made(torch.randn(2, 24))
    one, other = (v.graph_module.get_parameter("up.weight_int4") for v in made.variants)
    assert one.data_ptr() == other.data_ptr()
    made.save(tmp_path / "saved")
    x = torch.randn(2, 24)
    assert torch.equal(graft.load(tmp_path / "saved")(x), made(x))


def test_the_report_counts_bytes_and_reads_older_ones():
    record, made = compiled(MLP(), torch.randn(2, 24))
    assert record.matches[0].note.endswith(f"{24 * 41 * 4} → {24 * 41 + 41 * 4} bytes")
    text = made.report.to_json()
    assert Report.from_json(text) == made.report
    older = Report.from_json(text.replace('"note":', '"was_not_there":'))
    assert older.transforms["quantize_linear"].matches[0].note == ""
    total, *others = [note for note in made.report.notes if note.startswith("quantize_linear")]
    assert "2 weights as int8" in total and "left alone: 0" in total
    assert any("on a CPU the weights are widened at every call" in note for note in others)


@pytest.mark.parametrize("verb", ["run", "bench"])
def test_the_command_line_takes_a_format_r21(verb):
    given = ["--token-ids", "1,2", "--max-tokens", "2", "-m"] if verb == "run" else ["--batch", "1", "--prompt", "4"]
    more = [] if verb == "run" else ["--new", "2", "--repeats", "1", "--against", "eager"]
    # a rival needs the module's own weights, so they stay for `bench`
    result = CliRunner().invoke(app, [verb, *given, "tiny-llama", *more, "--quantize", "int8", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    if verb == "run":
        assert len(data["report"]["transforms"]["quantize_linear"]["matches"]) == 8
        assert not any("keeps its own weights" in note for note in data["report"]["notes"])
    else:
        assert data["setup"]["quantize"] == "int8" and not any(row["failed"] for row in data["rows"])
    wrong = CliRunner().invoke(app, [verb, *given, "tiny-llama", *more, "--quantize", "int3"])
    assert wrong.exit_code == 2 and "Known: fp8, int4, int8" in " ".join(wrong.output.split())
