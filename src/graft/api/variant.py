"""One captured way through a module: its graph, what it may be called with, and what runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graft.api.call_form import KeyOrders
from graft.api.checks import MemoryCheck, StateCheck
from graft.api.donation import compute_in_place, donate, donated_names, refuse_copies, refuse_gradients
from graft.api.functionalization import OFF, FixRecorder
from graft.api.gradients import gradient_notes, refuse_unhonoured, trainable
from graft.api.module_check import ModuleCheck
from graft.api.profile import DeviceMeasure
from graft.api.surroundings import Modes
from graft.backends import InductorSettings, lower
from graft.capture.containers import Container, put_together
from graft.capture.module import CapturedModule
from graft.ir.branches import all_nodes
from graft.ir.canonical.normal_form import is_random
from graft.ir.effects import storage_root
from graft.ir.io.pytrees import nesting, result_names, unflatten
from graft.ir.nodes import leaves, outlives_call, output_node, placeholders
from graft.ir.program.gradient_flags import gradients_asked, questions_asked
from graft.ir.program.signature import Signature
from graft.ir.trace import EXPORT, DecompositionLevel, use_level
from graft.memory.alias_map import Alias, state_records
from graft.memory.initial import written_buffers
from graft.memory.io_table import IoNames, IoTable, io_table
from graft.memory.positions import PositionChecks, position_checks
from graft.memory.uninitialised import uninitialised_notes
from graft.memory.writes import state_writes
from graft.passes.base import Context
from graft.passes.config import PipelineConfig
from graft.passes.library.fix_functionalization import NAME as FIX
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report, TransformRecord


@dataclass(frozen=True)
class VariantSettings:
    """How every variant of a module is made."""

    config: PipelineConfig
    backend: str
    reuse_outputs: bool = False
    dump_dir: str | Path | None = None
    grad: str = "refuse"
    donate: tuple[str, ...] = ()  # inputs, or containers of them, whose memory results may take over
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # Inductor's
    level: DecompositionLevel = EXPORT  # how far programs and patterns are taken apart
    frozen: bool = False  # nothing is captured but by `warm`
    restart: Mapping[str, int | str] | str | None = None  # the input that begins state anew, and when
    shared: dict[Any, Any] = field(default_factory=dict)  # what the transforms make once for all variants


@dataclass(frozen=True)
class Variant:
    graph_module: GraphModule  # after the pipeline, before lowering
    signature: Signature
    call: Callable[..., Any]
    backend: str
    report: Report
    aliases: tuple[Alias, ...]
    positions: PositionChecks
    returned: tuple[tuple[str, int], ...] | None = None  # where the result held which StaticCache, if it takes any
    results: Container | None = None  # how the result is put together, if it holds objects
    made_by: str = "compile"  # or the guard of another variant that a call did not meet
    fix: FixRecorder | None = None  # on Inductor: what its pass does, when it compiles
    donated: tuple[str, ...] = ()  # inputs that the graph writes although the program does not
    state: Callable[[], None] = field(default=lambda: None, compare=False)  # raises where a tensor was replaced
    modes: Modes | None = None  # of the modules that ask for theirs, when it was captured; None: not known
    orders: KeyOrders = ()  # of the keys of dicts among its inputs
    later: Callable[[], tuple[str, ...]] = tuple  # notes on what happened since it was lowered
    filled: dict[Any, Any] = field(default_factory=dict, compare=False)  # graphs that fill `out=`, once asked for

    @property
    def report_now(self) -> Report:
        """The report, with what Inductor's pass did since the graph was lowered. `later` is this process's alone."""
        if self.fix is None:
            return self.report
        return replace(self.report, transforms={**self.report.transforms, FIX: self.fix.record})

    @property
    def names(self) -> list[str]:
        return self.signature.names_of_inputs

    @cached_property
    def table(self) -> IoTable:
        """What the graph takes, keeps and gives."""
        info = nesting(self.graph_module.graph)
        spec = info.out_spec if info is not None else None
        if spec is not None and self.returned is not None:  # beside the counters of caches
            spec = spec.child(0)
        inputs = dict(zip(placeholders(self.graph_module.graph), self.names, strict=True))
        names = IoNames(inputs, result_names(spec) if spec is not None else [], self.signature.names)
        return io_table(self.graph_module, names, self.aliases, self.signature.describe_sizes())

    @cached_property
    def written(self) -> list[int]:
        """Which inputs the graph writes."""
        owners = {write.owner for write in state_writes(self.graph_module)}
        return [index for index, node in enumerate(placeholders(self.graph_module.graph)) if node in owners]

    @cached_property
    def gives_views(self) -> bool:
        """Whether a result may be a view of an input or of state."""
        results = (leaf for leaf in leaves(output_node(self.graph_module.graph).args[0]) if isinstance(leaf, Node))
        return any(storage_root(node) is not node and outlives_call(storage_root(node)) for node in results)

    @cached_property
    def samples(self) -> bool:
        """Whether the graph samples random numbers."""
        return any(map(is_random, all_nodes(self.graph_module.graph)))

    @cached_property
    def memory(self) -> MemoryCheck:
        gm = self.graph_module
        state = [*gm.parameters(), *gm.buffers()] if self.donated else list(written_buffers(gm).values())
        return MemoryCheck(self.names, self.written, state)

    @cached_property
    def own_memory(self) -> StateCheck | None:
        written = {} if self.donated else written_buffers(self.graph_module)  # donated memory is checked against all
        return StateCheck(self.names, written) if written else None

    @cached_property
    def plain(self) -> Callable[[Sequence[Any]], Any] | None:
        return plain_call(self.call)

    def run(self, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`values` are what is in `args` and `kwargs`. A graph with StaticCaches takes those two as they are."""
        if self.plain is not None:
            result = self.plain(values)
        else:
            result = self.call(args, kwargs) if self.returned is not None else self.call(*args, **kwargs)
        if self.results is None:
            return result
        if self.returned is not None:  # beside the counters of caches
            return put_together(result[0], self.results), result[1]
        return put_together(result, self.results)

    def check(self, values: Sequence[Any]) -> None:
        """Raises before anything is written when the call would write where it cannot."""
        if self.backend != "cuda_graph":  # which looks up its buffers at every call
            self.state()
        if self.donated:
            refuse_gradients(values, self.names, self.donated)
        if self.written:
            self.memory(values)
        if self.own_memory is not None:
            self.own_memory(values)
        self.positions(values)


