"""How far keys and values in fewer bits move the logits of SmolLM2-135M, against the same model in float64.

    python benchmarks/kv_cache_error.py [folder of another Hugging Face model]

All of the model computes in float64; only what its attention reads is rounded: to bfloat16, and from there to float8
with one scale (1), with one a head (from other text), and with one a token and head (as graft's cache has them).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from graft.models.load import load_model
from graft.weights.quantize import FP8, FP8_TOP, rows_to_fp8

DOCS = Path(__file__).parents[1] / "docs"
TOKENS = 384
SCHEMES = {
    "exact": "nothing rounded",
    "bfloat16": "bfloat16",
    "one": "float8, scale 1",
    "head": "float8, a scale a head from other text",
    "token": "float8, a scale a token and head",
    "power": "the same, rounded up to a power of two",
}


class Cache:
    """What attention reads of keys and values, by scheme. `largest`: magnitudes of each head, of other text."""

    scheme = "exact"
    largest: dict[tuple[str, int], Tensor] = {}  # noqa: RUF012

    def held(self, heads: Tensor, which: str, layer: int) -> Tensor:
        """heads: [b, kv, s, d]."""
        if self.scheme == "exact":
            self.largest.setdefault((which, layer), heads.abs().amax((0, 2, 3))[:, None, None])
            return heads
        given = heads.bfloat16()
        if self.scheme == "bfloat16":
            return given.to(heads.dtype)
        if self.scheme == "one":
            scale = torch.ones((), dtype=torch.float64)
        elif self.scheme == "head":
            scale = self.largest[which, layer] / FP8_TOP
        else:
            scale = rows_to_fp8(given.float())[1][..., None].double()
            scale = torch.exp2(torch.ceil(torch.log2(scale))) if self.scheme == "power" else scale
        return (given.double() / scale).clamp(-FP8_TOP, FP8_TOP).to(FP8).to(heads.dtype) * scale


def measure(model: nn.Module, cache: Cache, ids: Tensor, other: Tensor) -> None:
    cache.scheme = "exact"
    model(other)
    exact = model(ids).logits[0]
    print("| keys and values | error | divergence, nats | same most likely token |\n|---|---|---|---|")
    for cache.scheme in list(SCHEMES)[1:]:
        found = model(ids).logits[0]
        error = (found - exact).norm() / exact.norm()
        divergence = (exact.softmax(-1) * (exact.log_softmax(-1) - found.log_softmax(-1))).sum(-1).mean()
        same = (found.argmax(-1) == exact.argmax(-1)).double().mean()
        print(f"| {SCHEMES[cache.scheme]} | {error:.1e} | {divergence:.1e} | {same:.1%} |", flush=True)


def main() -> None:
    cache = Cache()

    def attend(module, query, key, value, mask, **options):
        keys, values = cache.held(key, "k", module.layer_idx), cache.held(value, "v", module.layer_idx)
        return sdpa_attention_forward(module, query, keys, values, mask, **options)

    AttentionInterface.register("rounded", attend)
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    else:
        loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
        model, tokenizer = loaded.module, loaded.tokenizer
    model = model.double().eval()
    model.set_attn_implementation("rounded")
    texts = ((DOCS / name).read_text() for name in ("performance.md", "workbench.md"))
    read: Any = tokenizer
    ids, other = (torch.tensor([read(text)["input_ids"][:TOKENS]]) for text in texts)
    with torch.inference_mode():
        measure(model, cache, ids, other)


if __name__ == "__main__":
    main()
