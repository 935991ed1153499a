"""Speech as it comes in: windows of audio through a tiny Whisper with random weights, its tokens as they are found.

python examples/streaming_speech.py [--backend eager|inductor] [--device cpu|cuda]

One EncoderDecoderCache of two StaticCaches serves all windows. Its cross-attention keys are written by the first call
of a window; the graph of later calls only reads them, and writes one token of self-attention in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from transformers import EncoderDecoderCache, StaticCache, WhisperConfig, WhisperForConditionalGeneration

import graft
from shared import arguments

MELS, FRAMES, TOKENS, START = 16, 40, 24, [3, 7]
SIZES = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": MELS,
    "max_source_positions": FRAMES // 2, "max_target_positions": TOKENS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": START[0], "init_std": 0.5,
}  # fmt: skip


def new_cache(model: WhisperForConditionalGeneration) -> EncoderDecoderCache:
    halves = [StaticCache(config=model.config, max_cache_len=length) for length in (TOKENS, FRAMES // 2)]
    return EncoderDecoderCache(*halves)


def addresses(cache: EncoderDecoderCache) -> list[int]:
    halves: list[Any] = [cache.self_attention_cache, cache.cross_attention_cache]
    return [layer.keys.data_ptr() for half in halves for layer in half.layers]


def transcribe(
    encoder: torch.nn.Module, decoder: torch.nn.Module, features: Tensor, cache: EncoderDecoderCache
) -> list[int]:
    """Greedy tokens of one window."""
    cache.reset()
    heard = encoder(features).last_hidden_state
    ids, found = torch.tensor([START], device=features.device), []
    while len(found) < 8:
        step = decoder(encoder_outputs=(heard,), decoder_input_ids=ids, past_key_values=cache, use_cache=True)
        ids = step.logits[:, -1:].argmax(-1)
        found.append(int(ids))
    return found


@torch.no_grad()
def main() -> None:
    backend, device = arguments(__doc__)
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**SIZES)).eval().requires_grad_(False)
    torch.nn.Module.to(model, device)
    audio = torch.randn(1, MELS, 3 * FRAMES // 2 + FRAMES, device=device)  # windows overlap by half
    windows = [audio[:, :, start : start + FRAMES] for start in range(0, audio.shape[2] - FRAMES + 1, FRAMES // 2)]

    cache, heard = new_cache(model), torch.zeros(1, FRAMES // 2, SIZES["d_model"], device=device)
    encoder = graft.compile(model.model.encoder, (windows[0],), backend=backend)
    step = {
        "encoder_outputs": (heard,),
        "decoder_input_ids": torch.tensor([START], device=device),
        "past_key_values": cache,
        "use_cache": True,
    }
    free = dict.fromkeys(step) | {"decoder_input_ids": {1: Dim.AUTO}}
    decoder = graft.compile(model, kwargs=step, dynamic_shapes=free, backend=backend)

    memory = addresses(cache)
    for number, window in enumerate(windows):
        tokens = transcribe(encoder, decoder, window, cache)
        expected = transcribe(model.model.encoder, model, window, new_cache(model))
        assert tokens == expected, (tokens, expected)
        print(f"window {number}: {tokens}")
    assert memory == addresses(cache)
    for number, variant in enumerate(decoder.variants):
        written = [alias.input for alias in variant.aliases if alias.kind == "kv_cache_update"]
        cross = sum("cross_attention_cache" in name for name in written)
        others = len(written) - cross
        print(f"graph {number} ({variant.made_by}): writes {cross} tensors of cross-attention, {others} others")


if __name__ == "__main__":
    main()
