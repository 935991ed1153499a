"""config.json is held against the weights and the memory before anything is allocated; what cannot run says why."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import tiny
from graft.base.errors import CheckpointError, OutOfMemory
from graft.models import load, promises
from graft.models.load import load_model
from marks import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    tiny("llama").module.save_pretrained(path)
    return path


@pytest.fixture
def nothing_is_allocated(monkeypatch):
    """Whoever gets as far as reading weights has gone too far."""

    def refuse(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", refuse)


def with_config(folder, tmp_path, **changes):
    """The same weights under another config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    target = tmp_path / "changed"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    if not (target / "model.safetensors").exists():
        (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target


def test_a_config_of_a_large_model_over_small_weights(folder, tmp_path, nothing_is_allocated):
    """`{"model_type": "llama"}` is 6.7 billion parameters: 27 GB in float32."""
    bare = with_config(folder, tmp_path)
    (bare / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="num_hidden_layers 32, but the weight files have 21 tensors in all"):
        load_model(bare, device="cpu")
    (bare / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    with pytest.raises(
        CheckpointError, match=r"[\d,]{11} parameters, but .* hold [\d,]+ numbers: model\.embed_tokens"
    ):
        load_model(bare, device="cpu")


@settings(max_examples=examples(15), deadline=None)
@given(
    st.sampled_from(["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]),
    st.sampled_from([2, 3, 10, 1000, 10**6, 10**9]),
)
def test_any_size_that_grows_is_refused_before_weights_are_read(folder, tmp_path_factory, key, factor):
    size = json.loads((folder / "config.json").read_text())[key] * factor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load.AutoModelForCausalLM, "from_pretrained", None)
        changed = with_config(folder, tmp_path_factory.mktemp("grown"), **{key: size})
        with pytest.raises(CheckpointError) as caught:
            load_model(changed, device="cpu")
    assert "NoneType" not in str(caught.value)


def test_weights_that_are_missing_are_named(folder, tmp_path, nothing_is_allocated):
    more = with_config(folder, tmp_path, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"no weights for model\.layers\.2\.\S+ \(9 are missing\)"):
        load_model(more, device="cpu")


def test_weights_beyond_the_memory_are_refused(folder, monkeypatch, nothing_is_allocated):
    monkeypatch.setattr(promises, "free_memory", lambda device: 1000)
    with pytest.raises(OutOfMemory, match=r"take .* in float64, but .* of memory are free"):
        load_model(folder, dtype="float64", device="cpu")


def test_weights_in_the_files_own_dtype_stay_pages_of_the_file(folder, monkeypatch):
    monkeypatch.setattr(promises, "free_memory", lambda device: 1000)
    assert load_model(folder, dtype="float32", device="cpu").layers == 2


@pytest.mark.parametrize("length", [0, -1, 2.5, "64", True])
def test_a_context_that_is_none(folder, tmp_path, length, nothing_is_allocated):
    with pytest.raises(CheckpointError, match=r"max_position_embeddings"):
        load_model(with_config(folder, tmp_path, max_position_embeddings=length), device="cpu")


def test_a_context_of_nothing_says_so(folder, tmp_path, nothing_is_allocated):
    with pytest.raises(CheckpointError, match=r"max_position_embeddings is 0, but it is the length of the longest"):
        load_model(with_config(folder, tmp_path, max_position_embeddings=0), device="cpu")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mpt", "computes attention in its own way"),
        ("bloom", "computes attention in its own way"),
        ("mamba", "keeps a recurrent state"),
        ("gemma3", r"multimodal \(text_config, vision_config\)"),
    ],
)
def test_families_that_cannot_run_say_why(folder, tmp_path, kind, why, nothing_is_allocated):
    config = AutoConfig.for_model(kind)
    other = with_config(folder, tmp_path)
    config.save_pretrained(other)
    with pytest.raises(CheckpointError, match=f"models of type {kind} are not supported: .*{why}") as caught:
        load_model(other, device="cpu")
    assert "max_position_embeddings" not in str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_whole_checkpoints_load(tmp_path, tied):
    config = copy.deepcopy(tiny("llama").module.config)
    config.tie_word_embeddings = tied
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").module.dtype is torch.float32
