"""Stage 2, AOTAutograd: the functional graph, what ops were taken apart into, and what became of each write."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.compile_fx
from torch.fx import Graph, GraphModule, Node

from graft.backends.inductor import reset_compiler
from graft.backends.inductor_caches import without_caches
from graft.ir.effects import mutated_args, storage_root
from graft.ir.nodes import calls, is_op, leaves, source_line
from graft.stages.graphs import record_graph, tensor_bytes
from graft.stages.needs import Reached, swapped
from graft.stages.story import Decomposition, FunctionalStage, Mutation, StageGraph
from graft.stages.trace import current_graph

NEEDS = (
    "torch._inductor.compile_fx:_recursive_joint_graph_passes",
    "torch._dynamo.backends.common:aot_autograd",
    "torch._functorch.aot_autograd:make_boxed_func",
)
FUNCTIONALIZED = ("auto_functionalized", "auto_functionalized_v2")
aten = torch.ops.aten


@dataclass(frozen=True)
class InputWrite:
    """A write in the functional graph: to which input, by which op."""

    graph: str
    written: str
    by: str
    line: str
    local: bool = False  # made in the graph itself


@dataclass
class SeenFunctional:
    graphs: list[StageGraph] = field(default_factory=list)
    whole: list[StageGraph] = field(default_factory=list)
    writes: list[InputWrite] = field(default_factory=list)


@contextmanager
def watch_functional(seen: SeenFunctional, reached: Reached) -> Iterator[None]:
    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def joint_passes(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
            if all(
                one.graph != current_graph() for one in seen.graphs
            ):  # passes on inner graphs come through here, too
                seen.graphs.append(record_graph(gm.graph, current_graph()))
                seen.writes += writes_of(gm.graph, current_graph())
            reached.at(3, f"joint passes on graph {current_graph()}")
            return before(gm, *args, **kwargs)

        return joint_passes

    with swapped(torch._inductor.compile_fx, "_recursive_joint_graph_passes", make):
        yield


def writes_of(graph: Graph, number: str) -> list[InputWrite]:
    """`copy_` into an input at the end of the graph, and calls of mutating ops that were made functional: what those
    write and the program was not given is told by them, what it was given by its `copy_`."""
    found = []
    for node in calls(graph):
        if is_op(node, aten.copy_.default) and isinstance(node.args[0], Node):
            value = node.args[1]
            maker = functionalized(value) if isinstance(value, Node) else None
            by = node_op(maker) if maker is not None else str(getattr(value, "target", ""))
            line = source_line(value) if isinstance(value, Node) else source_line(node)
            found.append(InputWrite(number, node.args[0].name, by.removesuffix(".default"), line))
        elif is_functionalized(node):
            owned = [one for one in written_bases(node) if storage_root(one).op != "placeholder"]
            by, line = node_op(node).removesuffix(".default"), source_line(node)
            found += [InputWrite(number, first_made(one).name, by, line, local=True) for one in owned]
        else:
            found += [
                InputWrite(number, storage_root(one).name, str(node.target), source_line(node))
                for one in mutated_args(node)
            ]
    return found  # fmt: skip


def is_functionalized(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in FUNCTIONALIZED


def functionalized(value: Node) -> Node | None:
    """The call of an op that was made functional, of which this is what it wrote."""
    source = value.args[0] if is_op(value, operator.getitem) else None
    return source if isinstance(source, Node) and is_functionalized(source) else None


def first_made(value: Node) -> Node:
    """What several ops write one after the other is one buffer, and has the name that it was made by."""
    while (maker := functionalized(value)) is not None:
        bases = written_bases(maker)
        value = bases[min(int(value.args[1]) - returned(maker), len(bases) - 1)]  # type: ignore[arg-type]
    return value


def returned(maker: Node) -> int:
    """How many results of the op itself stand before what it wrote; an op without has one None."""
    return max(1, len(maker.args[0]._schema.returns))  # type: ignore[union-attr]


def node_op(node: Node) -> str:
    return str(node.args[0])


def written_bases(node: Node) -> list[Node]:
    """Version 2 lists them; version 1 takes them as the arguments that the op's schema says."""
    bases = node.kwargs.get("_all_bases")
    if bases is None:
        schema = node.args[0]._schema.arguments  # type: ignore[union-attr]
        bases = [node.kwargs.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return [one for one in leaves(bases) if isinstance(one, Node)]


@dataclass(frozen=True)
class Fate:
    """node, line: of the copy, where there is one."""

    text: str
    copied: int | str = 0
    node: str = ""
    line: str = ""


def fates(graph: Graph, kernels: Mapping[str, set[str]]) -> dict[str, Fate]:
    """What the last graph does to each input that it writes. kernels: for each node, the nodes fused with it."""
    found: dict[str, Fate] = {}
    for node in calls(graph):
        for one in mutated_args(node):
            root = storage_root(one)
            if root.op != "placeholder" or root.name in found:
                continue
            found[root.name] = fate_of(node, root, kernels)
    return found


def op_fates(graph: Graph, made: set[str]) -> dict[tuple[str, str], list[Fate]]:
    """What calls of mutating ops do in the last graph to what was made in it, by op and line. made: names of the
    functional graph; a clone that is not among them was put in by a pass."""
    found: dict[tuple[str, str], list[Fate]] = {}
    for node in calls(graph):
        for one in mutated_args(node) if not is_op(node, aten.copy_.default) else []:
            root = storage_root(one)
            if root.op == "placeholder":
                continue
            fate = Fate(f"written in place by %{node.name}")
            if is_op(root, aten.clone.default) and root.name not in made:
                fate = Fate(f"%{node.name} writes to a copy, %{root.name}", tensor_bytes(root))
            found.setdefault((str(node.target).removesuffix(".default"), source_line(node)), []).append(fate)
    return found


def fate_of(node: Node, root: Node, kernels: Mapping[str, set[str]]) -> Fate:
    if not is_op(node, aten.copy_.default):
        return Fate(f"written in place by %{node.name} ({node.target})")
    value = node.args[1]
    if not isinstance(value, Node):
        return Fate(f"filled by %{node.name}")
    if storage_root(value) is root:
        return Fate(f"written in place; %{node.name} copies nothing")
    together = kernels.get(node.name)
    if together is not None and computes(value, together):
        return Fate(f"written in place by the kernel that computes %{value.name}")
    return Fate(f"%{value.name} is copied into it", tensor_bytes(root), node.name, source_line(node))


def computes(value: Node, together: set[str]) -> bool:
    """Whether `value`, or what it is a view of, is computed where the copy is, not just read there."""
    return value.name in together or (
        storage_root(value).op != "placeholder" and storage_root(value).name in together
    )


def functional_stage(
    seen: SeenFunctional, ends: Mapping[str, Mapping[str, Fate]], last: Mapping[str, Graph]
) -> FunctionalStage:
    """ends: by graph, what became of its writes. last: the graphs after all passes."""
    mutations = []
    names = {graph.graph: {node.name for node in graph.nodes} for graph in seen.graphs}
    local = {number: op_fates(graph, names.get(number, set())) for number, graph in last.items()}
    for write in seen.writes:
        unknown = Fate("no later stage saw this graph")
        fate = ends.get(write.graph, {}).get(write.written, Fate("not in the last graph: it was not needed"))
        fate = fate if write.graph in ends else unknown
        if write.local and write.graph in ends:
            told = local.get(write.graph, {}).get((write.by, write.line), [])
            fate = told.pop(0) if told else Fate("not in the last graph: it was not needed")
        mutations.append(Mutation(write.graph, write.written, write.by, write.line, fate.text, fate.copied))
    found = [one for graph in seen.graphs for one in decompositions_of(graph)]
    return FunctionalStage("", tuple(seen.graphs), tuple(seen.whole), tuple(found), tuple(dict.fromkeys(mutations)))


def decompositions_of(graph: StageGraph) -> list[Decomposition]:
    """Nodes that remember another op than they are, by what they came from: silu → neg, exp, add, div."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for node in graph.nodes:
        if node.op in ("operator.getitem", "get_attr"):  # a result of what stays whole; what it is given
            continue
        if node.original and node.original.split(".")[:2] != node.op.split(".")[:2]:
            groups.setdefault((node.original, node.sources), []).append(node.op)
    kinds = Counter((op, tuple(into)) for (op, _), into in groups.items())
    return [Decomposition(graph.graph, op, into, times) for (op, into), times in kinds.items()]


def trace_whole(
    seen: SeenFunctional, function: Callable[..., Any], args: Sequence[Any], dynamic: bool | None
) -> None:
    """The functional graph with its ops still whole: the function once more, as far as AOTAutograd alone."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def lower(gm: GraphModule, _inputs: Any) -> Any:
        seen.whole.append(record_graph(gm.graph, current_graph()))
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=lower, inference_compiler=lower, decompositions={}, keep_inference_input_mutations=True
    )
    reset_compiler()
    try:
        with without_caches():
            torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    finally:
        reset_compiler()
