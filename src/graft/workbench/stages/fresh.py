"""The first call of a story once more in a fresh process, which has the cache artifacts of this one and empty caches.

`python -m graft.workbench.stages.fresh FOLDER` is that process. The folder holds what it needs: `run.json` (target
and settings of torch.compile), `given.pt` (the arguments, and the weights of a module in a file) and `artifacts`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graft.stages.revive import revive
from graft.stages.story import FreshProcess

LIMIT = 600.0  # seconds


@dataclass(frozen=True)
class FreshRun:
    """What the process needs to find the target and to compile it alike."""

    target: str
    tokens: list[int]
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "inductor"
    dynamic: bool | None = None
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, content: bytes, function: Any, args: tuple[Any, ...], expected: Any) -> FreshProcess:
        with tempfile.TemporaryDirectory(prefix="graft-stages-") as name:
            folder = Path(name)
            (folder / "artifacts").write_bytes(content)
            (folder / "run.json").write_text(json.dumps(asdict(self)))
            problem = unsaved((args, self.weights(function)), folder / "given.pt") or run_process(folder)
            if problem:
                return FreshProcess(bytes=len(content), problem=problem)
            found = json.loads((folder / "found.json").read_text())
            results = torch.load(folder / "results.pt", weights_only=False)
        return revive(FreshProcess, {**found, "bytes": len(content), "differs": difference(results, expected)})

    def weights(self, function: Any) -> dict[str, torch.Tensor] | None:
        """Of a module in a file, which another process makes with other numbers; a model's are found by its name."""
        return function.state_dict() if ".py:" in self.target and isinstance(function, nn.Module) else None


def unsaved(given: Any, path: Path) -> str:
    """Why another process cannot be given it; empty once it lies at `path`."""
    try:
        torch.save(given, path)
    except Exception as error:  # noqa: BLE001  whatever a class of the program raises when it is pickled
        return f"the arguments cannot be saved for it: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def run_process(folder: Path) -> str:
    """Why it gave nothing; empty if it did."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "graft.workbench.stages.fresh", str(folder)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end within {LIMIT:.0f} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"it ended with {done.returncode}: {lines[-1][:200] if lines else 'no word'}" if done.returncode else ""


def difference(results: Any, expected: Any) -> str:
    """In what the results are others; empty where they are the same bit for bit."""
    here, there = pytree.tree_leaves(expected), pytree.tree_leaves(results)
    if len(here) != len(there):
        return f"{len(there)} results in place of {len(here)}"
    for index, (one, two) in enumerate(zip(here, there, strict=True)):
        if not same_bits(one, two):
            return f"result {index} has other values (a program that samples has)"
    return ""


def same_bits(one: Any, two: Any) -> bool:
    """Of numbers that are none as well; values that are no tensors by what they say of themselves."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape and one.device == two.device
        if one.is_meta or not alike:
            return alike
        return alike and bool(torch.equal(one, two) or torch.allclose(one, two, rtol=0, atol=0, equal_nan=True))
    return type(one) is type(two) and repr(one) == repr(two)


def run_here(folder: Path) -> None:
    from graft.backends.inductor import trust_instruction_sets
    from graft.backends.inductor_caches import load_cache_artifacts
    from graft.stages.caches import lookups, own_caches
    from graft.stages.kernels import SeenKernels, watch_kernels
    from graft.stages.tell import compile_settings, detached, story_backend
    from graft.stages.trace import tracing_rows
    from graft.workbench.stages.targets import find_target

    run = FreshRun(**json.loads((folder / "run.json").read_text()))
    function = find_target(run.target, run.tokens, dtype=run.dtype, device=run.device).function
    args, weights = torch.load(folder / "given.pt", weights_only=False)  # of classes in the target's file, too
    if weights is not None and isinstance(function, nn.Module):
        function.load_state_dict(weights)
    trust_instruction_sets()
    settings = compile_settings(story_backend(run.backend), run.dynamic, run.mode, run.options)
    with own_caches(), torch.no_grad():
        load_cache_artifacts((folder / "artifacts").read_bytes())
        with tracing_rows() as trace, watch_kernels(SeenKernels()):  # its setting is part of the cache's keys
            started = time.perf_counter()
            results = torch.compile(function, **settings)(*args)
            seconds = time.perf_counter() - started
    torch.save(detached(results), folder / "results.pt")
    found = FreshProcess(lookups(trace), seconds)
    (folder / "found.json").write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    run_here(Path(sys.argv[1]))
