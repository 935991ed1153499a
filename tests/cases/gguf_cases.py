"""Small GGUF files whose weights are in blocks of any type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, HIDDEN, HEADS, KV, VOCAB, LAYERS = 256, 512, 8, 4, 96, 2
TYPES = gguf.GGMLQuantizationType


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    for index in range(LAYERS):
        layer = {
            "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // HEADS * KV, WIDTH),
            "attn_v": (WIDTH // HEADS * KV, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,),
            "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN),
        }  # fmt: skip
        found |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return found


def blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """The package has no code that rounds to types with K: their blocks get random bytes and small scales."""
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values, TYPES[kind])
    columns, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (values.shape[0], values.shape[1] // columns, size), dtype=np.uint8)
    scales = slice(0, 4) if kind == "Q4_K" else slice(size - 2, size)
    small = rng.uniform(1e-4, 2e-4, (*raw.shape[:2], (scales.stop - scales.start) // 2)).astype(np.float16)
    raw[..., scales] = small.view(np.uint8)
    return raw.reshape(values.shape[0], -1)


def write_quantized(path: Path, kinds: dict[str, str], default: str) -> None:
    """A two-layer Llama; kinds: the type of a tensor by the last part of its name, else `default`."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "h", "e", "l", "o", "he", "ll", *(f"x{i}" for i in range(VOCAB - 8))])
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (VOCAB - 2))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, shape in shapes().items():
        values = rng.standard_normal(shape).astype(np.float32)
        kind = kinds.get(name.rpartition(".")[2], default)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.abs(values) + 0.5)
        elif kind in ("F32", "F16"):
            writer.add_tensor(f"{name}.weight", (values / 16).astype(np.float32 if kind == "F32" else np.float16))
        else:
            writer.add_tensor(f"{name}.weight", blocks(values / 16, kind), raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
