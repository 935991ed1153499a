"""torch's structured trace (what TORCH_TRACE writes to files), collected in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.ir.nodes import TORCH

NEEDS = ("torch._logging.structured:INTERN_TABLE", "torch._guards:CompileContext.current_compile_id")
NOISE = ("chromium_event", "str", "describe_tensor", "describe_storage", "describe_source", "exec")
ABOUT = ("frame_id", "frame_compile_id", "attempt", "has_payload", "rank", "stack", "compiled_autograd_id", "process")


@dataclass(frozen=True)
class TraceRow:
    """kind: `dynamo_output_graph`, or the name of an artifact."""

    kind: str
    graph: str
    data: Mapping[str, Any]
    payload: str

    def json(self) -> Any:
        """What the payload holds; torch says JSON of texts that are none."""
        try:
            return json.loads(self.payload)
        except ValueError:
            return self.payload


class TraceCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.rows: list[TraceRow] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata, payload = dict(getattr(record, "metadata", {})), getattr(record, "payload", None)
        kinds = [key for key in metadata if key not in ABOUT]
        if not kinds or kinds[0] in NOISE:
            return
        data = metadata[kinds[0]] if isinstance(metadata[kinds[0]], dict) else {}
        kind = data["name"] if kinds[0] == "artifact" else kinds[0]
        frame = metadata.get("frame_id")
        graph = "" if frame is None else f"{frame}/{metadata.get('frame_compile_id', 0)}"
        self.rows.append(TraceRow(kind, graph, data, payload if isinstance(payload, str) else ""))

    def of(self, *kinds: str) -> list[TraceRow]:
        return [row for row in self.rows if row.kind in kinds]


@contextmanager
def tracing_rows() -> Iterator[TraceCollector]:
    """Within it, the rows that torch traces are collected; the logger is then as it was."""
    collector, logger = TraceCollector(), logging.getLogger("torch.__trace")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(collector)
    try:
        yield collector
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
        logger.propagate = propagate


def current_graph() -> str:
    """The number of the compilation under way: `0/1`."""
    from torch._guards import CompileContext

    compilation = CompileContext.current_compile_id()
    return "" if compilation is None else f"{compilation.frame_id}/{compilation.frame_compile_id}"


def stack_line(stack: Any) -> str:
    """`file.py:12` of the innermost line outside torch, in a stack as the trace has it."""
    from torch._logging.structured import INTERN_TABLE

    names = {number: name for name, number in INTERN_TABLE.items()}
    for frame in reversed(stack or []):
        name = frame.get("filename")
        name = names.get(name, "") if isinstance(name, int) else name
        if name and not str(name).startswith(TORCH):
            return f"{Path(name).name}:{frame.get('line')}"
    return ""
