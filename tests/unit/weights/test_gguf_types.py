"""GGUF weights as floats: each type is what the gguf package makes of it; the report says what is rounded."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import graph_of
from gguf_cases import HEADS, KV, TYPES, blocks, shapes, write_quantized
from graft import LLM
from graft.models.load import load_model
from graft.weights.gguf.convert import convert_gguf, stored_dtype
from marks import examples

KINDS = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
PLACES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def reference(path) -> dict[str, torch.Tensor]:
    """The gguf package's own numbers under Hugging Face's names; rows of q and k in Hugging Face's order."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(np.copy(gguf.dequantize(tensor.data, tensor.tensor_type)))
        part, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        if name in ("attn_q", "attn_k"):
            heads = HEADS if name == "attn_q" else KV
            values = values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        if name in PLACES:
            found[f"model.layers.{part.partition('.')[2]}.{PLACES[name]}.weight"] = values
        elif name == "token_embd":
            found["model.embed_tokens.weight"] = values
    return found


def wrong_weights(path, dtype: str) -> list[str]:
    """Weights that are not the reference, rounded to `dtype` once."""
    model = load_model(path, dtype=dtype, device="cpu").module
    found = dict(model.named_parameters())
    return [name for name, values in reference(path).items() if not torch.equal(found[name], values.to(model.dtype))]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "small.gguf"


@pytest.mark.some(5)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_float32_are_the_packages_own(path, kind):
    write_quantized(path, {}, kind)
    assert wrong_weights(path, "float32") == []


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float64"])
def test_other_dtypes_are_rounded_once(path, dtype):
    write_quantized(path, {"attn_q": "Q8_0", "ffn_up": "F16"}, "F32")
    assert wrong_weights(path, dtype) == []


@settings(max_examples=examples(4), deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(PLACES)), st.sampled_from(KINDS), max_size=4), st.sampled_from(KINDS))
def test_mixtures_of_types(tmp_path_factory, kinds, default):
    folder = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAFT_CACHE_DIR", str(folder / "cache"))
        write_quantized(folder / "mixed.gguf", kinds, default)
        assert wrong_weights(folder / "mixed.gguf", "float32") == []


def test_a_folder_of_each_precision_and_a_note_of_what_was_rounded(path):
    write_quantized(path, {"attn_q": "Q8_0"}, "F32")
    assert stored_dtype(torch.bfloat16) is torch.bfloat16 and stored_dtype(torch.float16) is torch.float32
    exact, rounded = (convert_gguf(path, stored=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert exact != rounded
    sizes = [sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (exact, rounded)]
    assert 1.9 < sizes[0] / sizes[1] < 2.1
    (note,) = load_model(path, dtype="float32", device="cpu").notes
    assert note == "weights: small.gguf (F32: 18, Q8_0: 2) dequantised in float32"
    (note,) = load_model(path, dtype="bfloat16", device="cpu").notes
    assert note.endswith("dequantised in float32, then rounded to bfloat16")


@pytest.mark.exhaustive
def test_the_engine_reports_it_and_computes_with_these_numbers(path):
    write_quantized(path, {}, "F32")
    llm = LLM(path, dtype="float32", backend="eager", device="cpu")
    assert any(note.startswith("weights: small.gguf (F32: 20)") for note in llm.report.notes)
    ids = torch.tensor([[5, 9, 77, 31]])
    module = load_model(path, dtype="float32", device="cpu").module
    with torch.no_grad():
        (found,) = graph_of(module)(ids, torch.arange(4)[None])
        double = load_model(path, dtype="float64", device="cpu").module(input_ids=ids).logits
    assert (found - double).abs().max() < 1e-5
    rounded = load_model(path, dtype="bfloat16", device="cpu").module.float()
    with torch.no_grad():
        assert (rounded(input_ids=ids).logits - double).abs().max() > 1e-3, "weights rounded to bfloat16 would show"


def test_blocks_of_every_type_are_written():
    for kind in KINDS[2:]:
        assert blocks(np.ones((2, 256), np.float32), kind).dtype == np.uint8 and TYPES[kind]
    assert len(shapes()) == 20
