"""GGUF files whose blocks go to the native backend as they are: rows, types, merged layers, files that are gone."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from gguf_cases import HEADS, KV, WIDTH, write_quantized
from graft import LLM, SamplingParams
from graft.backends import lower
from graft.base.errors import CheckpointError, PackingError, UsageError
from graft.bench.quality import engine_logits
from graft.models.load import load_model
from graft.passes.config import load_config
from graft.weights.file_rows import FileRows
from graft.weights.gguf.blocks import INDEX, blocks_folder, lazy_model
from graft.weights.gguf.reader import one_reader
from graft.weights.lazy import LazyWeights, untouched
from graft.workbench.native import native_source
from marks import short
from native_cases import needs_compiler

IDS = [5, 9, 77, 31, 8, 3, 90, 12, 64, 2, 17]
MIXED = {"token_embd": "Q8_0", "ffn_down": "Q6_K", "attn_output": "F16", "attn_v": "Q8_0"}
FILES = {"Q4_1": {"token_embd": "Q8_0"}, "Q4_0": {}, "Q8_0": {}, "Q4_K": MIXED}


@pytest.fixture
def file(tmp_path, monkeypatch, request):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    kind = getattr(request, "param", "Q4_1")
    write_quantized(tmp_path / "small.gguf", FILES[kind], kind)
    return tmp_path / "small.gguf"


def reference(path, model) -> dict[str, torch.Tensor]:
    """What transformers makes of the file."""
    return load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]


@pytest.mark.parametrize("file", FILES, indirect=True)
def test_every_weight_is_the_files_own(file):
    model = load_model(file, device="cpu", in_blocks=True)
    assert model.lazy is not None and model.floats is not None
    wanted = reference(file, model.module)
    head, table = model.module.lm_head.weight, model.module.model.embed_tokens.weight
    assert head is table and table in model.lazy
    found = dict(model.floats().named_parameters())
    for name, tensor in found.items():
        rounded = "down_proj" in name and model.lazy.quants(dict(model.module.named_parameters())[name])[0] != "Q4_1"
        slack = 0.006 if rounded else 2.0**-10  # Q6_K as Q8_0: half of 1/127; Q4_K: float16 scales
        assert (tensor - wanted[name]).abs().max() <= slack * wanted[name].abs().max(), name
    q = "model.layers.0.self_attn.q_proj.weight"
    wrong = found[q].view(HEADS, 2, -1, WIDTH).transpose(1, 2).reshape(WIDTH, WIDTH)
    assert (wrong - wanted[q]).abs().max() > 0.1 * wanted[q].abs().max(), "rows in llama.cpp's order would show"


def test_loading_touches_no_weights_and_the_second_time_no_metadata(file, monkeypatch):
    told = []
    load_model(file, device="cpu", in_blocks=True, progress=lambda what, done, total: told.append(what))
    assert "finding the weights" in told and "dequantising the weights" not in told
    told.clear()
    monkeypatch.setattr("gguf.GGUFReader", None)
    model = load_model(file, device="cpu", in_blocks=True, progress=lambda what, done, total: told.append(what))
    assert told == []
    assert all(not p.any() for p in model.module.parameters() if p.dim() == 2), "never written"


@pytest.mark.exhaustive
def test_the_dumped_step_reads_the_blocks(file):
    own = native_source(str(file), load_config())
    assert "linear<WeightQ4>" in own and "packed_embedding<WeightQ8>" in own and "linear<WeightF32>" not in own


@pytest.mark.exhaustive
def test_the_dumped_step_reads_what_is_asked_for(file):
    assert "linear<WeightF32>" in native_source(str(file), load_config(), dtype="float32")
    eight = native_source(str(file), load_config(sets=["transforms.quantize_linear.enabled=true"]))
    assert "linear<WeightQ8>" in eight and "linear<WeightQ4>" not in eight


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("file", short(["Q4_1", "Q4_K"], "Q4_1"), indirect=True)
def test_engines_read_the_blocks(file):
    llm = LLM(file, device="cpu", backend="native", kv_cache_memory="8MiB")
    note = next(note for note in llm.report.notes if note.startswith("quantize_linear"))
    merged = llm.report.transforms["merge_qkv"]
    if "Q6_K as Q8_0" in note:
        assert "Q4_K of the file" in note and "has floats in the file" in note
        assert "lie in the file as Q4_K and Q8_0" in merged.near_misses[0].reason
    else:
        assert "8 weights as q4 (Q4_1 of the file)" in note and "1 weight as q8 (Q8_0 of the file)" in note
        assert len(merged.matches) == 2 and not merged.near_misses
    assert llm.model.lazy is not None and not llm.model.lazy.parts
    floats = load_model(file, device="cpu", in_blocks=True).floats
    assert floats is not None
    with torch.no_grad():
        wanted = floats()(torch.tensor([IDS])).logits[0]
    if not any(
        "own were freed" in note for note in llm.report.notes
    ):  # of Q4_K a float weight is, after it was packed
        eager = engine_logits(llm, IDS, lower(llm.graph_module, "eager").call)
        assert float((eager - wanted).norm() / wanted.norm()) < 1e-3, "the graph has the file's numbers"
    found = engine_logits(llm, IDS)
    assert float((found - wanted).norm() / wanted.norm()) < 0.04  # 8-bit activations, see test_native_quantized
    assert llm.generate([IDS], SamplingParams(max_tokens=4, ignore_eos=True))[0].finish_reason == "length"


@pytest.mark.exhaustive
@needs_compiler
def test_a_configuration_stands_above_the_default(file):
    off = {"transforms": {"quantize_linear": {"enabled": False}}}
    asked = LLM(file, device="cpu", backend="native", config=off, kv_cache_memory="8MiB")
    assert asked.quantized is None
    assert any("9 of the file's were read whole, because the graph reads" in note for note in asked.report.notes)


@needs_compiler
@pytest.mark.exhaustive
def test_floats_where_they_are_asked_for(file):
    plain = LLM(file, device="cpu", backend="native", quantize="none", kv_cache_memory="8MiB")
    assert plain.quantized is None and plain.model.lazy is None
    off = {"transforms": {"quantize_linear": {"enabled": False}}}
    asked = LLM(file, device="cpu", backend="native", config=off, kv_cache_memory="8MiB")
    other = {"transforms": {"quantize_linear": {"enabled": True, "format": "int8"}}}
    eight = LLM(file, device="cpu", backend="native", config=other, kv_cache_memory="8MiB")
    assert eight.quantized is not None and eight.quantized.format == "q8"
    assert any("9 weights as q8," in note for note in eight.report.notes)
    with pytest.raises(UsageError, match="freed when"):
        eight.model.module(torch.tensor([IDS]))
    checked = LLM(
        file, device="cpu", backend="native", config={"verify": "matches"}, keep_weights=True, kv_cache_memory="8MiB"
    )
    assert any("verify: matches computes with them" in note for note in checked.report.notes)
    logits = checked.model.module(torch.tensor([IDS])).logits[0]  # kept: a copy of its own
    found = engine_logits(checked, IDS)
    assert float((found - logits).norm() / logits.norm()) < 0.04
    for llm in (asked, eight, plain):
        assert float((engine_logits(llm, IDS) - logits).norm() / logits.norm()) < 0.04


def test_files_that_are_gone_or_others(file):
    folder = blocks_folder(file)
    index = json.loads((folder / INDEX).read_text())
    assert index["tensors"] and len(index["orders"]) == 2, "one order of rows for q, one for k"
    assert sorted(index["orders"][0]) == list(range(WIDTH)) and len(index["orders"][1]) == WIDTH // HEADS * KV
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(file, device="cpu", in_blocks=True)
    file.unlink()
    with pytest.raises(CheckpointError, match="is gone or is another file"):
        lazy_model(folder, torch.float32, None)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(file.with_name("none.gguf"), device="cpu", in_blocks=True)


def test_rows_behind_parameters():
    held, one, two = LazyWeights(), untouched((8, 64), torch.float32), untouched((16, 64), torch.float32)
    rows = [FileRows("Q8_0", torch.zeros(n, 68, dtype=torch.uint8)) for n in (8, 16)]
    rows[1].raw[:, 2:34] = 3
    rows[1].raw[:, 1] = 0x3C  # the float16 1.0, low byte first
    held.put(one, rows[0])
    assert one in held and two not in held
    assert held.joinable([two]) is None and "some do not" in (held.joinable([one, two]) or "")
    held.put(two, rows[1])
    assert held.joinable([one, two]) is None
    both = untouched((24, 64), torch.float32)
    held.put(both, *rows)
    assert held.of(both) == tuple(rows) and held.of(both[8:]) == (rows[1],)
    with pytest.raises(PackingError, match="no whole tensors"):
        held.of(both[4:])
    before = both._version
    held.fill(both[8:])
    assert both._version == before, "filling it in is no transform's writing into a weight"
    assert both not in held and bool((both[8:, :32] == 3).all()) and not both[:8].any()


def test_one_reader_serves_all_and_is_gone_afterwards(file):
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with one_reader():
        first = gguf.GGUFReader(file)
        with one_reader():
            assert gguf.GGUFReader(str(file), "r") is first
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    plain = gguf.GGUFReader(file)
    assert [(t.name, t.data.tobytes()) for t in plain.tensors] == [(t.name, t.data.tobytes()) for t in first.tensors]
    assert {n: [bytes(p) for p in f.parts] for n, f in plain.fields.items()} == {
        n: [bytes(p) for p in f.parts] for n, f in first.fields.items()
    }


@pytest.mark.parametrize("file", FILES, indirect=True)
def test_a_part_of_blocks_is_the_files_own(file):
    """Rows of any order, and columns where no cut goes through a block; else the numbers of the part alone."""
    model = load_model(file, device="cpu", in_blocks=True, ranks=2)
    whole, lazy = load_model(file, device="cpu", in_blocks=True), model.lazy
    assert lazy is not None and whole.floats is not None
    expected = dict(whole.floats().named_parameters())
    cut_in_blocks = set()
    for name, parameter in model.module.named_parameters():
        if parameter.dim() != 2:
            continue
        blocks = lazy.in_blocks(parameter)
        for axis, size in enumerate(parameter.shape):
            part, as_stored = lazy.part(parameter.data, axis, [(size // 2, size)])
            if blocks and as_stored:
                held = sum(rows.nbytes for rows in lazy.of(part))
                assert held == sum(rows.nbytes for rows in lazy.of(parameter)) // 2
                cut_in_blocks.add((name.rpartition("_proj")[0].rpartition(".")[2], axis))
            assert as_stored or lazy.of(parameter)[0].quant == "Q4_K"
            lazy.fill(part)
            assert torch.equal(part, expected[name].narrow(axis, size // 2, size - size // 2)), (name, axis)
    assert {("q", 0), ("k", 0)} < cut_in_blocks, "rows in another order than llama.cpp's"
    assert ("down", 1) in cut_in_blocks


def test_pieces_of_rows_stay_in_blocks_and_pieces_of_columns_do_not(file):
    lazy = load_model(file, device="cpu", in_blocks=True, ranks=2).lazy
    rows = FileRows("Q8_0", torch.randint(0, 60, (8, 4 * 34), dtype=torch.uint8))
    whole = untouched((8, 128), torch.float32)
    assert lazy is not None
    lazy.put(whole, rows)
    expected = torch.empty(8, 128)
    rows.read(((0, 8), (0, 128)), expected)
    for axis, pieces, stays in ((0, [(0, 2), (5, 8)], True), (1, [(0, 32), (64, 128)], False), (1, [(3, 70)], False)):
        part, as_stored = lazy.part(whole, axis, pieces)
        assert as_stored is stays
        lazy.fill(part)
        assert torch.equal(part, torch.cat([expected.narrow(axis, a, b - a) for a, b in pieces], axis))
