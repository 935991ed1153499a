"""Stage 6, CUDA graphs: which were recorded, and why others were not, when they were compiled or when they ran.

The first call of a graph warms up and the second is recorded, so that reasons (an input that is written, memory that
moves) may come up only then. torch says them in a warning, and nowhere else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from graft.ir.nodes import FRAME, TORCH
from graft.stages.needs import Reached, missing, swapped
from graft.stages.story_code import CudagraphRecord, PartitionCut
from graft.stages.trace import current_graph

LOGGER = "torch._inductor.cudagraph_utils.__cudagraphs"
NEEDS = (
    "torch._inductor.cudagraph_utils:cudagraphs_log",
    "torch._inductor.cudagraph_trees:CUDAGraphTreeManager.record_function",
    "torch._inductor.scheduler:Scheduler.should_partition",
)
NOT_ASKED = 'not asked for: mode="reduce-overhead" (--mode reduce-overhead) or triton.cudagraphs does'
NOT_CALLED = "its second call, which is recorded, was not made"
NOT_WATCHED = "whether it was recorded cannot be watched: "
NO_PART = "every part of it is left out of CUDA graphs"
SKIPPED = re.compile(r"^(?:skipping cudagraphs? due to )+")


@dataclass
class SeenCudagraphs:
    """records: as each graph is made ready to run; `recorded` says that it may be. captured: graphs that were.
    skips: by graph, what torch warned of. cuts: nodes at which a graph is parted, with the reason."""

    records: list[CudagraphRecord] = field(default_factory=list)
    captured: set[str] = field(default_factory=set)
    skips: dict[str, list[str]] = field(default_factory=dict)
    cuts: dict[tuple[str, str], str] = field(default_factory=dict)
    around: str = ""  # in place of the number, where graphs have none of their own

    def pending(self) -> bool:
        """A graph that may be recorded was neither recorded nor skipped so far."""
        return any(one.recorded and one.graph not in self.captured | set(self.skips) for one in self.records)


class SkipHandler(logging.Handler):
    def __init__(self, seen: SeenCudagraphs, reached: Reached) -> None:
        super().__init__(logging.WARNING)
        self.seen, self.reached = seen, reached

    def emit(self, record: logging.LogRecord) -> None:
        if SKIPPED.match(message := record.getMessage()):
            graph = self.seen.around or self.reached.graph or current_graph()
            self.seen.skips.setdefault(graph, []).append(reason_text(message))


@contextmanager
def watch_cudagraphs(seen: SeenCudagraphs, reached: Reached) -> Iterator[None]:
    if missing(NEEDS):  # the records say so
        yield
        return
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager
    from torch._inductor.scheduler import Scheduler

    def capturing(before: Callable[..., Any]) -> Callable[..., Any]:
        def record_function(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = before(self, *args, **kwargs)
            seen.captured.add(seen.around or reached.graph)
            return result

        return record_function

    def parting(before: Callable[..., Any]) -> Callable[..., Any]:
        def should_partition(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
            reason = before(self, node, *args, **kwargs)
            if reason and torch._inductor.config.triton.cudagraphs:
                seen.cuts[current_graph(), node.get_name()] = str(reason)
            return reason

        return should_partition

    handler, logger = SkipHandler(seen, reached), logging.getLogger(LOGGER)
    logger.addHandler(handler)
    try:
        with ExitStack() as stack:
            stack.enter_context(swapped(CUDAGraphTreeManager, "record_function", capturing))
            stack.enter_context(swapped(Scheduler, "should_partition", parting))
            yield
    finally:
        logger.removeHandler(handler)


def compiled_record(graph: str, compiled: Any, asked: bool, kept: bool) -> CudagraphRecord:
    """What is known once a graph is ready to run. kept: Inductor means to record it."""
    return CudagraphRecord(graph, asked, asked and kept, skip_reason(compiled, asked, kept))


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
    if found := "; ".join(dict.fromkeys(reason_text(str(reason)) for reason in told if reason)):
        return found
    parted = getattr(compiled, "partition_maps", None)
    return NO_PART if parted is not None and not len(parted) else "Inductor gives no reason"


def reason_text(message: str) -> str:
    """`mutated inputs (1 instances) (decode.py:8)` of torch's words and the stack below them."""
    first = SKIPPED.sub("", message.strip()).partition("\n")[0].partition("Found from")[0].strip(" .:")
    first = first.strip("[]{}'\"") if first[:1] in "[{" else first  # a list of reasons
    lines = [f"{Path(path).name}:{line}" for path, line, _ in FRAME.findall(message) if not path.startswith(TORCH)]
    return f"{first} ({lines[-1]})" if lines else first


def final_records(seen: SeenCudagraphs) -> tuple[CudagraphRecord, ...]:
    """After all calls: recorded is what was, and what ran without says why."""
    return tuple(final(one, seen) if one.recorded else one for one in seen.records)


def final(one: CudagraphRecord, seen: SeenCudagraphs) -> CudagraphRecord:
    if skips := seen.skips.get(one.graph):
        in_part = "a part of it: " if one.graph in seen.captured else ""
        return replace(one, recorded=False, reason=in_part + "; ".join(dict.fromkeys(skips)))
    if problem := missing(NEEDS):
        return replace(one, recorded=False, reason=f"{NOT_WATCHED}{problem}")
    return one if one.graph in seen.captured else replace(one, recorded=False, reason=NOT_CALLED)


def cuts_of(seen: SeenCudagraphs, graphs: Sequence[str]) -> tuple[PartitionCut, ...]:
    return tuple(PartitionCut(graph, node, why) for (graph, node), why in seen.cuts.items() if graph in graphs)
