"""Caches of encoder-decoders and of hybrid decoders: step by step as in eager; others are refused by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.cache_utils import QuantizedCache
from transformers.modeling_outputs import BaseModelOutput

import graft
from graft.base.errors import CaptureError, UnsupportedCache, UsageError
from graft.capture.static_cache import layers_of
from marks import short

WIDTHS = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 32, "pad_token_id": 0}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
ENCODERS = {
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**WIDTHS, **SPEECH, init_std=0.4)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5, decoder_start_token_id=0)),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**WIDTHS, max_position_embeddings=64, init_std=0.4)),
}
HYBRIDS = {
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**DECODER, layer_types=["conv", "full_attention"])),
    "falcon_h1": lambda: FalconH1ForCausalLM(FalconH1Config(**DECODER, **MAMBA, mamba_chunk_size=4)),
}
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def model_of(make):
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)


def encoded(name, length=6):
    generator = torch.Generator().manual_seed(length)
    if name == "whisper":
        return {"input_features": torch.randn(1, 8, 2 * length, generator=generator)}
    return {"input_ids": torch.randint(3, 64, (1, length), generator=generator)}


def new_cache(model, cross=6, room=32):
    return EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=n) for n in (room, cross)))


def steps(model, cache, given, prompt=3, tokens=5):
    """Logits of greedy steps, and what the last one returned."""
    name, found = "decoder_input_ids" if given else "input_ids", []
    ids = torch.arange(5, 5 + prompt)[None]
    for _ in range(tokens):
        result = model(**given, **{name: ids}, past_key_values=cache, use_cache=True)
        found.append(result.logits)
        ids = result.logits[:, -1:].argmax(-1)
    return found, result


def compiled_of(model, cache, given, name="", **settings):
    name = name or ("decoder_input_ids" if given else "input_ids")
    inputs = {**given, name: torch.ones((1, 3), dtype=torch.int64), "past_key_values": cache, "use_cache": True}
    free = {key: {1: Dim.AUTO} if key.endswith("_ids") else None for key in inputs}
    return graft.compile(model, kwargs=inputs, dynamic_shapes=free, **settings)


def state_of(cache):
    """Every tensor and number of the cache, by where it is."""
    found = {f"{i}.{name}": value for i, layer in enumerate(layers_of(cache)) for name, value in vars(layer).items()}
    for name, value in list(found.items()):
        if isinstance(value, dict):
            found |= {f"{name}.{key}": item for key, item in value.items()}
    return {name: value for name, value in found.items() if isinstance(value, (torch.Tensor, int))}


def assert_same_caches(cache, known):
    ours, theirs = state_of(cache), state_of(known)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def t5():
    """A model and what was compiled of it, for tests that leave both as they are."""
    model = model_of(ENCODERS["t5"])
    return model, compiled_of(model, new_cache(model), encoded("t5"))


@pytest.mark.parametrize("name", short(list(ENCODERS), "t5"))
def test_encoder_decoders_step_as_in_eager(name, request):
    model, given = model_of(ENCODERS[name]), encoded(name)
    model, compiled = (
        request.getfixturevalue("t5") if name == "t5" else (model, compiled_of(model, new_cache(model), given))
    )
    cache, known = new_cache(model), new_cache(model)
    memory = []
    for _ in range(2):  # the second after a reset, in the same memory
        got, result = steps(compiled, cache, given)
        expected, reference = steps(model, known, given)
        torch.testing.assert_close(got, expected, **CLOSE)
        assert result.past_key_values is cache and type(result) is type(reference)
        assert_same_caches(cache, known)
        memory.append([layer.keys.data_ptr() for layer in layers_of(cache)[:-1]])
        cache.reset()
        known.reset()
    assert len(compiled.variants) == 2 and memory[0] == memory[1]


def test_cross_attention_is_written_once(t5):
    model, compiled = t5
    steps(compiled, new_cache(model), encoded("t5"))
    first, later = ({alias.input: alias.kind for alias in variant.aliases} for variant in compiled.variants[:2])
    names = [f"past_key_values.{half}_attention_cache.layers[0].keys" for half in ("self", "cross")]
    assert [first[name] for name in names] == ["kv_cache_update"] * 2
    assert later[names[0]] == "kv_cache_update" and not any("cross" in name for name in later)
    assert compiled.variants[1].made_by == (
        "input past_key_values.is_updated[0] is True, but False is fixed in the graph"
    )


def test_caches_of_other_lengths_take_the_same_graphs(t5):
    model, compiled = t5
    for length, room in ((9, 32), (4, 24)):
        cache, known = new_cache(model, length, room), new_cache(model, length, room)
        got, _ = steps(compiled, cache, encoded("t5", length))
        torch.testing.assert_close(got, steps(model, known, encoded("t5", length))[0], **CLOSE)
        assert_same_caches(cache, known)
    assert len(compiled.variants) == 2


def test_keys_of_another_encoder_make_other_logits(t5):
    """What the comparisons above would not notice if cross-attention read nothing."""
    model, compiled = t5
    cache, known = new_cache(model), new_cache(model)
    steps(compiled, cache, encoded("t5"))
    steps(model, known, encoded("t5"))
    cache.cross_attention_cache.layers[0].keys.neg_()
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(
            steps(compiled, cache, encoded("t5"), prompt=1)[0],
            steps(model, known, encoded("t5"), prompt=1)[0],
            **CLOSE,
        )


def test_an_encoder_that_is_longer_than_the_cache_is_refused(t5):
    model, compiled = t5
    with pytest.raises(UsageError, match=r"cross_attention_cache\.layers\[0\]\.keys is 6, but must be .* = 8"):
        steps(compiled, new_cache(model, cross=6), encoded("t5", 8))


def test_a_saved_encoder_decoder_goes_on(t5, tmp_path):
    model, compiled = t5
    steps(compiled, new_cache(model), encoded("t5"))
    compiled.save(tmp_path / "saved")
    loaded, cache, known = graft.load(tmp_path / "saved"), new_cache(model), new_cache(model)
    with pytest.raises(UsageError, match="early_initialization"):
        steps(loaded, cache, encoded("t5"))
    for half in (cache.self_attention_cache, cache.cross_attention_cache):
        half.early_initialization(1, 4, 8, torch.float32, "cpu")
    torch.testing.assert_close(steps(loaded, cache, encoded("t5"))[0], steps(model, known, encoded("t5"))[0], **CLOSE)
    assert cache.is_updated == {0: True}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_with_convolutions_and_recurrent_state_step_as_in_eager(name):
    model = model_of(HYBRIDS[name])
    cache, known = (StaticCache(config=model.config, max_cache_len=16) for _ in range(2))
    compiled = compiled_of(model, StaticCache(config=model.config, max_cache_len=16), {})
    for _ in range(2):
        torch.testing.assert_close(steps(compiled, cache, {})[0], steps(model, known, {})[0], **CLOSE)
        assert_same_caches(cache, known)
        cache.reset()
        known.reset()
    assert len(compiled.variants) == 2
    assert any(".conv_states.0" in alias.input for alias in compiled.aliases)


def test_other_caches_are_refused_by_name(t5):
    _, compiled = t5
    config = LlamaConfig(**DECODER)
    offloaded = StaticCache(config=config, max_cache_len=8)
    offloaded.offloading = True  # as its constructor sets it, which wants a GPU's stream
    others = {
        "DynamicCache among": DynamicCache(config=config),
        "QuantizedCache among .* quantised": object.__new__(QuantizedCache),  # its layers want another package
        r"StaticCache\(offloading=True\) among .* between devices": offloaded,
        "DynamicCache .* replaces its tensors": EncoderDecoderCache(DynamicCache(), DynamicCache()),
    }
    for message, cache in others.items():
        with pytest.raises(UnsupportedCache, match=message):
            graft.compile(Marks(), (torch.ones(2), cache))
    with pytest.raises(UnsupportedCache, match="DynamicCache"):
        steps(compiled, EncoderDecoderCache(DynamicCache(), DynamicCache()), encoded("t5"))


class Inner(nn.Module):
    def forward(self, x, cache):
        return x + cache.self_attention_cache.layers[0].keys.sum(), cache.self_attention_cache


class Marks(nn.Module):
    def forward(self, x, cache):
        cache.layers[0].marks["seen"] = True
        return x + 1


def test_what_would_be_lost_is_refused():
    config = LlamaConfig(**DECODER)
    halves = [StaticCache(config=config, max_cache_len=8) for _ in range(2)]
    for half in halves:
        half.early_initialization(1, 2, 8, torch.float32, "cpu")
    with pytest.raises(CaptureError, match="returns a StaticCache that is none of its arguments"):
        graft.compile(Inner(), (torch.ones(2), EncoderDecoderCache(*halves)))
    halves[0].layers[0].marks = {"seen": False}
    with pytest.raises(CaptureError, match=r"StaticLayer\.marks is set anew"):
        graft.compile(Marks(), (torch.ones(2), halves[0]))


class Recalls(nn.Module):
    """Keeps what the encoder said, moved by the token."""

    def forward(self, input_ids, encoder_outputs, past_key_values, use_cache):
        said = encoder_outputs.last_hidden_state.unflatten(-1, (4, 8)).transpose(1, 2)
        keys, values = past_key_values.update(said + input_ids.sum(), said, 0)
        return keys.sum(-1) + values.mean(), past_key_values


def test_an_object_of_another_model_and_a_cache_without_tensors_together():
    model, config = Recalls(), LlamaConfig(**DECODER | {"num_hidden_layers": 1})
    make = lambda: StaticCache(config=config, max_cache_len=12)  # noqa: E731
    said = BaseModelOutput(last_hidden_state=torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0)))
    compiled = compiled_of(model, make(), {"encoder_outputs": said}, name="input_ids")
    cache, known = make(), make()
    for token in (5, 7):
        call = {"input_ids": torch.full((1, 3), token), "encoder_outputs": said, "use_cache": True}
        found = compiled(**call, past_key_values=cache)[0]
        torch.testing.assert_close(found, model(**call, past_key_values=known)[0], **CLOSE)
        assert_same_caches(cache, known)
        assert not torch.allclose(found, found.roll(1, -1))


@pytest.mark.exhaustive  # the test above has both in a smaller model
def test_an_object_of_the_encoder_and_a_cache_without_tensors_together():
    model = model_of(ENCODERS["t5"])
    given = {"encoder_outputs": model.encoder(**encoded("t5"))}
    compiled = compiled_of(model, new_cache(model), given)
    cache, known = new_cache(model), new_cache(model)
    torch.testing.assert_close(steps(compiled, cache, given)[0], steps(model, known, given)[0], **CLOSE)
    assert_same_caches(cache, known)
