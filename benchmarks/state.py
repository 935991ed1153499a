"""One decode step over growing caches: what the boundary costs when caches are written in place, and when not.

    python benchmarks/state.py [--lengths 1024 8192 65536] [--json file]

The step writes one position of two caches and reads four positions of each, so that the work is the same for every
length: what grows with the length is copying. Compared in one run, medians of several:

    graft eager, graft inductor    the caches are the caller's, written in place
    module                         the module itself, eager
    torch.compile                  the module itself
    functional                     the step returns new caches, as a graph without aliasing has to (eager)
    functional, torch.compile      the same, compiled
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graft
from timing import step_seconds

HEADS, DIM = 8, 64


class Step(nn.Module):
    def forward(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        k_cache.index_copy_(2, position, k)  # [1, heads, length, dim]
        v_cache.index_copy_(2, position, v)
        return (k_cache[:, :, :4] * v_cache[:, :, :4]).sum((2, 3))


class FunctionalStep(nn.Module):
    def forward(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Any:
        k_cache = k_cache.index_copy(2, position, k)
        v_cache = v_cache.index_copy(2, position, v)
        return (k_cache[:, :, :4] * v_cache[:, :, :4]).sum((2, 3)), k_cache, v_cache


def inputs(length: int, device: str) -> tuple[Tensor, ...]:
    caches = [torch.zeros(1, HEADS, length, DIM, device=device) for _ in range(2)]
    token = [torch.randn(1, HEADS, 1, DIM, device=device) for _ in range(2)]
    return *caches, *token, torch.tensor([length // 2], device=device)


def step_time(call: Callable[..., Any], args: tuple[Tensor, ...], steps: int) -> float:
    """In µs, after a few calls that do not count."""
    for _ in range(3):
        call(*args)
    return step_seconds(call, args, steps) * 1e6


def bytes_taken(call: Callable[..., Any], args: tuple[Tensor, ...]) -> int:
    """Memory that one step allocates; a copy of a cache needs as much as the cache has."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call(*args)
    device = "self_device_memory_usage" if args[0].is_cuda else "self_cpu_memory_usage"
    return sum(max(getattr(event, device), 0) for event in profile.key_averages())


def baselines(device: str) -> dict[str, Callable[..., Any]]:
    args = inputs(1024, device)
    step, functional = Step(), FunctionalStep()
    return {
        "graft eager": graft.compile(step, args, backend="eager"),
        "graft inductor": graft.compile(step, args, backend="inductor"),
        "module": step,
        "torch.compile": torch.compile(step, dynamic=True),
        "functional": functional,
        "functional, torch.compile": torch.compile(functional, dynamic=True),
    }


@torch.no_grad()
def measure(lengths: list[int], device: str, repeats: int) -> list[dict[str, Any]]:
    calls = baselines(device)
    rows = []
    for length in lengths:
        args = inputs(length, device)
        steps = max(5, 20_000_000 // (length * 1000))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(step_time(call, args, steps))
        caches = args[0].nbytes + args[1].nbytes
        us = {name: round(statistics.median(found), 1) for name, found in times.items()}
        taken = {name: bytes_taken(call, args) for name, call in calls.items()}
        rows.append({"length": length, "cache_bytes": caches, "us": us, "bytes_allocated": taken})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(given.lengths, given.device, given.repeats)
    names = list(rows[0]["us"])
    print(f"{'positions':>9} {'caches':>8}  " + "  ".join(f"{name:>25}" for name in names))
    for row in rows:
        base = row["us"]["graft eager"]
        cells = [
            f"{row['us'][n]:9.1f} µs {row['us'][n] / base:5.2f} x {row['bytes_allocated'][n] / 2**20:5.1f} M"
            for n in names
        ]
        print(f"{row['length']:>9} {row['cache_bytes'] / 2**20:>6.0f} M  " + "  ".join(f"{c:>25}" for c in cells))
    if given.json:
        setup = {"torch": torch.__version__, "device": given.device, "threads": 1, "repeats": given.repeats}
        given.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
