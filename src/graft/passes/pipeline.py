"""Runs the configured transforms in order. Each is a transaction: timed, checked, recorded, or rolled back."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from graft.base.authors import told
from graft.base.device_memory import size_text
from graft.base.errors import GraftError, OrderError, TransformError
from graft.ir.canonical.normal_form import drop_dead, drop_unused_state
from graft.ir.edit import attribute
from graft.ir.verify import GraphSnapshot, verify
from graft.memory.verify import Uses, check_memory
from graft.passes.accounting import check_accounted
from graft.passes.base import BaseTransform, Context, Outcome, Stage, TransformConfig
from graft.passes.branches import run_inside
from graft.passes.config import PipelineConfig, Verify
from graft.passes.dumps import DumpWriter
from graft.passes.numeric_check import check_matches
from graft.passes.registry import TransformRegistry
from graft.passes.report import Report, TransformRecord

log = logging.getLogger("graft")
BEFORE_PARTS = (Stage.MATCH, Stage.SHARD)  # weights have shapes alone until ranks know their parts
Progress = Callable[[str, int, int], None]  # transform name, how many are done, how many there are
# sees the graph before and after a transform that matched, and gives the record back, perhaps with more in it
Observer = Callable[[GraphModule, GraphSnapshot, BaseTransform, TransformRecord], TransformRecord]


def order_transforms(config: PipelineConfig) -> list[str]:
    """By stage, then by `after` / `before`, then as listed. A cycle or a constraint across stages is an error.

    What runs on Inductor's graphs is not among them.
    """
    listed = [name for name, settings in config.transforms.items() if settings.stage is not Stage.INDUCTOR]
    stages = list(Stage)
    position = {name: (stages.index(config.transforms[name].stage), listed.index(name)) for name in listed}
    earlier: dict[str, set[str]] = {name: set() for name in listed}
    for name, settings in ((name, config.transforms[name]) for name in listed):
        for kind, others in (("after", settings.after), ("before", settings.before)):
            for other in others:
                TransformRegistry.get(other)
                if other not in position:
                    raise OrderError(f"transforms.{name}.{kind} names {other}, which the configuration does not list")
                first, second = (other, name) if kind == "after" else (name, other)
                if position[first][0] > position[second][0]:
                    raise OrderError(
                        f"{name} must run {kind} {other}, but {first} is in stage"
                        f" {config.transforms[first].stage.value}, which comes later than"
                        f" {config.transforms[second].stage.value}; change a stage or drop the constraint"
                    )
                earlier[second].add(first)
    ordered: list[str] = []
    while len(ordered) < len(listed):
        ready = [n for n in listed if n not in ordered and earlier[n] <= set(ordered)]
        if not ready:
            stuck = sorted(set(listed) - set(ordered))
            raise OrderError(f"`after` and `before` form a cycle among {', '.join(stuck)}; remove one constraint")
        ordered.append(min(ready, key=lambda n: position[n]))
    return ordered


def run_pipeline(
    gm: GraphModule,
    config: PipelineConfig,
    context: Context | None = None,
    *,
    model: str = "",
    dump_dir: str | Path | DumpWriter | None = None,
    progress: Progress | None = None,
    observe: Observer | None = None,
    last: Callable[[GraphModule], TransformRecord] | None = None,
) -> Report:
    """Applies every enabled transform to `gm` in place and returns the report.

    observe: called after each transform that matched; what it raises ends the run.
    last: what the caller does to the graph in the end, with its record; it is dumped as a transform is.
    """
    context = context or Context()
    names = order_transforms(config)
    dumps = DumpWriter.open(dump_dir)
    dumps.write("capture", "captured", gm)
    records: dict[str, TransformRecord] = {}
    for index, name in enumerate(names):
        if progress:
            progress(name, index, len(names))
        settings = config.transforms[name]
        if settings.stage not in BEFORE_PARTS:
            read_floats(gm, context)
        with no_collection():
            transform = TransformRegistry.get(name)(settings)
            records[name] = run_one(gm, transform, settings, context, config.verify, observe)
            records[name] = run_inside(
                gm,
                records[name],
                lambda inner, name=name, settings=settings: run_one(
                    inner, TransformRegistry.get(name)(settings), settings, context, config.verify, observe
                ),
            )
        log.info(records[name].summary)
        if settings.enabled:
            dumps.write(settings.stage.value, name, gm)
    if last is not None:
        record = last(gm)
        records[record.name] = record
        dumps.write(record.stage, record.name, gm)
    if progress:
        progress("", len(names), len(names))
    drop_unused_state(gm)
    gm.recompile()
    report = Report(model, records, notes=tuple(context.notes))
    dumps.finish(report, config, context)
    return report


def read_floats(gm: GraphModule, context: Context) -> None:
    """Of weights that lie in files as floats: once it is known which part of each the graph needs, and before a
    transform makes others of them. Blocks stay where they are (weights/lazy.py)."""
    if context.lazy is None or not context.lazy.sources:
        return
    read = (attribute(gm, str(node.target)) for node in gm.graph.nodes if node.op == "get_attr")
    if not context.lazy.fill_floats(tensor for tensor in read if isinstance(tensor, Tensor)):
        return
    size, taken = sum(file.path.stat().st_size for file in context.lazy.files), context.lazy.taken
    context.notes.append(f"weights: {size_text(taken)} of {size_text(size)} in files were read here")


@contextmanager
def no_collection() -> Iterator[None]:
    """Capture leaves millions of objects behind; a full collection among them takes 0.3 s and frees nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run_one(
    gm: GraphModule,
    transform: BaseTransform,
    settings: TransformConfig,
    context: Context,
    checked: Verify = "structure",
    observe: Observer | None = None,
) -> TransformRecord:
    stage = settings.stage.value
    if not settings.enabled:
        return TransformRecord(transform.name, stage, "disabled")
    nodes_before, started = len(gm.graph.nodes), time.perf_counter()
    before, uses = GraphSnapshot.take(gm), Uses.take(gm.graph)
    outputs_before, notes_before = dict(context.outputs), list(context.notes)
    common: dict[str, Any] = {"name": transform.name, "stage": stage, "nodes_before": nodes_before}
    clock = Phases()
    try:
        with clock.phase("rewrite"):
            outcome = transform.apply(gm, context)
        if outcome.matches:
            with clock.phase("check"):
                drop_dead(gm)
                verify(gm, before)
                check_memory(gm, before, uses, [(match.replaced, match.made) for match in outcome.matches])
                check_accounted(gm, before, outcome.matches, measured=context.measure is not None)
            if checked == "matches" and not transform.uncheckable:
                with clock.phase("numeric check"):
                    check = transform.own_check(context) or partial(check_matches, not_kept=transform.not_kept)
                    matches = check(gm, before, outcome.matches, most_of(context))
                    outcome = replace(outcome, matches=matches)
        else:
            check_accounted(gm, before, (), measured=context.measure is not None)
    except Exception as error:
        before.restore(gm)
        context.outputs, context.notes = outputs_before, notes_before
        if settings.on_error == "raise":
            if isinstance(error, GraftError):
                raise TransformError(transform.name, str(error)) from error
            raise TransformError(transform.name, told(error)) from error
        return TransformRecord(
            **common,
            status="rolled_back",
            reason=told(error),
            seconds=time.perf_counter() - started,
            nodes_after=nodes_before,
            phases=tuple(clock.spent),
        )
    record = TransformRecord(
        **common,
        status=status_of(outcome),
        matches=outcome.matches,
        near_misses=outcome.near_misses,
        reason=outcome.reason,
        seconds=time.perf_counter() - started,
        nodes_after=len(gm.graph.nodes),
        unchecked=transform.uncheckable if checked == "matches" and outcome.matches else "",
        phases=tuple(clock.spent),
    )
    return observe(gm, before, transform, record) if observe and record.matches else record


def most_of(context: Context) -> int | None:
    """The largest size that an input of the graph has: a decoder's tokens are at positions below its context."""
    return context.context_length if context.route == "decoder" else None


class Phases:
    """What the seconds of a transform went into."""

    def __init__(self) -> None:
        self.spent: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent.append((name, time.perf_counter() - started))


def status_of(outcome: Outcome) -> Any:
    if outcome.matches:
        return "applied"
    return "skipped" if outcome.skipped else "no_match"
