"""Stage 6, what runs: generated code with its arguments, memory, streams, collectives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config

from graft.stages.cudagraphs import SeenCudagraphs, compiled_record, cuts_of, final_records, watch_cudagraphs
from graft.stages.kernels import WRAPPED
from graft.stages.needs import Reached, swapped
from graft.stages.story_code import RuntimeStage, ValueRecord
from graft.stages.trace import TraceCollector, current_graph

NEEDS = (
    "torch._inductor.output_code:CompiledFxGraph.post_compile",
    "torch._inductor.config:triton.cudagraphs",
)
CURRENT = re.compile(r"\b(?:raw_)?stream(\d+) = get_raw_stream\(")  # of a device
OWN = re.compile(r"\b(stream\d+) = get_external_object_by_index\(")  # of the program


@dataclass
class RunnableGraph:
    """call: the generated function, without CUDA graphs around it. args: those of its first call, by reference."""

    graph: str
    call: Callable[[list[Any]], Any]
    partitions: list[Any]
    written: tuple[int, ...]
    args: list[Any] = field(default_factory=list)


@contextmanager
def watch_runtime(seen: SeenCudagraphs, reached: Reached) -> Iterator[None]:
    from torch._inductor.output_code import CompiledFxGraph

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> Any:
            number = current_graph()
            reached.at(6, f"making graph {number} ready to run")
            asked = bool(graph_kwargs.get("cudagraphs") or torch._inductor.config.triton.cudagraphs)
            result = before(self, example_inputs, constants, graph_kwargs)
            kept = bool(graph_kwargs.get("cudagraphs"))
            seen.records.append(compiled_record(number, self, asked, kept))
            if self.current_callable is not None:
                self.current_callable = reached.running(self.current_callable, number)
            return result

        return post_compile

    with swapped(CompiledFxGraph, "post_compile", make), watch_cudagraphs(seen, reached):
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


def runtime_stage(
    seen: SeenCudagraphs, trace: TraceCollector, values: tuple[ValueRecord, ...] = (), entered: int = 0
) -> RuntimeStage:
    """entered: streams that the program asks for."""
    code = {row.graph: row.payload for row in trace.of("inductor_output_code")}
    called = {graph: text.partition(WRAPPED if WRAPPED in text else "def call(")[2] for graph, text in code.items()}
    whole = "\n".join(code.values())
    own = {(graph, name) for graph, text in code.items() for name in OWN.findall(text)}
    return RuntimeStage(
        cudagraphs=final_records(seen),
        allocations={
            g: len(re.findall(r"= empty_strided\w*\(|\baoti_torch_empty_strided\w*\(", text))
            for g, text in called.items()
        },
        reused={g: len(re.findall(r"(?:#|//) reuse$", text, re.M)) for g, text in called.items()},
        partitions={g: count for g, text in code.items() if (count := len(re.findall(r"def partition_\d+\(", text)))},
        cuts=cuts_of(seen, list(code)),
        streams=len(set(CURRENT.findall(whole))) + len(own),
        side_streams=len(own),
        entered_streams=entered,
        collectives=tuple(sorted(set(re.findall(r"_c10d_functional\.(\w+)", whole)))),
        values=values,
    )
