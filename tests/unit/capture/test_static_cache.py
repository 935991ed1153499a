"""Unmodified Hugging Face decoders with StaticCache: the tokens of eager, caches written in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import graft
from graft.base.errors import CaptureError, PositionError, SharedMemoryError, UnsupportedCache, UsageError
from marks import short

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    # the window fills up while it generates: layers take three ways through their Python code
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, sliding_window=12, query_pre_attn_scalar=8)
    ),
}
DYNAMIC = {"input_ids": {1: Dim.DYNAMIC}, "past_key_values": None, "use_cache": None}


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def generate(model, prompt, cache, tokens=20):
    """Greedy tokens, and what the last step returned."""
    found, ids = [], prompt
    with torch.no_grad():
        for _ in range(tokens):
            result = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids = result.logits[:, -1:].argmax(-1)
            found.append(ids.item())
    return found, result


def compiled_of(model, backend="eager", length=32, prompt=7):
    cache = StaticCache(config=model.config, max_cache_len=length)
    inputs = {"input_ids": torch.zeros((1, prompt), dtype=torch.int64), "past_key_values": cache, "use_cache": True}
    return graft.compile(model, kwargs=inputs, dynamic_shapes=DYNAMIC, backend=backend)


@pytest.mark.parametrize(
    ("name", "backend"),
    short([*((name, "eager") for name in MODELS), ("llama", "inductor")], ("llama", "eager")),
)
def test_twenty_tokens_twice_as_in_eager(name, backend, request):
    known = (name, backend) == ("llama", "eager")
    model = model_of(name)
    model, compiled = request.getfixturevalue("llama") if known else (model, compiled_of(model, backend))
    captured = 0
    for sequence, (length, room) in enumerate(((7, 32), (9, 32), (5, 40))):
        prompt = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(sequence))
        expected, reference = generate(model, prompt, StaticCache(config=model.config, max_cache_len=room))
        cache = StaticCache(config=model.config, max_cache_len=room)
        generate(compiled, prompt, cache, tokens=1)
        memory = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
        cache.reset()
        got, result = generate(compiled, prompt, cache)
        assert got == expected
        torch.testing.assert_close(result.logits, reference.logits, atol=1e-5, rtol=1e-4)
        assert result.past_key_values is cache and type(result) is type(reference)
        assert memory == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
        for layer, known in zip(cache.layers, reference.past_key_values.layers, strict=True):
            torch.testing.assert_close(layer.keys, known.keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(layer.values, known.values, atol=1e-5, rtol=1e-4)
            assert layer.cumulative_length == known.cumulative_length
            assert vars(layer).get("cumulative_length_int") == vars(known).get("cumulative_length_int")
        if sequence == 0:
            captured = len(compiled.variants)
    assert len(compiled.variants) == captured == (3 if name == "gemma2" else 2)  # a longer cache captures nothing new


@pytest.fixture(scope="module")
def llama():
    """A model and what was compiled of it, for tests that leave both as they are."""
    model = model_of("llama")
    return model, compiled_of(model)


def test_alias_map_and_report_name_the_caches(llama):
    _, compiled = llama
    kinds = {alias.input: alias.kind for alias in compiled.aliases}
    for layer in range(2):
        prefix = f"past_key_values.layers[{layer}]"
        assert kinds[f"{prefix}.keys"] == kinds[f"{prefix}.values"] == "kv_cache_update"
        assert kinds[f"{prefix}.cumulative_length"] == "user"
    assert all(record.how == "in place" and record.owner == "caller" for record in compiled.report.state)
    assert len(compiled.report.transforms["fuse_attention"].matches) == 2  # through the caches, without their copies


@pytest.mark.exhaustive  # the short run: exported by Hugging Face, in test_programs.py
def test_module_owned_caches_need_no_reset_between_sequences():
    model = model_of("llama")
    config = {"batch_size": 1, "max_cache_len": 32}
    model.generation_config = GenerationConfig(cache_implementation="static", cache_config=config, use_cache=True)
    wrapped = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=32)
    inputs = {"input_ids": torch.zeros((1, 7), dtype=torch.int64), "cache_position": torch.arange(7)}
    dynamic = {"input_ids": {1: Dim.DYNAMIC}, "cache_position": {0: Dim.DYNAMIC}}
    compiled = graft.compile(wrapped, (), inputs, dynamic_shapes=dynamic)
    assert {"key_cache_0", "value_cache_1", "cumulative_length_1"} <= {alias.input for alias in compiled.aliases}
    for length in (7, 5):
        prompt = torch.randint(0, 64, (1, length))
        expected, _ = generate(model, prompt, StaticCache(config=model.config, max_cache_len=32))
        got, ids, position = [], prompt, torch.arange(length)
        for _ in range(20):
            ids = compiled(input_ids=ids, cache_position=position)[:, -1:].argmax(-1)
            got.append(ids.item())
            position = position[-1:] + 1
        assert got == expected
    assert compiled.key_cache_0.any()
    compiled.reset()
    assert not compiled.key_cache_0.any() and compiled.cumulative_length_0 == 0


def test_bad_caches_are_refused(llama):
    model, compiled = llama
    ids = torch.zeros((1, 7), dtype=torch.int64)
    short = StaticCache(config=model.config, max_cache_len=6)
    with pytest.raises(PositionError, match=r"position 6 of past_key_values\.layers\[0\]\.keys, which has 6"):
        compiled(input_ids=ids, past_key_values=short, use_cache=True)
    assert not short.layers[0].is_initialized and short.layers[0].cumulative_length == 0  # as it was
    shared = StaticCache(config=model.config, max_cache_len=16)
    compiled(input_ids=ids, past_key_values=shared, use_cache=True)
    shared.layers[1].keys = shared.layers[0].keys
    with pytest.raises(SharedMemoryError, match="layers"):
        compiled(input_ids=ids, past_key_values=shared, use_cache=True)
    with pytest.raises(UsageError, match="compiled with 1 caches"):
        compiled(input_ids=ids, past_key_values=None, use_cache=True)


def test_a_cache_that_is_set_anew_is_refused():
    class Replaces(nn.Module):
        def forward(self, x, cache):
            cache.layers[0].keys = cache.layers[0].keys + x
            return x

    cache = StaticCache(config=LlamaConfig(**SIZES), max_cache_len=8)
    cache.early_initialization(1, 2, 8, torch.float32, "cpu")
    with pytest.raises(CaptureError, match="keys is set anew"):
        graft.compile(Replaces(), (torch.tensor(1.0), cache))


def test_a_cache_that_the_model_makes_itself_is_refused_by_name():
    with pytest.raises(UnsupportedCache, match=r"DynamicCache among the inputs or results.*use_cache=False"):
        graft.compile(model_of("llama"), kwargs={"input_ids": torch.ones((1, 3), dtype=torch.int64)})
