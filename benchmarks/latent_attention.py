"""What absorb_latent_attention gains on the native backend: steps of two layers of DeepSeek-V2-Lite's attention (16
heads, rank 512, 128 + 64 and 128 numbers a head, dense MLPs of 1,408) with and without it, medians of alternating
repeats.

python benchmarks/latent_attention.py [--dtype float32] [--repeats 9] [--backend native]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import graft
from graft.cli.show import quiet_libraries
from graft.engine.kv.tensors import allocate
from graft.ops.layout import HostBatch, pack
from timing import seconds

SIZES = {
    "vocab_size": 512, "hidden_size": 2048, "intermediate_size": 1408, "moe_intermediate_size": 1408,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 2, "max_position_embeddings": 16384, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DECODE = [(batch, context) for context in (128, 1024, 4096) for batch in (1, 8, 32)]
PROMPTS = [(16, 0), (128, 0), (512, 0), (2048, 0), (16, 2048), (128, 2048), (512, 2048)]  # new tokens, those before


def make_model(folder: str, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v2", **SIZES), dtype=dtype)
    module.save_pretrained(folder)


def step(llm: graft.LLM, batch: int, new: int, before: int) -> Callable[[], Any]:
    """A call of the engine's graph: `batch` sequences with `before` tokens feed `new` more each."""
    size, host = llm.engine.manager.block_size, HostBatch()
    each = -(-(before + new) // size)
    for index in range(batch):
        host.add([5] * new, before, list(range(index * each, (index + 1) * each)), size)
    caches = allocate(llm.cache.layers, batch * each, size, llm.device)
    for cache in caches:
        cache.normal_()
    inputs = pack(host, llm.device).inputs()
    return torch.inference_mode()(lambda: llm.engine.graph(*inputs, *caches))


def measure(llms: list[graft.LLM], name: str, batch: int, new: int, before: int, args: argparse.Namespace) -> str:
    calls = [step(llm, batch, new, before) for llm in llms]
    pairs = [tuple(seconds(call, "cpu", args.least) for call in calls) for _ in range(args.repeats + 1)][1:]
    old, now = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    spread = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
    return f"{name:36} {old:9.2f} ms {now:9.2f} ms   × {statistics.median(ratios):.2f} ({spread})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--backend", default="native", choices=["native", "eager"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--least", type=float, default=0.05, help="seconds that one timing lasts at least")
    args = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, getattr(torch, args.dtype))
        llms = [
            graft.LLM(
                folder, dtype=args.dtype, backend=args.backend, device="cpu", kv_cache_memory="64MiB",
                self_check=False,
                config={"transforms": {"absorb_latent_attention": {"enabled": on}}},
            )
            for on in (False, True)
        ]  # fmt: skip
        for llm in llms:
            print(f"{sum(layer.token_bytes for layer in llm.cache.layers):,} bytes a token", flush=True)
        for batch, context in DECODE:
            print(measure(llms, f"decode {batch} at {context:,}", batch, 1, context - 1, args), flush=True)
        for new, before in PROMPTS:
            print(measure(llms, f"chunk of {new} behind {before:,}", 1, new, before, args), flush=True)


if __name__ == "__main__":
    main()
