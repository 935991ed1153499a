"""Stage 1, Dynamo: the graphs that it gave to the backend, where it broke off, what it guards, why it came back."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch._dynamo.output_graph

from graft.stages.graphs import code_lines, record_graph
from graft.stages.guards import NEEDS as GUARDS
from graft.stages.guards import SeenGuards, dearest, guard_groups, watch_guards
from graft.stages.needs import Reached, missing, swapped
from graft.stages.story import DynamoStage, GraphBreak, Recompilation, StageGraph, SymbolRecord
from graft.stages.trace import TraceCollector, current_graph, stack_line

NEEDS = ("torch._dynamo.output_graph:OutputGraph.call_user_compiler", "torch._dynamo.exc:Unsupported")
LIMIT = re.compile(r"hit config\.(\w+)[^\n]*")
MISMATCH = re.compile(r"(?P<guard>.*?)\.? expected (?P<expected>.*?),? (?:but got|actual) (?P<actual>.*)")
EQUAL = re.compile(r"(?P<name>[A-Za-z_]\w*) == (?P<expected>.+)")


@dataclass
class SeenDynamo:
    graphs: list[StageGraph] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    guards: SeenGuards = field(default_factory=SeenGuards)


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
            self.seen.limits.append(f"Dynamo {found[0]}{what}: later calls run uncompiled")


@contextmanager
def watch_dynamo(seen: SeenDynamo, reached: Reached) -> Iterator[None]:
    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def call_user_compiler(self: Any, gm: Any, example_inputs: Any) -> Any:
            seen.graphs.append(record_graph(gm.graph, current_graph(), frame_of(self)))
            seen.lines |= code_lines(gm.graph)
            reached.at(2, f"handing graph {current_graph()} to the backend")
            result = before(self, gm, example_inputs)
            reached.at(1, "tracing")
            return result

        return call_user_compiler

    handler, logger = LimitHandler(seen), logging.getLogger("torch._dynamo.convert_frame")
    logger.addHandler(handler)
    costs = nullcontext() if missing(GUARDS) else watch_guards(seen.guards)
    try:
        with swapped(torch._dynamo.output_graph.OutputGraph, "call_user_compiler", make), costs:
            yield
    finally:
        logger.removeHandler(handler)


def frame_of(output: Any) -> str:
    code = getattr(getattr(output, "root_tx", None), "f_code", None)
    return code.co_name if code is not None else ""


def dynamo_stage(seen: SeenDynamo, trace: TraceCollector, calls: Sequence[Mapping[str, Any]] = ()) -> DynamoStage:
    """calls: the arguments of each call by name, for the values that guards were compared with."""
    latency = {
        row.graph: float(row.data["guard_latency_us"])
        for row in trace.of("compilation_metrics")
        if row.data.get("guard_latency_us")
    }
    return DynamoStage(
        graphs=tuple(seen.graphs),
        breaks=tuple(dict.fromkeys(read_break(r.graph, r.payload) for r in trace.of("dynamo_graph_break_reason"))),
        guards=guard_groups(seen.guards, trace),
        dearest=dearest(seen.guards),
        guard_us=latency,
        guard_warm_us={graph: round(us, 3) for graph, us in seen.guards.warm.items()},
        recompilations=read_recompilations(trace, calls),
        symbols=read_symbols(trace),
        notes=tuple(dict.fromkeys(seen.limits)),
        lines=dict(seen.lines),
    )  # fmt: skip


def read_break(graph: str, text: str) -> GraphBreak:
    line = re.search(r"Graph break in user code at (\S+)", text)
    body = text.partition("Graph Break Reason:")[2] or text
    body = body.partition("User code traceback:")[0]
    explanation = re.search(r"Explanation: (.*)", body)
    hints = tuple(hint.strip() for hint in re.findall(r"Hint: (.*)", body))
    lines = [part.strip() for part in body.splitlines() if part.strip(" ^~")]
    before = [part for part in lines if not part.startswith(("Explanation", "Hint", "Developer debug", "For more"))]
    reason = before[-1 if explanation else 0] if before else "unknown"
    where = line[1].rsplit("/", 1)[-1] if line else ""
    return GraphBreak(graph, where, reason, explanation[1].strip() if explanation else "", hints)


def read_recompilations(trace: TraceCollector, calls: Sequence[Mapping[str, Any]]) -> tuple[Recompilation, ...]:
    """One for each compiled graph whose guards failed; torch gives a text for one reason and a list for several."""
    found: list[Recompilation] = []
    for row in trace.of("recompile_reasons"):
        content = row.json()
        for text in content if isinstance(content, list) else [content]:
            found.append(read_recompilation(row.graph, str(text), calls))
    return tuple(dict.fromkeys(found))


def read_recompilation(graph: str, text: str, calls: Sequence[Mapping[str, Any]]) -> Recompilation:
    first = text.strip().splitlines()[0]
    previous, colon, rest = first.partition(": ")
    if not colon or not re.fullmatch(r"\d+/\d+", previous.strip()):
        previous, rest = "", first
    guard, _, comment = rest.partition("  #")
    guard = guard.strip()
    frame = re.search(r'File "([^"]+)", line (\d+)', text)
    line = f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}" if frame else ""
    if not line and (near := re.search(r"(\w+\.py:\d+)", comment)):
        line = near[1]
    if found := MISMATCH.fullmatch(guard):
        return Recompilation(graph, previous, found["guard"], found["expected"], found["actual"], line)
    if found := EQUAL.fullmatch(guard):
        return Recompilation(graph, previous, guard, found["expected"], other_value(found, calls), line)
    return Recompilation(graph, previous, guard, line=line)


def other_value(found: re.Match[str], calls: Sequence[Mapping[str, Any]]) -> str:
    """The first value that a call gave for the name and that is not the one expected."""
    values = [repr(call[found["name"]]) for call in calls if found["name"] in call]
    return next((value for value in values if value != found["expected"]), "")


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
