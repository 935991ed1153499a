"""graft's fusions as a pass of stock Inductor: torch.compile(model, options=graft.passes_for_inductor()).

The pass runs at `post_grad_custom_pre_pass`: on the graph that AOTAutograd has made functional and taken apart (silu
is neg, exp, add, div), before Inductor's own patterns change it further. Patterns are traced through Inductor's own
decompositions, so that pattern and graph have one normal form. Matching happens on a canonical copy; in Inductor's
graph only the matched nodes change, and a graph without a match stays as it was.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

import graft
from graft.backends import InductorSettings
from graft.backends.dynamo import shorten_module_names
from graft.backends.inductor import (
    FUSION_PASS,
    CachedPass,
    apart_from_dynamo,
    compiles_ahead,
    decompositions,
    inductor_patches,
    refuse_named_kernels,
    sort_graph,
    static_inputs,
)
from graft.backends.inductor_caches import cache_hits
from graft.backends.ops_apart import own_ops, take_apart
from graft.ir.branches import mark_weights
from graft.ir.canonical.normal_form import sweep
from graft.ir.checks import drop_restated_metadata
from graft.ir.nodes import placeholders
from graft.ir.trace import DecompositionLevel, use_level
from graft.memory.inductor_fix.functionalization import OBSERVERS
from graft.memory.inductor_fix.report import FunctionalizationReport
from graft.passes.base import Context
from graft.passes.config import PipelineConfig, load_config
from graft.passes.library.fix_functionalization import NAME as FIX
from graft.passes.library.fix_functionalization import record_of
from graft.passes.pipeline import order_transforms, run_one
from graft.passes.registry import TransformRegistry
from graft.passes.report import Report, TransformRecord

# Reports stand in the module, not on the pass: AOTInductor runs a deep copy of the pass.
_reports: list[Report] = []
OBSERVER = "passes_for_inductor"
WORKS_ON_BRANCHES = "_recursive_post_grad_passes"  # of torch._inductor.compile_fx
WALK = (
    "it walks over linear and attention layers, which Inductor has taken apart before its post-grad passes run;"
    " graft.compile sees them whole"
)


def passes_for_inductor(
    config: str | Path | Mapping[str, Any] | PipelineConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    standalone: bool = False,
) -> dict[str, Any]:
    """Options for torch.compile, or `inductor_configs` for AOTInductor. Inductor's caches stay on.

    `options`: the caller's own for Inductor, in which custom passes run before graft's.
    `standalone`: what is compiled needs nothing of graft's when it runs, as a package for C++: graft's ops are taken
    apart into those of their references, of which Inductor makes code of its own.

    Transforms that read such graphs run (patterns do); the others are reported as skipped. Reports:
    `graft.inductor_reports()`.
    """
    settings = config if isinstance(config, PipelineConfig) else load_config(config)
    refuse_named_kernels(settings.kernels)
    OBSERVERS[OBSERVER] = record_fix
    key = pass_key(settings) + " standalone" * standalone
    asked = InductorSettings(options=options or {}, fix=settings.transforms[FIX].enabled, observer=OBSERVER)
    return inductor_patches(asked, {FUSION_PASS: CachedPass(key, partial(run_fusions, settings, standalone))})


def record_fix(graph: Graph, fixed: FunctionalizationReport | None) -> None:
    """What fix_functionalization did goes into the report of its graph, on which the fusions ran just before."""
    if fixed is not None and _reports:
        record = record_of([fixed], nodes_after=len(graph.nodes))
        _reports[-1] = replace(_reports[-1], transforms={**_reports[-1].transforms, FIX: record})


def inductor_reports() -> list[Report]:
    """A report for each graph that the pass ran on in this process, and a last one when graphs came from a cache.

    A graph from Inductor's cache has the fusions of its first compilation; no pass runs, so there is no report of it.
    """
    hits = cache_hits()
    note = (
        f"{hits} graphs of this process came from Inductor's caches, where passes do not run; what graft fused in"
        " them was reported when they were first compiled (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles them anew)"
    )
    return [*_reports, Report("cache", notes=(note,))] if hits else list(_reports)


def pass_key(settings: PipelineConfig) -> str:
    """What decides the fusions: graft's sources, those of other registered transforms, the settings, torch."""
    digest = hashlib.sha256(f"{torch.__version__} {graft_sources()} {settings.verify}".encode())
    for name, options in settings.transforms.items():
        digest.update(f"\n{name} {options!r}".encode())
        source = Path(inspect.getfile(TransformRegistry.get(name)))
        if not source.is_relative_to(Path(graft.__file__).parent):
            digest.update(source.read_bytes())
    return f"graft {digest.hexdigest()}"


