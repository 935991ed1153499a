"""Hugging Face's StaticCache and EncoderDecoderCache on a GPU: the steps of eager, in the caller's memory."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim
from transformers import (
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import graft
from graft.base.errors import UsageError
from graft.capture.static_cache import layers_of

LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
WHISPER = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 6, "max_target_positions": 32, "pad_token_id": 0, "init_std": 0.4,
}  # fmt: skip
CLOSE = {"atol": 1e-4, "rtol": 1e-3}


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # Whisper's convolutions


def llama(device):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).eval().requires_grad_(False).to(device)


def whisper(device):
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(WhisperConfig(**WHISPER)).eval().requires_grad_(False).to(device)


def cache_of(model, room=32):
    own = StaticCache(config=model.config, max_cache_len=room)
    if isinstance(model, LlamaForCausalLM):
        return own
    return EncoderDecoderCache(own, StaticCache(config=model.config, max_cache_len=6))


def steps(model, cache, given, name, device, tokens=6):
    """Logits of greedy steps."""
    found, ids = [], torch.arange(5, 8, device=device)[None]
    for _ in range(tokens):
        result = model(**given, **{name: ids}, past_key_values=cache, use_cache=True)
        assert result.past_key_values is cache
        found.append(result.logits)
        ids = result.logits[:, -1:].argmax(-1)
    return found


def memory(cache):
    """Of every layer's keys, the address and the values."""
    layers = [layer for layer in layers_of(cache) if hasattr(layer, "keys")]
    return [layer.keys.data_ptr() for layer in layers], [layer.keys.clone() for layer in layers]


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "backend"),
    [(llama, "eager"), (llama, "cuda_graph"), (llama, "inductor"), (whisper, "eager"), (whisper, "cuda_graph")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_steps_are_those_of_eager_in_the_callers_memory(device, make, backend):
    model = make(device)
    name = "input_ids" if make is llama else "decoder_input_ids"
    given = {} if make is llama else {"input_features": torch.randn(1, 8, 12, device=device)}
    example = {
        **given,
        name: torch.ones(1, 3, dtype=torch.int64, device=device),
        "past_key_values": cache_of(model),
        "use_cache": True,
    }
    free = dict.fromkeys(example) | {name: {1: Dim.AUTO}}
    compiled = graft.compile(model, kwargs=example, dynamic_shapes=free, backend=backend)
    kinds = {alias.input: alias.kind for alias in compiled.aliases}
    assert sum(kind == "kv_cache_update" for kind in kinds.values()) == (4 if make is llama else 8)
    cache, known, places = cache_of(model), cache_of(model), []
    for number in range(2):  # the second after a reset, in the same memory
        if number:
            cache.reset()
            known.reset()
        got = steps(compiled, cache, given, name, device)
        torch.testing.assert_close(got, steps(model, known, given, name, device), **CLOSE)
        (places_now, ours), (_, theirs) = memory(cache), memory(known)
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert all(tensor.device.type == torch.device(device).type for tensor in ours)
        places.append(places_now)
    assert places[0] == places[1] and len(compiled.variants) == 2
    if make is whisper:  # keys of the encoder are written by the first call alone
        later = {alias.input for alias in compiled.variants[1].aliases}
        assert not any("cross" in one for one in later) and any("self_attention" in one for one in later)
    wrong = cache_of(model)
    wrong_steps = steps(compiled, wrong, {k: v + 1 for k, v in given.items()}, name, device, tokens=1)
    if given:  # what the comparison would not notice if cross-attention read nothing
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong_steps, got[:1], **CLOSE)


def test_a_cache_on_another_device_is_refused():
    model = llama("cuda")
    ids = torch.ones(1, 3, dtype=torch.int64, device="cuda")
    inputs = {"input_ids": ids, "past_key_values": cache_of(model), "use_cache": True}
    free = {"input_ids": {1: Dim.AUTO}, "past_key_values": None, "use_cache": None}
    compiled = graft.compile(model, kwargs=inputs, dynamic_shapes=free)
    other = cache_of(model)
    other.early_initialization(1, 2, 8, torch.float32, "cpu")
    with torch.no_grad(), pytest.raises(UsageError, match=r"is .*cpu"):
        compiled(input_ids=ids, past_key_values=other, use_cache=True)
    assert all(not layer.keys.any() for layer in layers_of(other))
