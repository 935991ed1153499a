"""What was compiled once is found again: graft's artifact in a fresh process, Inductor's graph in its cache."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from graft.api.compile import compile as graft_compile
from graft.api.compiled import CompiledModule
from graft.api.inductor_passes import passes_for_inductor
from graft.backends.inductor import reset_compiler, trust_instruction_sets
from graft.backends.inductor_caches import cache_counts, only_new_artifacts, save_cache_artifacts
from graft.backends.inductor_saved import compile_ahead
from graft.testing.failure import failure
from graft.testing.fusion import Config, Tried, as_module, name_of
from graft.testing.numbers import compare

CHILD = """
import importlib, sys, torch, graft
folder, *plugins = sys.argv[1:]
for name in plugins:
    importlib.import_module(name)
args = torch.load(f"{folder}/args.pt", weights_only=False)
torch.save(graft.load(f"{folder}/artifact")(*args), f"{folder}/results.pt")
"""

HOT = """
import sys, torch, graft
from graft.backends.inductor import trust_instruction_sets
from graft.backends.inductor_caches import watched_lookups
from graft.stages.caches import own_caches
folder = sys.argv[1]
trust_instruction_sets()
module, args = torch.load(f"{folder}/program.pt", weights_only=False)
with own_caches(), torch.no_grad():  # which are empty
    graft.load_cache_artifacts(open(f"{folder}/artifacts", "rb").read())
    with watched_lookups() as found:
        results = torch.compile(module, backend="graft")(*args)
torch.save((results, found.counts, found.reasons), f"{folder}/results.pt")
"""


SAVED = """
import sys, torch
folder = sys.argv[1]
module, args = torch.load(f"{folder}/program.pt", weights_only=False)
from torch._dynamo.aot_compile import AOTCompiledFunction
from torch._dynamo.utils import counters
with torch.no_grad(), open(f"{folder}/function", "rb") as file:
    results = AOTCompiledFunction.deserialize(file.read())(module, *args)
