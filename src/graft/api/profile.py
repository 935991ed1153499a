"""What the calls of a graph cost on this machine: each kind of call once, on real inputs.

On a GPU a call finds its weights in memory rather than in the cache, as in a decode step (timers.ColdTimer). On a CPU
there is a clock around the call, so that schedules can be made and drawn there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from graft.backends.buffers import untouched
from graft.backends.capture import cuda_capturer
from graft.backends.eager import bind_kernels
from graft.backends.streams import device_of
from graft.base.errors import ProfileError
from graft.base.files import cache_dir
from graft.base.timers import REPEATS, ColdTimer, cpu_seconds, replay_seconds
from graft.ir.edit import attribute, kind_text
from graft.ir.effects import mutated_args, mutated_roots
from graft.ir.nodes import placeholders
from graft.ir.streams import on_device
from graft.ops.launch import device_name
from graft.passes.costs import Costs, fingerprint, load_costs

REPLAYS = 10  # in one stretch between two events
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


def restored(
    gm: GraphModule, inputs: Sequence[Any], device: torch.device
) -> AbstractContextManager[Callable[[], None]]:
    """Whatever the graph writes, and the random number generators, are as before afterwards."""
    return untouched(written_tensors(gm, inputs), [device] if device.type == "cuda" else [])


def written_tensors(gm: GraphModule, inputs: Sequence[Any]) -> list[torch.Tensor]:
    roots = mutated_roots(gm.graph)
    given = zip(placeholders(gm.graph), inputs, strict=True)
    written = [value for node, value in given if node in roots and isinstance(value, torch.Tensor)]
    return written + [attribute(gm, str(node.target)) for node in roots if node.op == "get_attr"]


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
        return cpu_seconds(call, self.repeats) * 1e6

    def event_us(self) -> float:
        return CPU_EVENT_US


class GpuTimer:
    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.cold = ColdTimer(device, repeats)

    def __call__(self, call: Callable[[], Any]) -> float:
        return self.cold(call) * 1e6

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
    """Microseconds of one call, captured in a CUDA graph and replayed. Counters are put back in each: a program that
    writes where its own counter says would be beyond the end of its cache after so many calls."""
    device, forward = device_of(gm.graph), flat_module(gm).forward
    counters = [tensor for tensor in written_tensors(gm, inputs) if tensor.dtype in (torch.int64, torch.int32)]
    with torch.no_grad(), restored(gm, inputs, device), untouched(counters, []) as put_back:

        def run(*args: Any) -> Any:
            results = forward(*args)
            put_back()
            return results

        return time_capture(run, inputs, device, repeats)


def time_capture(run: Callable[..., Any], args: Sequence[Any], device: torch.device, repeats: int) -> float:
    """The median over `repeats` stretches of ten replays. `run` may be called any number of times."""
    captured, _ = cuda_capturer(device).capture(run, args, lambda: None)
    with torch.cuda.device(device):
        return replay_seconds(lambda: captured.replay(args, {}), repeats, replays=REPLAYS) * 1e6