def build_variant(
    captured: CapturedModule, settings: VariantSettings, model: str, inputs: Sequence[Any] = ()
) -> Variant:
    """The pipeline over a captured graph, then the backend. `inputs`: flat ones, to measure it with."""
    gm = captured.graph_module
    context = Context(route="module", shared=settings.shared, measure=DeviceMeasure(tuple(inputs)))
    training, unwritten, marked = trainable(gm), uninitialised_notes(gm), gradients_asked(gm)
    asked = [f"asked: forward reads {what}; the graph has the answer of its capture" for what in questions_asked(gm)]
    donate(gm, captured.signature.names_of_inputs, settings.donate)
    with use_level(settings.level):
        last = compute_in_place(captured.signature.names_of_inputs, settings.donate, settings.backend)
        report = run_pipeline(gm, settings.config, context, model=model, dump_dir=settings.dump_dir, last=last)
    notes = (
        *captured.notes,
        *unwritten,
        *decomposition_notes(settings.level),
        *gradient_notes(settings.grad, list(training), marked),
        *asked,
    )
    variant = lower_variant(gm, captured.signature, report, settings, captured.returned, notes)
    if settings.grad == "honour":
        refuse_unhonoured(gm, training, variant.backend)
    return replace(variant, results=captured.results)


def devices_of(module: torch.nn.Module, values: Sequence[Any]) -> tuple[str, ...]:
    """The kinds of devices that a program has something on, where autocast may be on."""
    tensors = [*module.parameters(), *module.buffers(), *(v for v in values if isinstance(v, torch.Tensor))]
    kinds = dict.fromkeys(tensor.device.type for tensor in tensors)
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def decomposition_notes(level: DecompositionLevel) -> tuple[str, ...]:
    """What `decompositions` changes beside the ops."""
    if not level.applied_to:
        return ()
    ops = ", ".join(sorted(level.applied_to))
    return (
        f"decompositions: the program was made functional to take it apart ({ops}); results that are views of what it"
        " writes may be copies, and sizes may be fixed that are free without",
    )


def lower_variant(
    gm: GraphModule,
    signature: Signature,
    report: Report,
    settings: VariantSettings,
    returned: tuple[tuple[str, int], ...] | None = None,
    notes: Sequence[str] = (),
) -> Variant:
    """A transformed graph on its backend, with its alias map and checks."""
    names = dict(zip(placeholders(gm.graph), (leaf.name for leaf in signature.leaves), strict=True))
    positions = position_checks(gm, names)
    donated, missed = donated_names(list(names.values()), settings.donate), missed_updates(report)
    aliases, state = state_records(gm, names, missed, donated)
    refuse_copies(state, donated, missed)
    fix, inductor, off = inductor_request(settings)
    lowered = lower(
        gm, settings.backend, settings.config.kernels, reuse_outputs=settings.reuse_outputs, inductor=inductor
    )
    notes = (*notes, *off)
    notes = (*report.notes, *notes, *positions.unchecked, *lowered.notes)
    report = replace(report, kernels=lowered.kernels, notes=notes, state=state)
    if off:
        report = replace(report, transforms={**report.transforms, FIX: TransformRecord(FIX, "inductor", "disabled")})
    made = Variant(gm, signature, lowered.call, lowered.backend, report, aliases, positions, returned)
    made = replace(made, state=ModuleCheck(gm, "state"))
    return replace(made, donated=tuple(donated), fix=fix, later=lowered.later)


def inductor_request(
    settings: VariantSettings,
) -> tuple[FixRecorder | None, InductorSettings | None, tuple[str, ...]]:
    """What is asked of Inductor, who is told of its graphs, and notes for the report."""
    if settings.backend != "inductor":
        return None, None, ()
    if not settings.config.transforms[FIX].enabled:
        return None, InductorSettings(settings.mode, settings.options, fix=False), (OFF,)
    base = settings.dump_dir or os.environ.get("GRAFT_DUMP_GRAPHS_DIR")
    recorder = FixRecorder(Path(base) / "inductor" if base else None, settings.config)
    return recorder, InductorSettings(settings.mode, settings.options, observer=recorder.key), ()


def plain_call(call: Callable[..., Any]) -> Callable[[Sequence[Any]], Any] | None:
    """A graph that runs as Python, with its inputs flat: taking nested ones apart costs as much as ten small ops."""
    if not isinstance(call, GraphModule) or (info := nesting(call.graph)) is None:
        return None
    graph = Graph()
    graph.output(graph.graph_copy(call.graph, {}))
    run, spec = GraphModule(call, graph).forward, info.out_spec
    if spec.is_leaf():
        return lambda values: run(*values)[0]
    return lambda values: unflatten(run(*values), spec)


def missed_updates(report: Report) -> Mapping[str, str]:
    """Node → why update_state_in_place left it."""
    record = report.transforms.get("update_state_in_place")
    return {miss.stopped_at: miss.reason for miss in record.near_misses} if record else {}
