"""Step time of a decode block whose caches the caller owns: eager, replayed, and torch.compile's CUDA graphs.

python benchmarks/cuda_graph.py --lengths 1024 8192 65536

A ratio above 1 says that the replay is faster. On a CPU nothing is captured: the replay is a direct call, and the
ratio shows what keys, staging and copies of results cost.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import graft
from timing import step_seconds

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    """Norm, attention over the cache, norm, gated MLP; x [b, 1, d], k and v [b, h, s, e], pos [1]."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH, False), nn.Linear(WIDTH, 4 * WIDTH, False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, False)

    def forward(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).view(x.shape[0], 1, 3, HEADS, HEAD_DIM).transpose(1, 3)  # [b, h, 3, 1, e]
        q, new_k, new_v = parts.unbind(2)
        k.index_copy_(2, pos, new_k)
        v.index_copy_(2, pos, new_v)
        mask = torch.arange(k.shape[2], device=x.device) <= pos
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None, None])
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def inputs(length: int, batch: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 1, WIDTH, generator=g).to(device, dtype)
    k, v = (torch.zeros(batch, HEADS, length, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    return x, k, v, torch.tensor([length // 2], device=device)


def baselines(module: nn.Module, args: tuple[torch.Tensor, ...], names: list[str]) -> dict[str, Any]:
    calls: dict[str, Any] = {"module": module}
    for name in ("eager", "replay", "reused"):
        backend = "eager" if name == "eager" else "cuda_graph"
        calls[name] = graft.compile(copy.deepcopy(module), args, backend=backend, reuse_outputs=name == "reused")
    if "torch_compile" in names:
        calls["torch_compile"] = torch.compile(module, mode="reduce-overhead")
    return {name: calls[name] for name in names}


def measure(length: int, args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Block().to(args.device, dtype).eval()
    given = {name: inputs(length, args.batch, args.device, dtype) for name in args.baselines}
    for tensors in given.values():  # torch.compile leaves out its CUDA graphs where it does not know the caches
        for cache in tensors[1:3]:
            torch._dynamo.mark_static_address(cache)
    calls = baselines(module, given["replay"], args.baselines)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for repeat in range(args.repeats + 1):  # the first one warms up
            for name, call in calls.items():
                spent = step_seconds(call, given[name], args.steps)
                if repeat:
                    times[name].append(spent)
        results = {name: calls[name](*given[name]).float() for name in calls}
    check_parity(results, given, dtype)
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    replays = calls["replay"].replays
    return {
        "length": length,
        "cache_bytes": sum(cache.nbytes for cache in given["replay"][1:3]),
        "staged_bytes_a_step": replays.staged_bytes // replays.calls,
        "recordings": replays.count,
        "us": {name: round(1e6 * median, 1) for name, median in medians.items()},
        "ratio": {name: round(median / medians["replay"], 2) for name, median in medians.items() if name != "replay"},
    }


def check_parity(results: dict[str, torch.Tensor], given: dict[str, Any], dtype: torch.dtype) -> None:
    """A fast step that computes something else is worth nothing."""
    bound = 1e-4 if dtype is torch.float32 else 5e-2
    for name, result in results.items():
        torch.testing.assert_close(result, results["replay"], atol=bound, rtol=bound)
        torch.testing.assert_close(given[name][1], given["replay"][1], atol=bound, rtol=bound)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--steps", type=int, default=100 if cuda else 20)
    parser.add_argument("--repeats", type=int, default=5)
    known = ["module", "eager", "replay", "reused", "torch_compile"]
    parser.add_argument("--baselines", nargs="+", choices=known, default=known if cuda else known[:-1])
    args = parser.parse_args()
    args.baselines = list(dict.fromkeys(["replay", *args.baselines]))
    dtype = getattr(torch, args.dtype)
    rows = []
    names = [name for name in args.baselines if name != "replay"]
    print(f"{'positions':>9} {'cache':>9} {'staged':>9} {'replay':>11}  " + "  ".join(f"{n:>20}" for n in names))
    for length in args.lengths:
        rows.append(measure(length, args, dtype))
        print(line(rows[-1], names))
    note = "" if args.device == "cuda" else "on a CPU nothing is captured; a replay is a direct call"
    if note:
        print(note)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    setup = {**vars(args), "torch": torch.__version__, "device_name": name, "note": note}
    print(json.dumps({"setup": setup, "rows": rows}))


def line(row: dict[str, Any], names: list[str]) -> str:
    others = (f"{row['us'][n]:>10.1f} µs {row['ratio'][n]:>5.2f} x" for n in names)
    size, staged = f"{row['cache_bytes'] / 2**20:.0f} MB", f"{row['staged_bytes_a_step']} B"
    return f"{row['length']:>9} {size:>9} {staged:>9} {row['us']['replay']:>8.1f} µs  " + "  ".join(others)


if __name__ == "__main__":
    main()
