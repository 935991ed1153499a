"""Quantized weights in engines: tokens, memory that is freed, saved modules, reports, the command line."""

from __future__ import annotations

import gc
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from typer.testing import CliRunner

import graft
from conftest import graph_of
from graft.base.errors import TransformError, UsageError
from graft.bench import runner
from graft.bench.limits.traffic import graph_weight_bytes, weight_bytes
from graft.cli.app import app
from graft.engine.setup.build import fingerprint
from graft.ir.edit import second_module
from graft.models.load import load_model
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report
from graft.weights import quantize as quantizing
from graft.weights.packing import dequantize
from quantize_cases import FORMATS, MLP, compiled, on, only, reasons


@pytest.mark.some(1)
@pytest.mark.parametrize("family", ["gpt2", "qwen3-moe"])
def test_tokens_of_tiny_families_run(family):
    llm = graft.LLM(
        f"tiny-{family}", dtype="float32", device="cpu", quantize="int8", keep_weights=True, backend="eager"
    )
    record = llm.report.transforms["quantize_linear"]
    assert record.status == "applied" and record.matches
    left = reasons(record)
    assert any("experts" in match.note for match in record.matches) == (family == "qwen3-moe")
    assert ("lm_head.weight_int8" in dict(llm.graph_module.named_parameters())) != ("tied" in left)
    assert any(
        note.startswith("quantize_linear:") and "as int8," in note and left[:20] in note for note in llm.report.notes
    )
    params = graft.SamplingParams(max_tokens=4, ignore_eos=True)
    assert [len(o.token_ids) for o in llm.generate([[5, 9, 77, 31], [8, 3]], params)] == [4, 4]


