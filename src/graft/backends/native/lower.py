"""The native backend: as much of the graph as there are kernels for runs as compiled C++, the rest eagerly."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from operator import getitem

from torch.fx import Graph, GraphModule, Node

from graft.backends.eager import bind_kernels, spec_of
from graft.backends.lowered import Lowered
from graft.backends.native.build import Built, Source, load
from graft.backends.native.call import Arena, RegionCall, Threads
from graft.backends.native.compiler import find_compiler
from graft.backends.native.cpu import thread_count
from graft.backends.native.emit import emit
from graft.backends.native.regions import NativeRegion, Split, split
from graft.backends.native.stored import NativeStep
from graft.backends.native.weights import Release, prepare_all
from graft.base.errors import NothingNative, UsageError
from graft.ir.nodes import tensor_val, where
from graft.ops.call import Asker
from graft.ops.ran import Ran, gathered
from graft.weights.native_tiles import HALVES


def lower_native(gm: GraphModule, named: Mapping[str, str] | None = None, release: Release | None = None) -> Lowered:
    """Called as the eager graph is. Notes say what was compiled, where it lies, and what stayed eager and why.

    `release` frees a weight of the module's own, which nothing reads after it was packed.
    """
    named = named or {}
    check_device(gm)
    find_compiler()
    threads = thread_count()
    parts = split(gm, named)
    if not parts.regions:
        raise NothingNative(next(iter(parts.reasons.values()), "it has no ops"))
    started = time.perf_counter()
    library, built = load(source_of(parts))
    seconds = time.perf_counter() - started
    weights, released = prepare_all(gm, parts, release)
    arena, team = Arena(), Threads(library, threads)
    calls = [
        RegionCall(region.program, library, team, own, arena)
        for region, own in zip(parts.regions, weights, strict=True)
    ]
    shell = GraphModule(gm, shell_of(gm, parts, calls))
    reasons = {node.name: reason for node, reason in parts.reasons.items()}  # a copy of a node has its name
    bound, eager = bind_shell(shell, named, reasons)
    return Lowered(
        bound,
        "native",
        gathered([*((name, Ran(("native",), "native")) for name in native_ops(parts)), *eager]),
        notes(parts, built, seconds, team, released),
        NativeStep(shell, calls, reasons, built),
    )


def bind_shell(
    shell: GraphModule, named: Mapping[str, str], reasons: Mapping[str, str]
) -> tuple[GraphModule, list[tuple[str, Ran]]]:
    """What runs: kernels in place of graft's ops that stayed eager."""
    graph, eager = bind_kernels(shell, named, lambda node: Asker("native", lambda: reasons[node.name]))
    return GraphModule(shell, graph, class_name="NativeGraph"), eager


def source_of(parts: Split) -> Source:
    """The C++ of all regions."""
    regions = len(parts.regions)
    return emit(
        [region.program for region in parts.regions], f"One step, {regions} native region{'s' * (regions > 1)}."
    )


def check_device(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        tensor = tensor_val(node)
        if tensor is not None and tensor.device.type not in ("cpu", "meta"):
            raise UsageError(
                f"backend='native' compiles for the CPU, but {where(node)} is on {tensor.device}; load the model with"
                " device='cpu', or use backend='eager'"
            )


def shell_of(gm: GraphModule, parts: Split, calls: list[RegionCall]) -> Graph:
    """The graph with each region as one call, which stands where its last node did."""
    shell, table = Graph(), {}
    at = {last_of(region, gm): (region, call) for region, call in zip(parts.regions, calls, strict=True)}
    native = {node for region in parts.regions for node in region.nodes}
    for node in gm.graph.nodes:
        if node in at:
            region, call = at[node]
            result = shell.call_function(call, tuple(table[arg] for arg in region.inputs))
            for index, output in enumerate(region.outputs):
                table[output] = shell.call_function(getitem, (result, index))
                table[output].meta = dict(output.meta)
        elif node not in native:
            table[node] = shell.node_copy(node, table.__getitem__)
    shell.set_codegen(gm.graph._codegen)
    shell.eliminate_dead_code()
    return shell


def last_of(region: NativeRegion, gm: GraphModule) -> Node:
    """The last node that is not a part of a result, which may stand behind an eager one."""
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    own = [node for node in region.nodes if node.target is not getitem] or list(region.nodes)
    return max(own, key=order.__getitem__)


def native_ops(parts: Split) -> list[str]:
    specs = (spec_of(node) for region in parts.regions for node in region.nodes)
    return [f"graft::{spec.name}" for spec in specs if spec is not None]


def notes(parts: Split, built: Built, seconds: float, team: Threads, released: int) -> tuple[str, ...]:
    steps = sum(len(region.program.steps) for region in parts.regions)
    waits = sum(len(region.program.barriers) for region in parts.regions)
    how = f"compiled in {seconds:.1f} s" if built.compiled else "from the cache"
    said = [
        f"native: {steps} steps and {waits} barriers in {len(parts.regions)} regions, threads: {team.count},"
        f" {team.instructions}, {how}: {built.source}"
    ]
    said += [f"native: {built.note}"] if built.note else []
    kernels = {step.kernel.name for region in parts.regions for step in region.program.steps}
    if f"linear<{HALVES}>" in kernels:
        said.append(
            "native: bfloat16 weights are stored and multiplied as float16, which this CPU multiplies natively"
        )
    if released:
        said.append(f"native: {released} weights are packed, and the module's own were freed")
    reasons = Counter(f"{node.target}: {reason}" for node, reason in parts.reasons.items())
    said += [f"native: eager at {count} sites: {reason}" for reason, count in reasons.items()]
    return tuple(said)
