"""What a folder asks for beside config and weights is done, refused or told: adapters, quantization, sampling."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from conftest import tiny
from graft.base.errors import CheckpointError, GraftError
from graft.cli.app import app
from graft.engine.llm import LLM
from graft.models.load import load_model
from graft.models.requests import refuse_foreign_tensors
from marks import examples


@pytest.fixture
def folder(tmp_path):
    tiny("llama").module.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    return tmp_path / "model"


def configure(folder, file="config.json", **entries) -> None:
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **entries}))


@pytest.mark.parametrize("peft", [False, True])
def test_an_adapter_in_the_folder_is_refused_with_and_without_peft(folder, monkeypatch, peft):
    monkeypatch.setattr("transformers.models.auto.auto_factory.is_peft_available", lambda: peft)
    monkeypatch.setattr("transformers.integrations.peft.is_peft_available", lambda: peft)
    configure(folder, "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(folder))
    with pytest.raises(CheckpointError, match=r"holds an adapter .*merge it into the weights"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "nonsense"}, r"unknown quant_method 'nonsense'.*Known: aqlm"),
        ({"quant_method": "gptx"}, r"did you mean 'gptq'"),
        ({"quant_method": "gguf"}, "unknown quant_method 'gguf'"),
        ({}, "unknown quant_method None"),
        ([], "holds a list where an object"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quantized with torchao"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_quantization_that_nobody_does_is_refused(folder, quantization, message, inside):
    entry = {"quantization_config": quantization}
    configure(folder, **({"text_config": entry} if inside else entry))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, device="cpu")


def test_no_quantization_is_no_quantization(folder):
    configure(folder, quantization_config=None)
    assert load_model(folder, device="cpu").notes == ()


def test_weights_of_a_foreign_class_are_named(tmp_path):
    class Packed(torch.Tensor):
        pass

    module = torch.nn.Linear(2, 2)
    refuse_foreign_tensors(tmp_path, module)
    module.register_buffer("scale", torch.ones(1))
    refuse_foreign_tensors(tmp_path, module)
    module.weight = torch.nn.Parameter(torch.zeros(2, 2).as_subclass(Packed), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"weight is a .*Packed, not a plain tensor"):
        refuse_foreign_tensors(tmp_path, module)


def test_tensors_that_the_config_has_no_place_for_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    biases = {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(4) for i in range(2)}
    save_file(tensors | biases, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.bias.*2 tensors would be dropped"):
        load_model(folder, device="cpu")


def test_tensors_that_transformers_leaves_out_are_told(tmp_path):
    """GPT-2's causal masks were once stored; transformers has a list of such names."""
    tiny("gpt2").module.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    masks = {f"transformer.h.{i}.attn.{name}": torch.ones(1) for i in range(2) for name in ("bias", "masked_bias")}
    save_file(tensors | masks, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (note,) = load_model(tmp_path, device="cpu").notes
    assert note.startswith("2 tensors of the folder are not used") and "transformer.h.0.attn.bias" in note


def test_a_weight_of_another_shape_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[3\], but config\.json makes it \[32\]"):
        load_model(folder, device="cpu")


CHANGES = st.dictionaries(st.integers(0, 20), st.sampled_from(["drop", "reshape", "rename"]), max_size=3)


@settings(max_examples=examples(25), deadline=None)
@given(CHANGES)
def test_any_difference_from_the_config_is_refused(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").module.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    for index, change in changes.items():
        value = tensors.pop(names[index])
        if change == "reshape":
            tensors[names[index]] = value.flatten()[:-1].clone()
        elif change == "rename":
            tensors[f"{names[index]}_other"] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if not changes:
        load_model(folder, device="cpu")
        return
    with pytest.raises(CheckpointError) as told:
        load_model(folder, device="cpu")
    assert any(names[index] in str(told.value) for index in changes) and "\n" not in str(told.value)


def test_sampling_defaults_that_are_not_used_are_told(folder):
    configure(folder, "generation_config.json", do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[2, 3])
    expected = "generation_config.json: do_sample=True, temperature=0.6, top_p=0.9 not used"
    stop = ["--set", "transforms.insert_kv_cache.enabled=false"]  # refused after loading, before seconds of capture
    result = CliRunner().invoke(app, ["run", "-m", str(folder), "--token-ids", "1,2", *stop])
    assert f"graft: note: {expected}" in result.stderr
    model = replace(tiny("llama"), notes=load_model(folder, device="cpu").notes)
    assert any(expected in note for note in LLM(model, backend="eager").report.notes)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({}, ""),
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": True}, ""),
        ({"temperature": 0.6, "top_k": 20}, ""),  # without do_sample, transformers does not use them either
        ({"do_sample": False, "repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"do_sample": True, "top_k": 20}, "do_sample=True, top_k=20"),
        ({"suppress_tokens": [5]}, "suppress_tokens=[5]"),
    ],
)
def test_only_what_would_change_tokens_is_told(folder, entries, told):
    configure(folder, "generation_config.json", **entries)
    notes = load_model(folder, device="cpu").notes
    assert [told in note and "do_sample=False" not in note for note in notes] == ([True] if told else [])


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '"x"'])
def test_a_damaged_generation_config_is_not_skipped(folder, text):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(GraftError, match=r"generation_config\.json (is damaged|holds a)"):
        LLM(folder, device="cpu")