@cache
def graft_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(graft.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def inductor_level() -> DecompositionLevel:
    return DecompositionLevel("inductor", decompositions())


def run_fusions(settings: PipelineConfig, standalone: bool, graph: Graph) -> None:
    """The pass: fuses on a canonical copy, then makes the same changes in `graph`.

    AOTInductor's graphs come from torch.export and restate dtype and device behind every cast, as a second reader of
    it. That is recorded and true in the graph, in which sizes and dtypes do not change any more.
    """
    drop_restated_metadata(graph)
    copy = canonical_copy(graph)
    swept = {node.name for node in graph.nodes} - {node.name for node in copy.graph.nodes}
    records: dict[str, TransformRecord] = {}
    with apart_from_dynamo(), use_level(inductor_level()):
        for name in order_transforms(settings):
            records[name] = run_transform(copy, name, settings)
    matches = [match for record in records.values() for match in record.matches]
    if matches:
        replaced = dict(pair for match in matches for pair in match.successors)
        repeat_changes(graph, copy.graph, replaced, swept | {old for match in matches for old in match.replaced})
    notes = op_notes(graph, standalone)
    _reports.append(Report(f"inductor_{len(_reports)}", records, notes=notes))


def op_notes(graph: Graph, standalone: bool) -> tuple[str, ...]:
    """What becomes of graft's ops, where that is not what it is in every process that runs Python."""
    ops = take_apart(graph) if standalone else own_ops(graph) if compiles_ahead() else {}
    listed = ", ".join(f"{name} ({count})" for name, count in sorted(ops.items()))
    if not ops:
        return ()
    if standalone:
        return (f"standalone: taken apart into the ops of their references, which Inductor compiles: {listed}",)
    return (
        f"aot_inductor: the package calls {listed}, which Python registers: import graft.ops where it is loaded, or"
        " make it with passes_for_inductor(standalone=True), for C++ as well",
    )


def run_transform(gm: GraphModule, name: str, settings: PipelineConfig) -> TransformRecord:
    options = settings.transforms[name]
    transform = TransformRegistry.get(name)(options)
    if options.enabled and not transform.reads_decomposed:
        return TransformRecord(name, options.stage.value, "skipped", reason=WALK)
    return run_one(gm, transform, options, Context(route="module"), settings.verify)


def canonical_copy(graph: Graph) -> GraphModule:
    """The graph in normal form, under the same names. Values that Inductor does not record are None."""
    mark_static_inputs(outermost(graph))
    copy, copies = Graph(), {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
        copies[node].meta.setdefault("val", None)
        shorten_module_names(copies[node])
    gm = GraphModule(graph.owning_module, copy)
    while sweep(gm.graph):
        pass
    return gm


def outermost(graph: Graph) -> GraphModule:
    """What Inductor compiles, of which `graph` may be a branch: it works on those first, within the call for it."""
    frame, found = sys._getframe(), graph.owning_module
    while frame is not None:
        if frame.f_code.co_name == WORKS_ON_BRANCHES:
            found = frame.f_locals.get("gm", found)
        frame = frame.f_back
    return found


def mark_static_inputs(gm: GraphModule) -> None:
    """Inputs that are parameters or buffers, of the graph and of what it calls."""
    inputs = placeholders(gm.graph)
    if not any(node.name.startswith("tangents") for node in inputs):  # a backward graph has other inputs
        for index in static_inputs():
            inputs[index].meta["weight"] = True
    mark_weights(gm)


def repeat_changes(graph: Graph, changed: Graph, replaced: Mapping[str, str], dead: set[str]) -> None:
    """Inserts in `graph` what was made in `changed`, points readers at it, and erases what is dead."""
    originals = {node.name: node for node in graph.nodes}
    images: dict[Node, Node] = {}
    made: dict[str, Node] = {}
    waiting: list[Node] = []
    for node in changed.nodes:
        if "made_by" in node.meta:
            waiting.append(node)
            continue
        images[node] = originals[node.name]
        with graph.inserting_before(images[node]):
            for new in waiting:
                images[new] = graph.create_node(
                    new.op, new.target, map_arg(new.args, images.get), map_arg(new.kwargs, images.get)
                )
                images[new].meta = dict(new.meta)
                made[new.name] = images[new]
        waiting = []
    for old, new in replaced.items():
        while new in replaced:
            new = replaced[new]
        if old in originals and new in made:
            originals[old].replace_all_uses_with(made[new])
    sort_graph(graph)
    for node in reversed(list(graph.nodes)):
        if node.name in dead and originals.get(node.name) is node and not node.users:
            graph.erase_node(node)
