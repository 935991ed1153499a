"""What the calls of a graph cost on this machine: each kind of call once, on real inputs.

On a GPU a call is timed between two events, with a pass over a large buffer ahead of it: the kernel finds its weights
in memory rather than in the cache, as in a decode step, and the host is ahead of the device. What an empty pair of
events takes is subtracted. On a CPU there is a clock around the call, so that schedules can be made and drawn there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from graft.backends.buffers import untouched
from graft.backends.eager import bind_kernels
from graft.backends.recorders import cuda_recorder
from graft.backends.streams import device_of
from graft.errors import ProfileError
from graft.files import cache_dir
from graft.graph.edit import attribute, kind_text
from graft.graph.memory import mutated_args, mutated_roots
from graft.graph.nodes import placeholders
from graft.graph.streams import on_device
from graft.ops.launch import device_name
from graft.transforms.costs import Costs, fingerprint, load_costs

REPEATS = 15
REPLAYS = 10  # in one stretch between two events
FLUSH_BYTES = 256 << 20  # several times the 60 MB of a large second-level cache
PASS_SECONDS, MOST_PASSES = 1e-4, 30  # an H200 reads and writes it in 0.13 ms
CPU_EVENT_US = 2.0  # what an event is taken to cost where there is none


@dataclass(frozen=True)
class DeviceMeasure:
    """Measures graphs that take `inputs` (the flat ones). Nothing that a graph writes is left changed."""

    inputs: tuple[Any, ...]
    repeats: int = REPEATS
    cached: bool = True

    def costs(self, gm: GraphModule) -> Costs:
        """From the cache directory where this graph was measured here before."""
        device = device_of(gm.graph)
        path = profile_path(gm, device)
        if self.cached and path.exists():
            try:
                return load_costs(path, gm.graph)
            except ProfileError:  # an older format, or a file that was cut short: measured again and replaced
                path.unlink()
        costs = measure_costs(gm, self.inputs, self.repeats)
        if self.cached:
            costs.save(path)
        return costs

    def whole(self, gm: GraphModule) -> float | None:
        if device_of(gm.graph).type != "cuda":
            return None
        return measure_whole(gm, self.inputs, self.repeats)


def profile_path(gm: GraphModule, device: torch.device) -> Path:
    name = f"{fingerprint(gm.graph)}-{device_name(device)}-{torch.__version__}".replace(" ", "-").replace("/", "-")
    return cache_dir() / "profiles" / f"{name}.json"


@torch.no_grad()
def measure_costs(gm: GraphModule, inputs: Sequence[Any], repeats: int = REPEATS) -> Costs:
    device = device_of(gm.graph)
    timer = GpuTimer(device, repeats) if device.type == "cuda" else CpuTimer(repeats)
    with restored(gm, inputs, device):
        runner = Profiler(gm, timer)
        runner.run(*inputs)
    versions = {"torch": torch.__version__}
    return Costs(runner.found, timer.event_us(), device_name(device), versions, fingerprint(gm.graph))


def restored(gm: GraphModule, inputs: Sequence[Any], device: torch.device) -> AbstractContextManager[None]:
    """Whatever the graph writes, and the random number generators, are as before afterwards."""
    roots = mutated_roots(gm.graph)
    given = zip(placeholders(gm.graph), inputs, strict=True)
    written = [value for node, value in given if node in roots and isinstance(value, torch.Tensor)]
    written += [attribute(gm, str(node.target)) for node in roots if node.op == "get_attr"]
    return untouched(written, [device] if device.type == "cuda" else [])


def flat_module(gm: GraphModule) -> GraphModule:
    """The graph with its kernels, as a function of flat inputs. Names of nodes stay."""
    bound, _ = bind_kernels(gm)
    graph = Graph()
    graph.output(graph.graph_copy(bound, {}))
    return GraphModule(gm, graph)


class Profiler(Interpreter):
    """Runs the graph with its kernels; every kind of call on the device is timed where it is met first."""

    def __init__(self, gm: GraphModule, timer: CpuTimer | GpuTimer) -> None:
        super().__init__(flat_module(gm))
        self.timer = timer
        self.timed = {node.name: node for node in gm.graph.nodes if on_device(node)}
        self.kinds: dict[Any, float] = {}
        self.found: dict[str, float] = {}

    def run_node(self, n: Node) -> Any:
        original = self.timed.get(n.name)
        if original is not None and callable(n.target):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            key = (n.target, str(map_aggregate((args, kwargs), kind_text)))
            if key not in self.kinds:
                self.kinds[key] = self.timer(self.call(n, original, args, kwargs))
            self.found[n.name] = self.kinds[key]
        return super().run_node(n)

    def call(self, n: Node, original: Node, args: Any, kwargs: Any) -> Callable[[], Any]:
        """The call, on copies of what it writes."""
        names = {argument.name for argument in mutated_args(original)}
        written = {id(self.env[value]) for value in n.all_input_nodes if value.name in names}
        args, kwargs = map_aggregate((args, kwargs), lambda value: value.clone() if id(value) in written else value)
        target: Any = n.target
        return lambda: target(*args, **kwargs)


@dataclass(frozen=True)
class CpuTimer:
    repeats: int

    def __call__(self, call: Callable[[], Any]) -> float:
        call()
        taken = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken) * 1e6

    def event_us(self) -> float:
        return CPU_EVENT_US


class GpuTimer:
    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats, self.empty = device, repeats, 0.0
        self.flush = torch.zeros(FLUSH_BYTES // 4, device=device)
        self.empty = self(lambda: None)

    def __call__(self, call: Callable[[], Any]) -> float:
        with torch.cuda.device(self.device):
            for _ in range(2):  # compiles and tunes
                call()
            passes = self.passes(call)
            pairs = [self.pair(call, passes) for _ in range(self.repeats)]
            torch.cuda.synchronize(self.device)
        taken = statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3
        return max(taken - self.empty, 0.0)

    def passes(self, call: Callable[[], Any]) -> int:
        """How often to pass over the buffer so that the device is busy while the host issues the call."""
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        call()
        issued = time.perf_counter() - started
        return min(1 + round(2 * issued / PASS_SECONDS), MOST_PASSES)

    def pair(self, call: Callable[[], Any], passes: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(passes):
            self.flush.add_(1)
        begin.record()
        call()
        end.record()
        return begin, end

    def event_us(self, links: int = 64) -> float:
        """What it costs to follow a call of another stream: a captured chain of tiny calls that changes streams."""
        x, side = torch.zeros(32, device=self.device), torch.cuda.Stream(self.device)

        def chain(other: torch.cuda.Stream | None) -> list[torch.Tensor]:
            here = torch.cuda.current_stream(self.device)
            there = other or here
            for _ in range(links // 2):
                for stream, following in ((here, there), (there, here)):
                    with torch.cuda.stream(stream):
                        x.add_(1)
                    if other is not None:
                        following.wait_stream(stream)
            return [x]

        one, two = (time_capture(chain, (other,), self.device, self.repeats) for other in (None, side))
        return max((two - one) / links, 0.1)


def measure_whole(gm: GraphModule, inputs: Sequence[Any], repeats: int = REPEATS) -> float:
    """Microseconds of one call, captured in a CUDA graph and replayed."""
    device = device_of(gm.graph)
    with torch.no_grad(), restored(gm, inputs, device):
        return time_capture(flat_module(gm).forward, inputs, device, repeats)


def time_capture(run: Callable[..., Any], args: Sequence[Any], device: torch.device, repeats: int) -> float:
    """The median over `repeats` stretches of ten replays."""
    recorded, _ = cuda_recorder(device).record(run, args)
    taken = []
    with torch.cuda.device(device):
        for _ in range(repeats + 2):  # the first two warm up
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPLAYS):
                recorded.replay(args, {})
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3 / REPLAYS)
    return statistics.median(taken[2:])