torch.save((results, counters["stats"]["unique_graphs"]), f"{folder}/results.pt")
"""


@dataclass(frozen=True)
class RoundTrip:
    """The results of both times, seconds for each, and for Inductor what its caches counted the second time."""

    first: Any = field(repr=False)
    second: Any = field(repr=False)
    seconds: tuple[float, float]
    hits: int = 0
    misses: int = 0


def cache_round_trip(
    module: Tried,
    args: tuple[Any, ...],
    *,
    route: Literal["artifact", "inductor", "cache artifacts", "saved function"] = "artifact",
    config: Config = None,
    plugins: Sequence[str] = (),
) -> RoundTrip:
    """Compiles the module, gets it back, and holds the results to be the same bit for bit.

    artifact: `graft.compile`, `save`, and `graft.load` in a fresh process (`plugins`: modules that it must import for
    their ops). inductor: torch.compile with graft's passes, forgotten and compiled again, now out of its cache.
    cache artifacts: torch.compile(backend="graft"), `graft.save_cache_artifacts`, and a fresh process with empty
    caches that loads them and compiles; the module's class must be one that it can import. saved function:
    torch.compile(backend="graft") compiles ahead of time and saves, and a fresh process loads and runs that without
    Dynamo; likewise for such a class.
    """
    __tracebackhide__ = True
    with torch.no_grad():
        if route == "cache artifacts":
            trip = through_artifacts(as_module(module), args, name_of(module))
        elif route == "saved function":
            trip = through_saved_function(as_module(module), args, name_of(module))
        elif route == "inductor":
            trip = through_inductor(as_module(module), args, config, name_of(module))
        else:
            trip = through_artifact(module, args, config, plugins)
    share, problem = compare(trip.second, trip.first, 0)
    if share > 0:
        raise failure(
            f"{name_of(module)} gives the same bits after a round trip ({route})",
            problem,
            advice="look for state that is not saved, or for a key that leaves something out (a kernel, an option)",
        )
    return trip


def through_artifact(module: Tried, args: tuple[Any, ...], config: Config, plugins: Sequence[str]) -> RoundTrip:
    started = time.perf_counter()
    compiled = module if isinstance(module, CompiledModule) else graft_compile(as_module(module), args, config=config)
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(f"{folder}/artifact")  # as it is before the call, which may write its buffers
        torch.save(args, f"{folder}/args.pt")
        first = compiled(*args)
        middle = time.perf_counter()
        advice = "name the modules that define its ops in plugins=…; all else must be saved with the graph"
        fresh_process(CHILD, folder, plugins, f"loads the artifact of {name_of(module)} and runs it", advice)
        second = torch.load(Path(folder) / "results.pt", weights_only=False)
    return RoundTrip(first, second, (middle - started, time.perf_counter() - middle))


def through_inductor(module: nn.Module, args: tuple[Any, ...], config: Config, name: str) -> RoundTrip:
    trust_instruction_sets()
    results, seconds, counts = [], [], []
    for _ in range(2):
        reset_compiler()
        own, given = copy.deepcopy((module, args))  # a call may write both, and return what it wrote
        before, started = cache_counts(), time.perf_counter()
        results.append(torch.compile(own, options=passes_for_inductor(config))(*given))
        seconds.append(time.perf_counter() - started)
        counts.append({kind: count - before[kind] for kind, count in cache_counts().items()})
    reset_compiler()
    second = counts[1]
    if not second["hit"] or second["miss"] or second["bypass"]:
        raise failure(
            f"{name}, compiled again, comes out of Inductor's cache",
            f"the second time: {second}",
            ["a bypass: something in the graph or in the options has no key (a pass without uuid, an unknown op)"],
            advice="TORCH_LOGS=+torch._inductor.codecache says what is left out; switch caches on if they are off",
        )
    return RoundTrip(results[0], results[1], (seconds[0], seconds[1]), second["hit"], second["miss"])


def fresh_process(program: str, folder: str, arguments: Sequence[str], what: str, advice: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program, folder, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-3:]
        raise failure(f"a fresh process {what}", f"it ended with {done.returncode}", said, advice=advice)


def through_artifacts(module: nn.Module, args: tuple[Any, ...], name: str) -> RoundTrip:
    trust_instruction_sets()
    reset_compiler()
    started = time.perf_counter()
    with only_new_artifacts(), tempfile.TemporaryDirectory() as folder:
        torch.save((module, args), f"{folder}/program.pt")  # as it is before the call
        first = torch.compile(module, backend="graft")(*args)
        content = save_cache_artifacts()
        if content is None:
            raise failure(f"{name} leaves cache artifacts", "there are none", advice="switch torch's caches on")
        Path(folder, "artifacts").write_bytes(content)
        middle = time.perf_counter()
        advice = "the module's class must be in a module that another process can import"
        fresh_process(HOT, folder, (), f"compiles {name} with the cache artifacts", advice)
        second, counts, reasons = torch.load(Path(folder) / "results.pt", weights_only=False)
    reset_compiler()
    if not counts["hit"] or counts["miss"] or counts["bypass"]:
        raise failure(
            f"{name} comes out of the cache artifacts in a fresh process", f"it looked up: {counts}", reasons,
            advice="a bypass has no key (a pass without uuid, an unknown op); a miss, another key: compare versions",
        )  # fmt: skip
    seconds = middle - started, time.perf_counter() - middle
    return RoundTrip(first, second, seconds, counts["hit"], counts["miss"])


def through_saved_function(module: nn.Module, args: tuple[Any, ...], name: str) -> RoundTrip:
    trust_instruction_sets()
    reset_compiler()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        torch.save((module, args), f"{folder}/program.pt")  # as it is before the call
        compiled = compile_ahead(module, args)
        compiled.save_compiled_function(f"{folder}/function")
        first = compiled(module, *args)
        middle = time.perf_counter()
        advice = "the module's class must be in a module that another process can import"
        fresh_process(SAVED, folder, (), f"loads the saved function of {name} and runs it", advice)
        second, graphs = torch.load(Path(folder) / "results.pt", weights_only=False)
    reset_compiler()
    if graphs:
        raise failure(
            f"{name} runs from its saved function", f"Dynamo captured {graphs} graphs in the fresh process",
            advice="what is called beside the function compiles by itself; leave it out",
        )  # fmt: skip
    return RoundTrip(first, second, (middle - started, time.perf_counter() - middle))
