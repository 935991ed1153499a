"""graft.compile: any module or function through the pipeline, with the signature, results and effects it had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from graft.api.call_form import CallForm
from graft.api.compiled import CompiledModule
from graft.api.gradients import refuse_inputs, untrained
from graft.api.module_check import ModuleCheck
from graft.api.options import settings_of
from graft.api.program import capture_program
from graft.api.restart import restart_notes, restart_of, unasked_notes
from graft.api.surroundings import ModeParts, refuse_autocast
from graft.api.variant import VariantSettings, build_variant, devices_of
from graft.api.watched import answers
from graft.backends.select import keep_sizes
from graft.base.errors import UsageError
from graft.capture.containers import shapes_by_name, take_call_apart
from graft.capture.dynamic import flat, in_order, input_names
from graft.capture.function import as_module
from graft.capture.module import capture_module
from graft.capture.static_cache import find_caches, initialize, pack
from graft.capture.unsupported import refuse_deques, refuse_modules, refuse_nested, refuse_scripts
from graft.ir.nodes import placeholders
from graft.ir.program.identity import refuse_one_tensor_twice
from graft.ir.trace import taken_apart, use_level
from graft.memory.initial import initial_values, written_buffers
from graft.memory.positions import position_inputs
from graft.passes.config import PipelineConfig


def compile_program(
    program: ExportedProgram,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    settings: VariantSettings,
) -> CompiledModule:
    if settings.grad == "honour":
        raise UsageError("grad='honour' runs the module backward, which an ExportedProgram does not have; compile it")
    with use_level(settings.level):
        found = capture_program(taken_apart(program), args, kwargs, dynamic_shapes)
    variant = build_variant(found.captured, settings, program.graph_module.__class__.__name__, found.inputs)
    compiled = CompiledModule([variant], found.form, initial_values(variant.graph_module), settings)
    return begin_anew(compiled, settings.restart)


def compile_module(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    settings: VariantSettings,
) -> CompiledModule:
    refuse_scripts(module)
    args, kwargs, containers = take_call_apart(args, in_order(module, kwargs))
    dynamic_shapes = shapes_by_name(module, args, kwargs, dynamic_shapes)
    values, names = flat(args, kwargs), input_names(module, args, kwargs)
    refuse_nested(module, values, names)
    refuse_deques(values, names)
    refuse_modules(values, names)
    refuse_autocast(devices_of(module, values))
    parts = ModeParts(module)
    if settings.grad == "refuse" and torch.is_grad_enabled():
        refuse_inputs(values, names)
    caches = find_caches((args, kwargs))
    initialize(module, *containers.put_together(args, kwargs), caches)
    packed = pack(args, caches), pack(kwargs, caches)
    form = CallForm.of(module, *packed, containers)
    if form.compares:
        refuse_one_tensor_twice(values, names, form.compares)
    keep = partial(keep_sizes, settings.backend)
    with use_level(settings.level):
        captured = capture_module(
            module, *packed, dynamic_shapes, containers=containers, caches=caches, keep_sizes=keep
        )
    captured = replace(captured, notes=(*captured.notes, *answers(module)))
    variant = build_variant(captured, settings, type(module).__name__, flat(*packed))
    variant = replace(variant, modes=parts.now(), orders=form.key_orders(*packed))
    compiled = CompiledModule([variant], form, initial_values(variant.graph_module), settings)
    compiled._parts, compiled.training = parts, module.training
    compiled.untrained += untrained(module, compiled.graph_module)
    compiled._sources = ModuleCheck(module)
    compiled._sources.watch_memory(module, [variant.graph_module])
    compiled._source, compiled._caches, compiled.cache_count = (module, dynamic_shapes), caches, len(caches)
    return begin_anew(compiled, settings.restart)


def begin_anew(compiled: CompiledModule, asked: Mapping[str, int | str] | str | None) -> CompiledModule:
    first = compiled.variants[0]
    leaves, written = first.signature.leaves, len(written_buffers(first.graph_module))
    names = dict(zip(placeholders(first.graph_module.graph), first.names, strict=True))
    positions = [names[node] for node in position_inputs(first.graph_module)] if written else []
    compiled.restart = restart_of(asked, leaves, positions)
    notes = restart_notes(compiled.restart, leaves, written)
    if compiled.restart is None and written:
        notes = unasked_notes(leaves, positions)
    report = replace(first.report, notes=(*first.report.notes, *notes))
    compiled.variants[0] = replace(first, report=report)
    return compiled


def compile(
    module: torch.nn.Module | Callable[..., Any] | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    config: str | Path | Mapping[str, Any] | PipelineConfig | None = None,
    backend: str = "auto",
    reuse_outputs: bool = False,
    dump_dir: str | Path | None = None,
    grad: Literal["refuse", "honour", "drop"] = "refuse",
    donate: Sequence[str] = (),
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    fullgraph: bool = True,
    stance: Literal["default", "error_on_new_variant"] = "default",
    restart: Mapping[str, int | str] | Literal["auto"] | None = None,
) -> CompiledModule:
    """Captures `module`, or a function, with example inputs, transforms the graph and lowers it.

    An ExportedProgram is captured already: it needs no example inputs, and its sizes are those it was exported with.

    Sizes are fixed to the example's unless `dynamic_shapes` (as for torch.export) frees them. The length of a cache
    that the caller passes and the program writes at a position is free as well, where the program allows it, unless
    its entry is `{}`.
    `reuse_outputs` (cuda_graph only): results stay in the graph's own memory, which the next call overwrites.
    `grad`: what becomes of an input that requires gradients where they are on. "refuse": an error; "honour": results
    carry gradients, and backward runs the module once more with autograd; "drop": results are detached, with a note.
    `donate`: inputs that the caller gives away; results are returned in their memory, or it is an error.
    `mode`, `options`: Inductor's, as for torch.compile; they choose that backend.
    `decompositions`: a table by which the program, and every pattern, is taken apart.
    `restart`: `{"position": 0}` or `{"sequence": "changed"}`, an input that says where a sequence begins; buffers
    that the program writes then go back to their initial values. `"auto"` finds it: the input by whose values buffers
    are written, or one that is named like a sequence; the report says which.
    `stance="error_on_new_variant"`: as if `freeze()` were called at once; `warm` still captures.
    """
    settings = settings_of(
        config, backend, reuse_outputs=reuse_outputs, dump_dir=dump_dir, grad=grad, donate=donate, mode=mode,
        options=options, decompositions=decompositions, fullgraph=fullgraph, stance=stance, restart=restart,
    )  # fmt: skip
    if isinstance(module, ExportedProgram):
        return compile_program(module, tuple(args), kwargs or {}, dynamic_shapes, settings)
    return compile_module(as_module(module), tuple(args), kwargs or {}, dynamic_shapes, settings)
