"""Attention of many decoding sequences on a GPU: a program for each sequence and head, or even shares of all tiles.

    python benchmarks/attention_shares.py [--json FILE] [--registers 152 168 184 216] [--stages 2 3 4]

One layer of 32 query and 8 key-value heads of 128, lengths spread over half to one and a half times the mean,
bfloat16 and float8 caches. Microseconds inside a CUDA graph, medians; TB/s of keys and values; how far both differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import KV, SCALE, D, H, copies, graph_us, paged
from graft.ops.cached_attention.balanced import triton as balanced
from graft.ops.cached_attention.decode.triton import split_kv
from graft.weights.quantize import FP8

SHORT = [(32, 192), (64, 192), (128, 192), (256, 300), (512, 200), (1024, 200)]
LONG = [
    (8, 32768),
    (16, 2048),
    (64, 4096),
    (128, 1024),
    (448, 1100),
    (448, 3000),
    (840, 1150),
    (335, 5250),
    (83, 21000),
]


@contextmanager
def built(**constants: int) -> Iterator[None]:
    """The kernel of even shares with other constants."""
    before = {name: getattr(balanced, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(balanced, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(balanced, name, value)


def measured(n: int, mean: int, dtype: torch.dtype, registers: list[int], stages: list[int]) -> dict[str, Any]:
    lens = torch.linspace(mean / 2, 1.5 * mean, n).long()[torch.randperm(n)]
    nbytes = int(lens.sum()) * 2 * KV * D * dtype.itemsize
    sets = paged(lens, copies(nbytes), dtype)
    q = torch.randn(1, H, n, D, dtype=torch.bfloat16, device="cuda")

    def microseconds(**options: Any) -> float:
        calls: list[Callable[[], Tensor]] = [partial(split_kv, q, *one, SCALE, **options) for one in sets]
        return graph_us(calls)

    row: dict[str, Any] = {"n": n, "mean": mean, "cache": str(dtype).removeprefix("torch."), "MB": nbytes / 1e6}
    one, other = (split_kv(q, *sets[0], SCALE, even=even).float() for even in (False, True))
    row["difference"] = ((one - other).abs().max() / one.abs().max()).item()
    row["split_kv"] = microseconds(even=False)
    row["even"] = microseconds(even=True)
    for count in registers:
        with built(REGISTERS=count):
            row[f"{count} registers"] = microseconds(even=True)
    for count in stages:
        with built(STAGES=count):
            row[f"{count} stages"] = microseconds(even=True)
    row["TB/s"], row["TB/s even"] = nbytes / row["split_kv"] / 1e6, nbytes / row["even"] / 1e6
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--registers", type=int, nargs="*", default=[], help="of a thread; also these")
    parser.add_argument("--stages", type=int, nargs="*", default=[], help="of the pipeline; also these")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.manual_seed(0)
    rows = []
    for dtype in (FP8, torch.bfloat16):
        for n, mean in [*SHORT, *LONG]:
            rows.append(measured(n, mean, dtype, args.registers, args.stages))
            print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
