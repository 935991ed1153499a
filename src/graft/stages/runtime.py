"""Stage 6, what runs: CUDA graphs recorded or skipped and why, memory, streams, collectives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._inductor.config

from graft.stages.kernels import WRAPPED
from graft.stages.needs import Reached, swapped
from graft.stages.story import CudagraphRecord, RuntimeStage, ValueRecord
from graft.stages.trace import TraceCollector, current_graph

NEEDS = (
    "torch._inductor.output_code:CompiledFxGraph.post_compile",
    "torch._inductor.config:triton.cudagraphs",
)
NOT_ASKED = 'not asked for: mode="reduce-overhead" (--mode reduce-overhead) or triton.cudagraphs does'


@dataclass
class SeenRuntime:
    cudagraphs: list[CudagraphRecord] = field(default_factory=list)


@dataclass
class RunnableGraph:
    """call: the generated function, without CUDA graphs around it. args: those of its first call, by reference."""

    graph: str
    call: Callable[[list[Any]], Any]
    partitions: list[Any]
    written: tuple[int, ...]
    args: list[Any] = field(default_factory=list)


@contextmanager
def watch_runtime(seen: SeenRuntime, reached: Reached) -> Iterator[None]:
    from torch._inductor.output_code import CompiledFxGraph

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> Any:
            number = current_graph()
            reached.at(6, f"making graph {number} ready to run")
            asked = bool(graph_kwargs.get("cudagraphs") or torch._inductor.config.triton.cudagraphs)
            result = before(self, example_inputs, constants, graph_kwargs)
            kept = bool(graph_kwargs.get("cudagraphs"))
            seen.cudagraphs.append(CudagraphRecord(number, asked, asked and kept, skip_reason(self, asked, kept)))
            if self.current_callable is not None:
                self.current_callable = reached.running(self.current_callable, number)
            return result

        return post_compile

    with swapped(CompiledFxGraph, "post_compile", make):
        yield


@contextmanager
def watch_graphs(seen: list[RunnableGraph]) -> Iterator[None]:
    """Within it, generated functions are kept with the arguments of their first call."""
    from torch._inductor.output_code import CompiledFxGraph

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def post_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
            raw = getattr(self, "current_callable", None)
            if callable(raw) and hasattr(raw, "__globals__"):
                self.current_callable = noting(raw, tuple(self.mutated_input_idxs or ()), seen)
            return before(self, *args, **kwargs)

        return post_compile

    with swapped(CompiledFxGraph, "post_compile", make):
        yield


def noting(raw: Any, written: tuple[int, ...], seen: list[RunnableGraph]) -> Callable[..., Any]:
    partitions = getattr(getattr(raw, "__self__", None), "partitions", ())  # what CUDA graphs are put around
    bare = [raw.__globals__.get(f"partition_{number}", one) for number, one in enumerate(partitions)]
    kept = RunnableGraph(current_graph(), raw, bare, written)

    def call(args: list[Any]) -> Any:
        if not kept.args:
            kept.args = [a.clone() if i in written and isinstance(a, torch.Tensor) else a for i, a in enumerate(args)]
            seen.append(kept)
        return raw(args)

    return call


def skip_reason(compiled: Any, asked: bool, kept: bool) -> str:
    if not asked:
        return NOT_ASKED
    devices = sorted(str(device) for device in getattr(compiled, "device_types", ()))
    if "cuda" not in devices:
        return f"the graph runs on {', '.join(devices) or 'no device'}; CUDA graphs record the work of a GPU"
    if kept:
        return ""
    told = [getattr(compiled, "disabled_cudagraphs_reason", None)]
    told += getattr(getattr(compiled, "cudagraph_info", None), "cudagraph_fail_reasons", [])
    return "; ".join(str(reason) for reason in told if reason) or "Inductor gives no reason"


def runtime_stage(seen: SeenRuntime, trace: TraceCollector, values: tuple[ValueRecord, ...] = ()) -> RuntimeStage:
    """A graph that was to be recorded can still be skipped in a later call; the metrics of its compilation say so."""
    later = {
        row.graph: str(row.data["cudagraph_skip_reason"])
        for row in trace.of("compilation_metrics")
        if row.data.get("cudagraph_skip_reason")
    }
    records = [
        replace(one, recorded=False, reason=later[one.graph]) if one.recorded and one.graph in later else one
        for one in seen.cudagraphs
    ]
    code = {row.graph: row.payload for row in trace.of("inductor_output_code")}
    called = {graph: text.partition(WRAPPED if WRAPPED in text else "def call(")[2] for graph, text in code.items()}
    whole = "\n".join(code.values())
    return RuntimeStage(
        cudagraphs=tuple(records),
        allocations={
            g: len(re.findall(r"= empty_strided\w*\(|\baoti_torch_empty_strided\w*\(", text))
            for g, text in called.items()
        },
        reused={g: len(re.findall(r"(?:#|//) reuse$", text, re.M)) for g, text in called.items()},
        partitions={g: count for g, text in code.items() if (count := len(re.findall(r"def partition_\d+\(", text)))},
        streams=len(set(re.findall(r"\bstream\d+\b", whole))),
        collectives=tuple(sorted(set(re.findall(r"_c10d_functional\.(\w+)", whole)))),
        values=values,
    )
