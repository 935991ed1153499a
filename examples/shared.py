"""What the examples have in common: their arguments, the alias map, and what a call copies."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graft


def arguments(description: str | None) -> tuple[str, str]:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="eager", choices=["eager", "inductor", "cuda_graph"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    return given.backend, given.device


def show(compiled: graft.CompiledModule) -> None:
    print("alias map, decided at compile time:")
    for alias in compiled.aliases:
        print(f"  {alias.input:10} {alias.kind:16} written by %{alias.output}")
    for record in compiled.report.state:
        if record.how == "copied back":
            print(f"  {record.text()}")


class Copies(TorchDispatchMode):
    """Adds up the bytes of results in new memory that are as large as a cache, and of writes over a whole cache."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        super().__init__()
        self.smallest = min(cache.nbytes for cache in caches)
        self.caches = {cache.untyped_storage().data_ptr() for cache in caches}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        fresh = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.caches
        copies = any(part in name for part in ("clone", "copy", "scatter", "index_put", "cat", "contiguous"))
        if copies and isinstance(result, torch.Tensor) and result.nbytes >= self.smallest:
            whole = name == "aten::copy_"
            self.bytes += result.nbytes if fresh or whole else 0
        return result


def measured(compiled: graft.CompiledModule, args: tuple[Any, ...], caches: list[torch.Tensor]) -> None:
    """Runs one step and says what of the caches it copied. Inside of compiled kernels only allocations are seen."""
    compiled(*args)
    total = sum(cache.nbytes for cache in caches)
    if compiled.backend == "inductor":
        print(f"bytes allocated in a step: {allocated(compiled, args)}; a copy of the caches takes {total}")
        return
    with Copies(caches) as copies:
        compiled(*args)
    print(f"bytes of caches copied in a step: {copies.bytes} of {total}")
    if compiled.replays is not None:
        print(f"bytes staged for a replay: {compiled.replays.staged_bytes // compiled.replays.calls}")


def allocated(compiled: graft.CompiledModule, args: tuple[Any, ...]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled(*args)
    events = profile.key_averages()
    return sum(max(event.self_cpu_memory_usage, 0) + max(event.self_device_memory_usage, 0) for event in events)
