"""The least time that a decode step of batch 1 can take: its bytes over the read bandwidth.

python benchmarks/roofline_bounds.py --bandwidth 4.62

Computed from the models' shapes; nothing runs. Quantized rows have the linear layers of the decoder in that format
(int4: groups of 128, a 16-bit scale each; int8 and fp8: a float32 scale a row) and the head in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from torch import nn

from graft.bench.limits.traffic import cache_bytes, weight_bytes
from graft.models.load import load_model

GROUP = 128
FORMATS = ("bfloat16", "int8", "fp8", "int4")


def bytes_of(module: nn.Module, form: str) -> float:
    """Weights of a step: what weight_bytes counts, less what quantization saves of the decoder's matrices."""
    total = weight_bytes(module, 1)
    for name, weight in module.named_parameters():
        if form != "bfloat16" and weight.ndim == 2 and ".layers." in name:
            rows, columns = weight.shape
            total += quantized(rows, columns, form) - weight.numel() * weight.element_size()
    return total


def quantized(rows: int, columns: int, form: str) -> float:
    if form == "int4":
        return rows * columns / 2 + 2 * rows * -(-columns // GROUP)
    return rows * columns + 4 * rows


def bounds(model: str, context: int, bandwidth: float) -> list[dict[str, Any]]:
    module = load_model(model, dtype="bfloat16", device="meta").module
    cache = cache_bytes(module, context)
    rows = []
    for form in FORMATS:
        weights = bytes_of(module, form)
        seconds = (weights + cache) / (bandwidth * 1e12)
        rows.append({"model": model, "format": form, "context": context, "weight_gb": weights / 1e9,
                     "cache_gb": cache / 1e9, "bound_ms": 1e3 * seconds, "tokens_per_s": 1 / seconds})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "llama-3.1-8b"])
    parser.add_argument(
        "--context", type=int, default=192, help="tokens in the cache: prompt 128 and half of 127 new"
    )
    parser.add_argument("--bandwidth", type=float, default=4.62, help="TB/s read; 4.62 was measured on an H200")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    args = parser.parse_args()
    rows = [row for model in args.models for row in bounds(model, args.context, args.bandwidth)]
    if args.json:
        print(json.dumps({"setup": vars(args), "rows": rows}))
        return
    print(f"{'model':14} {'weights':9} {'GB':>7} {'cache GB':>9} {'bound ms':>9} {'tok/s':>7}")
    for r in rows:
        print(f"{r['model']:14} {r['format']:9} {r['weight_gb']:7.3f} {r['cache_gb']:9.4f} {r['bound_ms']:9.3f}"
              f" {r['tokens_per_s']:7.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
