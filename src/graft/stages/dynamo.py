"""Stage 1, Dynamo: the graphs that it gave to the backend, where it broke off, what it guards, why it came back."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch._dynamo.callback
import torch._dynamo.output_graph

from graft.stages.breaks import read_breaks
from graft.stages.graphs import code_lines, record_graph, with_callers
from graft.stages.guards import NEEDS as GUARDS
from graft.stages.guards import SeenGuards, dearest, guard_groups, watch_guards
from graft.stages.needs import Reached, missing, swapped
from graft.stages.recompiles import NEEDS as FAILURES
from graft.stages.recompiles import SeenFailures, read_recompilations, watch_failures
from graft.stages.story import DynamoStage, StageGraph, SymbolRecord
from graft.stages.trace import TraceCollector, current_graph, stack_line

NEEDS = (
    "torch._dynamo.output_graph:OutputGraph.call_user_compiler",
    "torch._dynamo.exc:Unsupported",
    "torch._dynamo.callback:callback_handler.start_callbacks",
    "torch._dynamo.callback:callback_handler.end_callbacks",
)
LIMIT = re.compile(r"hit config\.(\w+)[^\n]*")


@dataclass
class SeenDynamo:
    graphs: list[StageGraph] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    streams: set[tuple[str, Any]] = field(default_factory=set)  # graph, stream that the program enters
    guards: SeenGuards = field(default_factory=SeenGuards)
    failures: SeenFailures = field(default_factory=SeenFailures)


class LimitHandler(logging.Handler):
    """Dynamo says in a warning that it gives up compiling a function again."""

    def __init__(self, seen: SeenDynamo) -> None:
        super().__init__(logging.WARNING)
        self.seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if found := LIMIT.search(message):
            function = re.search(r"function: (.*)", message)
            what = f" for {function[1].strip()}" if function else ""
            self.seen.failures.refused.add(current_graph())
            self.seen.limits.append(f"Dynamo {found[0]}{what}: later calls run uncompiled")


@contextmanager
def watch_dynamo(seen: SeenDynamo, reached: Reached) -> Iterator[None]:
    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def call_user_compiler(self: Any, gm: Any, example_inputs: Any) -> Any:
            recorded = record_graph(gm.graph, current_graph(), frame_of(self))
            seen.graphs.append(with_callers(recorded, gm.graph))
            seen.lines |= code_lines(gm.graph)
            seen.streams |= {(current_graph(), one) for one in map(entered_stream, gm.graph.nodes) if one is not None}
            reached.at(2, f"handing graph {current_graph()} to the backend")
            result = before(self, gm, example_inputs)
            reached.at(1, "tracing")
            return result

        return call_user_compiler

    handler, logger = LimitHandler(seen), logging.getLogger("torch._dynamo.convert_frame")
    logger.addHandler(handler)
    compilations = torch._dynamo.callback.callback_handler
    begins, ends = (lambda _: reached.at(1, "tracing")), (lambda _: reached.compiled())
    compilations.register_start_callback(begins)
    compilations.register_end_callback(ends)
    costs = nullcontext() if missing(GUARDS) else watch_guards(seen.guards)
    failures = nullcontext() if missing(FAILURES) else watch_failures(seen.failures)
    try:
        with swapped(torch._dynamo.output_graph.OutputGraph, "call_user_compiler", make), costs, failures:
            yield
    finally:
        logger.removeHandler(handler)
        for kept, ours in ((compilations.start_callbacks, begins), (compilations.end_callbacks, ends)):
            if ours in kept:  # a reset has taken them away
                kept.remove(ours)


def entered_stream(node: Any) -> Any:
    """Dynamo's number of the stream in whose context the program makes the call."""
    return (node.meta.get("custom") or {}).get("stream")


def frame_of(output: Any) -> str:
    code = getattr(getattr(output, "root_tx", None), "f_code", None)
    return code.co_name if code is not None else ""


def dynamo_stage(seen: SeenDynamo, trace: TraceCollector) -> DynamoStage:
    latency = {
        row.graph: float(row.data["guard_latency_us"])
        for row in trace.of("compilation_metrics")
        if row.data.get("guard_latency_us")
    }
    return DynamoStage(
        graphs=tuple(seen.graphs),
        breaks=read_breaks(trace),
        guards=guard_groups(seen.guards, trace),
        dearest=dearest(seen.guards),
        guard_us=latency | {graph: round(us, 3) for graph, us in seen.guards.cold.items()},
        guard_warm_us={graph: round(us, 3) for graph, us in seen.guards.warm.items()},
        recompilations=read_recompilations(trace, seen.failures),
        symbols=read_symbols(trace),
        notes=tuple(dict.fromkeys(seen.limits)),
        lines=dict(seen.lines),
    )  # fmt: skip


def read_symbols(trace: TraceCollector) -> tuple[SymbolRecord, ...]:
    fixed = {(row.graph, row.data.get("symbol", "")): row.data for row in trace.of("symbolic_shape_specialization")}
    found: dict[tuple[str, str], SymbolRecord] = {}
    for row in trace.of("create_symbol"):
        data, key = row.data, (row.graph, row.data["symbol"])
        fix = fixed.get(key, {})
        by = stack_line(fix.get("user_stack")) or str(fix.get("reason") or "")
        line = stack_line(data.get("user_stack"))
        found[key] = SymbolRecord(
            *key, data["source"], data["val"], data["vr"], line, str(fix.get("value", "")), by if fix else ""
        )
    return tuple(found.values())
