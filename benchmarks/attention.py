"""Attention over the paged cache on a GPU, one layer of 32 query and 8 key-value heads of 128 in bfloat16.

    python -m benchmarks.attention [--json FILE] [--splits 1 2 4 8 16 32 64]

Microseconds inside a CUDA graph, medians: split-KV decode with both ways to put the parts together, cuDNN's attention
over contiguous caches beside it, rope_kv_write; TFLOP/s of prefill for each kernel. Every call of a graph has caches
of its own, more than the second-level cache holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from graft.base.timers import graph_seconds
from graft.ops import OPS
from graft.ops.cached_attention.decode.triton import split_count, split_kv
from graft.ops.paged_cache import rows_of, scales_of
from graft.ops.selection import problem_of
from graft.weights.quantize import FP8

H, KV, D, BLOCK = 32, 8, 128, 16
DTYPE, DEVICE = torch.bfloat16, "cuda"
L2 = 60 << 20  # bytes of an H200's second-level cache
SCALE = D**-0.5


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one call, all of them in one CUDA graph."""
    return graph_seconds(lambda: [call() for call in calls], torch.device("cuda")) / len(calls) * 1e6


def copies(nbytes: int) -> int:
    """How many sets of tensors of that size overflow the cache twice, and at least enough to hide the launch."""
    return max(2, min(128, 2 * L2 // nbytes + 2))


def cache(blocks: int, dtype: torch.dtype) -> Tensor:
    """Keys or values at random; in float8 with scales of one."""
    made = torch.randn(blocks, rows_of(BLOCK, D, dtype), KV, D, dtype=DTYPE, device=DEVICE).to(dtype)
    if dtype is FP8:
        scales_of(made).fill_(1)
    return made


def paged(lens: Tensor, count: int, dtype: torch.dtype = DTYPE) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """`count` times k_cache, v_cache, block_tables, seq_lens: blocks scattered, sequences of these lengths."""
    per = -(-lens // BLOCK)
    blocks, made = int(per.sum()), []
    for _ in range(count):
        tables = torch.zeros(len(lens), int(per.max()), dtype=torch.int64)
        for row, part in enumerate(torch.randperm(blocks).split(per.tolist())):
            tables[row, : len(part)] = part
        made.append((cache(blocks, dtype), cache(blocks, dtype), tables.to(DEVICE), lens.to(DEVICE)))
    return made


def measure_decode(n: int, context: int, splits: list[int]) -> dict[str, Any]:
    nbytes = 2 * n * context * KV * D * 2
    count = copies(nbytes)
    sets = paged(torch.full((n,), context), count)
    q = torch.randn(1, H, n, D, dtype=DTYPE, device=DEVICE)
    row: dict[str, Any] = {"n": n, "context": context, "splits": split_count(n, KV, q.device), "MB": nbytes / 1e6}
    row["split_kv"] = graph_us([partial(split_kv, q, *s, SCALE) for s in sets])
    for some in splits:
        row[f"{some} splits"] = graph_us([partial(split_kv, q, *s, SCALE, splits=some) for s in sets])
    del sets
    one = torch.randn(n, H, 1, D, dtype=DTYPE, device=DEVICE)
    attend = partial(F.scaled_dot_product_attention, one, scale=SCALE, enable_gqa=True)
    whole = [[torch.randn(n, KV, context, D, dtype=DTYPE, device=DEVICE) for _ in "kv"] for _ in range(count)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        row["cudnn"] = graph_us([partial(attend, key=k, value=v) for k, v in whole])
    row["TB/s"] = nbytes / row["split_kv"] / 1e6
    return row


def measure_prefill(tokens: int, old: int = 0) -> dict[str, Any]:
    """Each kernel of the op for one prompt behind `old` cached tokens; flops of the causal half alone."""
    (k_cache, v_cache, tables, seq_lens), *_ = paged(torch.tensor([tokens + old]), 1)
    q = torch.randn(1, H, tokens, D, dtype=DTYPE, device=DEVICE)
    token_to_seq = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    cu_seqlens, lens_cpu = torch.tensor([0, tokens], device=DEVICE), torch.tensor([[tokens, tokens + old]])
    args = (q, k_cache, v_cache, token_to_seq, tables, cu_seqlens, seq_lens, lens_cpu, SCALE)
    flops = 4 * H * D * tokens * (old + tokens / 2)
    row: dict[str, Any] = {"tokens": tokens, "cached": old}
    spec = OPS["cached_attention"]
    for kernel in spec.kernels:
        if problem_of(kernel, spec.call(*args)) is None:
            row[kernel.name] = flops / call_us(partial(kernel.run, *args)) / 1e6
    return row


def call_us(call: Callable[[], Any], repeats: int = 20) -> float:
    """Microseconds of one call outside a graph (sizes come from the CPU): ten in a row, median of the repeats."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / 10)
    return statistics.median(times[2:])


def measure_rope(tokens: int) -> dict[str, Any]:
    width = (H + 2 * KV) * D
    count = copies(2 * tokens * width * 2)
    blocks = -(-tokens // BLOCK) * 2
    run = OPS["rope_kv_write"].kernel("triton").run
    calls = []
    for _ in range(count):
        parts = torch.randn(1, tokens, width, dtype=DTYPE, device=DEVICE).split([H * D, KV * D, KV * D], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in parts)
        cos, sin = (torch.randn(1, 1, tokens, D, dtype=DTYPE, device=DEVICE) for _ in range(2))
        caches = [torch.zeros(blocks, BLOCK, KV, D, dtype=DTYPE, device=DEVICE) for _ in range(2)]
        slot_mapping = torch.randperm(blocks * BLOCK, device=DEVICE)[:tokens]
        calls.append(partial(run, q, k, v, cos, sin, *caches, slot_mapping))
    return {"tokens": tokens, "us": graph_us(calls)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--splits", type=int, nargs="*", default=[], help="also these counts of parts")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    tables: dict[str, list[dict[str, Any]]] = {
        "decode": [measure_decode(n, c, args.splits) for n in (1, 8, 64) for c in (256, 2048, 8192)],
        "prefill": [measure_prefill(2048), measure_prefill(8192), measure_prefill(2048, 6144)],
        "rope_kv_write": [measure_rope(tokens) for tokens in (1, 64, 2048)],
    }
    units = {"decode": "us a layer", "prefill": "TFLOP/s", "rope_kv_write": "us a layer"}
    for name, rows in tables.items():
        print(f"\n{name} ({units[name]}; {torch.cuda.get_device_name()}, torch {torch.__version__})")
        for row in rows:
            print("  " + "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