def test_the_engines_tokens_are_those_of_the_weights_that_the_stored_ones_stand_for():
    """Hugging Face with the dequantized weights in the place of its own generates the same tokens."""
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", quantize="int8", backend="eager")
    state = dict(llm.graph_module.named_parameters())
    module = load_model("tiny-llama", dtype="float32", device="cpu").module
    groups = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    groups |= {"self_attn.o_proj": ("o_proj",), "mlp.down_proj": ("down_proj",)}
    for index, layer in enumerate(module.model.layers):
        for name, parts in groups.items():
            q, scale = (state[f"model.layers.{index}.{name}.weight_{leaf}"] for leaf in ("int8", "scale"))
            linears = [getattr(getattr(layer, name.split(".")[0]), part) for part in parts]
            full, start = dequantize(q, scale, linears[0].in_features, torch.float32), 0
            for linear in linears:
                linear.weight.data = full[start : start + linear.out_features]
                start += linear.out_features
    head = module.lm_head
    head.weight.data = dequantize(
        *(state[f"lm_head.weight_{leaf}"] for leaf in ("int8", "scale")), head.in_features, torch.float32
    )
    prompt = torch.tensor([[5, 9, 77, 31]])
    with torch.no_grad():
        expected = module.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    (output,) = llm.generate([prompt[0].tolist()], graft.SamplingParams(max_tokens=8, ignore_eos=True))
    assert output.token_ids == expected[0, 4:].tolist()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "heads"), [("int8", ("int8", "fp8", "none")), ("int4", ("int8",)), ("fp8", ("int8",))]
)
def test_the_output_head_has_eight_bits_or_is_left(kind, heads):
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    for head in heads:
        settings = {"transforms": on(kind, head=head)["transforms"]}
        llm = graft.LLM(model, config=settings, backend="eager")
        record = llm.report.transforms["quantize_linear"]
        formats = {match.note.split(":")[0]: match.note.split()[1].rstrip(",") for match in record.matches}
        assert formats.pop("lm_head.weight", None) == (None if head == "none" else head)
        assert set(formats.values()) == {kind}
        assert ("lm_head.weight is skipped ('lm_head')" in reasons(record)) == (head == "none")
        counts = [note for note in llm.report.notes if note.startswith("quantize_linear: ")]
        assert (f"1 weight as {head}" in counts[0]) == (head not in ("none", kind))


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_loaded_the_model_gives_up_its_weights():
    """Merged ones too, of which the module's own are views. What is left of the module says so when it is called."""
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", quantize="int8", backend="eager")
    module = llm.model.module
    assert llm.quantized.format == "int8" and 0 < llm.quantized.bytes < sum(p.nbytes for p in module.parameters())
    frequencies = module.model.rotary_emb.inv_freq.nbytes  # a buffer that the graph reads, beside the weights
    read = graph_weight_bytes(llm.graph_module, 1) - frequencies
    assert weight_bytes(module, 1) - read == llm.quantized.bytes
    layer = module.model.layers[0]
    for part in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj):
        assert part.weight.is_meta and part.weight.shape == (part.out_features, part.in_features)
    assert module.lm_head.weight.is_meta and not module.model.embed_tokens.weight.is_meta
    with pytest.raises(UsageError, match=r"freed when they were quantized.*keep_weights=True"):
        module(torch.tensor([[1, 2]]))
    assert len(llm.generate([[1, 2]], graft.SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.exhaustive
def test_weights_go_layer_by_layer(monkeypatch):
    """When a weight is quantized, the memory of all before it is gone, although the snapshot of the graph is held."""
    seen: list[StorageWeakRef] = []
    right = quantizing.QUANTIZERS["int8"]

    def watched(weight, name, **options):
        if not all(ref.expired() for ref in seen):
            gc.collect()  # takes half a second
        assert all(ref.expired() for ref in seen), name
        result = right(weight, name, **options)
        seen.append(StorageWeakRef(weight.untyped_storage()))
        return result

    monkeypatch.setitem(quantizing.QUANTIZERS, "int8", watched)
    off = {name: {"enabled": False} for name in ("last_token_logits", "insert_kv_cache")}
    config = {"transforms": on()["transforms"] | off}
    module = load_model("tiny-llama", dtype="float32", device="cpu").module
    run_pipeline(graph_of(module), load_config(config), Context(owned=module))
    assert len(seen) == 2 * 4 + 1  # qkv, output, gate and up, down; the output head
    seen.clear()
    kept = load_model("tiny-llama", dtype="float32", device="cpu").module
    with pytest.raises(TransformError, match="AssertionError: model"):  # the caller's stay, so this sees them
        run_pipeline(graph_of(kept), load_config(config), Context())


@pytest.mark.parametrize("how", ["given", "kept"])
def test_the_callers_module_keeps_its_weights(how):
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    ids = torch.tensor([[5, 9, 77]])
    with torch.no_grad():
        before = model.module(ids).logits
    if how == "given":
        llm = graft.LLM(model, quantize="int4", backend="eager")
    else:
        llm = graft.LLM(
            "tiny-llama", dtype="float32", device="cpu", quantize="int4", keep_weights=True, backend="eager"
        )
    with torch.no_grad():
        assert torch.equal(llm.model.module(ids).logits, before)
    assert any("keeps its own weights" in note for note in llm.report.notes)


def test_a_roll_back_finds_the_old_weights(monkeypatch):
    """With on_error: skip nothing is freed, so that the graph can go on with what it had."""
    monkeypatch.setitem(quantizing.QUANTIZERS, "int8", lambda w, *_: (w.to(torch.int8), torch.ones(w.shape[0])))
    settings = {"transforms": on(on_error="skip")["transforms"]}
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", config=settings, backend="eager")
    assert llm.report.transforms["quantize_linear"].status == "rolled_back"
    assert not any(note.startswith("quantize_linear") for note in llm.report.notes)
    ids = torch.tensor([[4, 5]])
    expected = llm.model.module.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    (output,) = llm.generate(ids.tolist(), graft.SamplingParams(max_tokens=4, ignore_eos=True))
    assert output.token_ids == expected[0, 2:].tolist()


def test_the_cache_of_one_format_is_not_that_of_another():
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    gm, prints = graph_of(model.module), {}
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


def test_the_report_counts_bytes_and_reads_back():
    record, made = compiled(MLP(), torch.randn(2, 24))
    assert record.matches[0].note.endswith(f"{24 * 41 * 4} → {64 * 41 + 41 * 4} bytes")
    text = made.report.to_json()
    assert Report.from_json(text) == made.report
    total, *others = [note for note in made.report.notes if note.startswith("quantize_linear")]
    assert "2 weights as int8" in total and "left alone: 0" in total
    assert any("on a CPU the weights are widened at every call" in note for note in others)


@pytest.mark.exhaustive
@pytest.mark.parametrize("verb", ["run", "bench"])
def test_the_command_line_takes_a_format(verb, monkeypatch):
    looks = itertools.count()
    # every look at the clock takes longer than the one before, so that more steps take longer than one
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: float(next(looks) ** 2)))
    given = ["--token-ids", "1,2", "--max-tokens", "2", "-m"] if verb == "run" else ["--batch", "1", "--prompt", "4"]
    more = (
        ["--backend", "eager"]
        if verb == "run"
        else ["--new", "2", "--repeats", "1", "--against", "eager", "--backend", "eager"]
    )
    # a baseline needs the module's own weights, so they stay for `bench`
    result = CliRunner().invoke(app, [verb, *given, "tiny-llama", *more, "--quantize", "int8", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    if verb == "run":
        assert len(data["report"]["transforms"]["quantize_linear"]["matches"]) == 9
        assert not any("keeps its own weights" in note for note in data["report"]["notes"])
    else:
        assert data["setup"]["quantize"] == "int8" and not any(row["failed"] for row in data["rows"])
    wrong = CliRunner().invoke(app, [verb, *given, "tiny-llama", *more, "--quantize", "int3"])
    assert wrong.exit_code == 2 and "Known: fp8, int4, int8" in " ".join(wrong.output.split())
