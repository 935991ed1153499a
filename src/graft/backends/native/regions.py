"""Which nodes run natively: the graph in turns of native and eager regions, with the reason for each eager node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem

import torch
from torch.fx import GraphModule, Node

import graft.backends.native.ops  # noqa: F401
from graft.backends.eager import call_of, spec_of
from graft.backends.native.plan import Planner, RowSizes
from graft.backends.native.program import NotLowered, Program
from graft.ir.nodes import is_op, placeholders
from graft.ir.subgraph import inputs_of, outputs_of
from graft.ops import bind
from graft.ops.call import Asker

aten = torch.ops.aten
VIEWS = (
    aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int,
    aten.slice.Tensor, aten.to.dtype, aten.contiguous.default,
)  # fmt: skip


@dataclass(frozen=True)
class NativeRegion:
    """A run of nodes that becomes one C++ function; `inputs` and `outputs` are nodes of the graph."""

    program: Program
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True)
class Split:
    regions: tuple[NativeRegion, ...]
    reasons: Mapping[Node, str]  # of the nodes that stay eager


def split(gm: GraphModule, named: Mapping[str, str]) -> Split:
    """The native regions, in order. `named`: kernels that the configuration asks for, which run eagerly."""
    try:
        sizes = RowSizes.of(gm.graph)
    except NotLowered as reason:
        return Split((), {node: str(reason) for node in gm.graph.nodes if computes(node)})
    reasons = eager_nodes(gm, sizes, named)
    native = {node for node in gm.graph.nodes if computes(node)} - reasons.keys()
    regions = []
    for index, nodes in enumerate(runs(gm, reasons)):
        inputs, outputs = borders(nodes)
        planner = Planner(sizes, inputs, set(nodes), native)
        for node in nodes:
            planner.lower(node)
        regions.append(NativeRegion(planner.program(f"graft_region_{index}", outputs), tuple(nodes), inputs, outputs))
    return Split(tuple(regions), reasons)


def computes(node: Node) -> bool:
    """Sizes and transposed weights are no work: whoever needs one reads it from a shape, or packs it so."""
    return node.op == "call_function" and not is_op(node, aten.sym_size.int) and not is_turned_weight(node)


def is_turned_weight(node: Node) -> bool:
    return is_op(node, aten.transpose.int) and node.args[0].op == "get_attr"


def eager_nodes(gm: GraphModule, sizes: RowSizes, named: Mapping[str, str]) -> dict[Node, str]:
    """Tries every node; what comes out of an eager one is an input to the others."""
    work = [node for node in gm.graph.nodes if computes(node)]
    planner = Planner(sizes, placeholders(gm.graph), set(work), set(work))
    reasons: dict[Node, str] = {}
    for node in work:
        problem = native_problem(node, planner, named)
        if problem is not None:
            reasons[node] = problem
            planner.inputs.append(node)
    for node in reversed(work):  # a view that only eager nodes read is theirs
        users = [user for user in node.users if user.op != "output"]
        if node not in reasons and is_op(node, *VIEWS) and users and all(user in reasons for user in users):
            reasons[node] = "only eager nodes read it"
    return reasons


def native_problem(node: Node, planner: Planner, named: Mapping[str, str]) -> str | None:
    """Why a node stays eager, or None: the op's table chooses, and asks the planner for its native kernel."""
    spec = spec_of(node)
    if spec is None:
        return planner.problem(node)
    kernel = named.get(spec.name)
    if kernel not in (None, "native"):
        return f"the configuration names the kernel {kernel}"
    call = call_of(node, spec, Asker("native", lambda: planner.problem(node)))
    skipped = dict(bind(spec, call, kernel).ran.skipped)
    return skipped.get("native") if "native" in spec.by_name else f"there is no native kernel of {node.target}"


def runs(gm: GraphModule, reasons: Mapping[Node, str]) -> list[list[Node]]:
    """Native nodes between eager ones. The parts of a result stay with the node that makes it."""
    found: list[list[Node]] = []
    home: dict[Node, list[Node]] = {}
    open_run: list[Node] | None = None
    for node in gm.graph.nodes:
        if not computes(node):
            continue
        if node in reasons:
            open_run = None
            continue
        if is_op(node, getitem) and node.args[0] in home:
            run = home[node.args[0]]
        else:
            if open_run is None:
                open_run = []
                found.append(open_run)
            run = open_run
        run.append(node)
        home[node] = run
    return found


def borders(nodes: list[Node]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """What a run reads from outside, and what of it is read outside."""
    inside = set(nodes)
    inputs = tuple(arg for arg in inputs_of(nodes) if arg.op == "placeholder" or computes(arg))
    return inputs, tuple(node for node in outputs_of(nodes) if not is_parted(node, inside))


def is_parted(node: Node, inside: set[Node]) -> bool:
    """Its parts are read, never the whole."""
    return all(is_op(user, getitem) and user in inside for user in node.users)
