"""Stage 4, Inductor's IR and scheduler: what was fused with what, what was not and why, and what is copied."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._inductor.graph
import torch._inductor.ir
import torch._inductor.scheduler
from torch.fx import Graph, Node

from graft.ir.nodes import calls, is_op, source_line
from graft.stages.follow import leaf_names
from graft.stages.graphs import tensor_bytes
from graft.stages.needs import Reached, swapped
from graft.stages.origins import NEEDS as ORIGINS
from graft.stages.origins import computed_nodes
from graft.stages.story import CopyRecord, Refusal, ScheduledNode, SchedulingStage, StageGraph
from graft.stages.trace import current_graph

NEEDS = (
    *ORIGINS,
    "torch._inductor.scheduler:Scheduler.fuse_nodes",
    "torch._inductor.scheduler:Scheduler.can_fuse",
    "torch._inductor.scheduler:WhyNoFuse.__call__",
    "torch._inductor.scheduler:BaseSchedulerNode.get_read_write_buffer_accesses",
    "torch._inductor.ir:ExternKernel.copy_input",
    "torch._inductor.ir:Buffer",
    "torch._inductor.graph:GraphLowering.call_function",
    "torch._inductor.virtualized:V",
)
UNSAID = "the rules of the code generator do not allow it; it gives no reason"
ALLOWED = "allowed by themselves, and not done: it would have made a cycle with what else was fused, or did not pay"
aten = torch.ops.aten


@dataclass
class SeenScheduling:
    nodes: list[ScheduledNode] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    copies: list[CopyRecord] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    lowered: Node | None = None  # the last node whose own lowering is done; what follows is about its result


@contextmanager
def watch_scheduling(seen: SeenScheduling, reached: Reached) -> Iterator[None]:
    scheduler, ir = torch._inductor.scheduler, torch._inductor.ir
    with ExitStack() as stack:
        stack.enter_context(swapped(scheduler.Scheduler, "fuse_nodes", lambda f: fusing(f, seen, reached)))
        stack.enter_context(swapped(scheduler.Scheduler, "can_fuse", lambda f: comparing(f, seen)))
        stack.enter_context(swapped(scheduler.WhyNoFuse, "__call__", lambda f: refusing(f, seen)))
        stack.enter_context(swapped(ir.ExternKernel, "copy_input", lambda f: copying(f, seen)))
        stack.enter_context(
            swapped(torch._inductor.graph.GraphLowering, "call_function", lambda f: lowering(f, seen))
        )
        yield


def fusing(before: Callable[..., Any], seen: SeenScheduling, reached: Reached) -> Callable[..., Any]:
    def fuse_nodes(self: Any, nodes: list[Any]) -> list[Any]:
        graph = current_graph()
        reached.at(4, f"fusing {len(nodes)} nodes of graph {graph}")
        seen.before[graph] = seen.before.get(graph, 0) + moved(nodes)
        fused = before(self, nodes)
        seen.after[graph] = seen.after.get(graph, 0) + moved(fused)
        seen.nodes += [record(graph, node, group.get_name()) for group in fused for node in group.get_nodes()]
        reached.at(5, f"generating code for graph {graph}")
        return fused

    return fuse_nodes


def comparing(before: Callable[..., Any], seen: SeenScheduling) -> Callable[..., Any]:
    """Pairs that were refused without a word of the scheduler's own, and those that were not: some stay apart."""

    def can_fuse(self: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        told = len(seen.refusals)
        result = before(self, first, second, *args, **kwargs)
        if result or len(seen.refusals) == told:
            reason = ALLOWED if result else UNSAID
            seen.refusals.append(Refusal(current_graph(), first.get_name(), second.get_name(), reason))
        return result

    return can_fuse


def refusing(before: Callable[..., Any], seen: SeenScheduling) -> Callable[..., Any]:
    def why(self: Any, reason: str, *args: Any) -> Any:
        text = reason % args if args else reason
        seen.refusals.append(Refusal(current_graph(), self.name1, self.name2, re.sub(r"\s+", " ", text).strip()))
        return before(self, reason, *args)

    return why


def lowering(before: Callable[..., Any], seen: SeenScheduling) -> Callable[..., Any]:
    from torch._inductor.virtualized import V

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = before(self, *args, **kwargs)
        seen.lowered = getattr(V.graph, "current_node", None)
        return result

    return call_function


def copying(before: Callable[..., Any], seen: SeenScheduling) -> Callable[..., Any]:
    """A call that needs its argument in another layout gets a copy of it, and so does a result that is asked for in
    the layout of eager."""
    from torch._inductor.virtualized import V

    def copy_input(x: Any) -> Any:
        node = getattr(V.graph, "current_node", None)
        if isinstance(node, Node) and is_realized(x):
            told = "the result of {} is asked for in eager's layout", "{} needs its argument in another layout"
            reason = told[node is not seen.lowered].format(node.target)
            size = x.get_numel() * x.get_dtype().itemsize
            count = int(size) if str(size).isdigit() else str(size)
            seen.copies.append(CopyRecord(current_graph(), node.name, source_line(node), count, reason))
        return before(x)

    return copy_input


def is_realized(x: Any) -> bool:
    """In memory already. What is not is computed where the copy would be made, so nothing is copied."""
    while not isinstance(x, torch._inductor.ir.Buffer) and (inner := getattr(x, "data", None)) is not None:
        x = inner
    return isinstance(x, torch._inductor.ir.Buffer)


def moved(nodes: Sequence[Any]) -> int:
    return sum(map(group_bytes, nodes))


def group_bytes(group: Any) -> int:
    """Each buffer once, at most what one of the group's nodes touches of it; what stays inside the group is free.

    Inductor's own sum for a fused node takes whole buffers (an embedding's table), so fusion would look like a loss.
    """
    leaves = group.get_nodes()
    touched: dict[str, int] = {}
    for leaf in leaves:
        for name, count in leaf.get_read_write_buffer_accesses(include_reads=True, include_writes=True).items():
            touched[name] = max(touched.get(name, 0), int(count))
    inside = {leaf.get_name() for leaf in leaves}
    made = [buffer for leaf in leaves for buffer in leaf.get_outputs()]
    free = {one.get_name() for one in made if one.users and all(user.get_name() in inside for user in one.users)}
    return sum(count for name, count in touched.items() if name not in free)


def record(graph: str, node: Any, group: str) -> ScheduledNode:
    inner = node.node
    data = getattr(inner, "data", None)
    kind = type(data if data is not None else inner).__name__
    access = node.read_writes
    buffers = [tuple(dict.fromkeys(one.name for one in found)) for found in (access.reads, access.writes)]
    layout = layout_text(getattr(inner, "layout", None))
    return ScheduledNode(graph, node.get_name(), kind, computed_nodes(inner), group, layout, loops(node), *buffers)


def layout_text(layout: Any) -> str:
    """`FixedLayout float32[8, 8] strides [8, 1]`."""
    kind, size, dtype = type(layout).__name__, getattr(layout, "size", None), getattr(layout, "dtype", None)
    if size is None or dtype is None:  # of a call that gives nothing, or several things
        return kind
    sizes, strides = (", ".join(map(str, numbers)) for numbers in (size, getattr(layout, "stride", None) or ()))
    return f"{kind} {str(dtype).removeprefix('torch.')}[{sizes}] strides [{strides}]"


def loops(node: Any) -> str:
    """`8 × 16, reducing 32`."""
    ranges = [" × ".join(map(str, part)) for part in getattr(node, "_sizes", None) or ()]
    if not ranges:
        return ""
    outer, *inner = ranges
    return (outer or "1") + "".join(f", reducing {part}" for part in inner if part)


def fused_with(nodes: Sequence[ScheduledNode], graph: str) -> dict[str, set[str]]:
    """For each node of the graph, the nodes that are computed in the same group."""
    groups: dict[str, set[str]] = {}
    for node in nodes:
        if node.graph == graph:
            groups.setdefault(node.group, set()).update(node.nodes)
    return {name: members for members in groups.values() for name in members}


def clones_in(graph: Graph, number: str, made: set[str]) -> list[CopyRecord]:
    """Copies that stand in the last graph as calls: asked for by the program, or put there on the way. made: the
    names of the functional graph, which passes keep."""
    return [
        CopyRecord(number, node.name, source_line(node), tensor_bytes(node), clone_reason(node, made))
        for node in calls(graph)
        if is_op(node, aten.clone.default)
    ]


def clone_reason(node: Node, made: set[str]) -> str:
    original = node.meta.get("original_aten")
    if original is None or (made and node.name not in made):
        return "put in by a pass, so that a write does not reach it"
    if str(original) == str(aten.clone.default):
        return "in the program, too: clone(), contiguous(), or a reshape that cannot be a view"
    return f"part of {original}"


def pair_of(one: Refusal) -> Refusal:
    """Both orders are looked at; they are one pair."""
    return one if one.first <= one.second else replace(one, first=one.second, second=one.first)


def stayed_apart(one: Refusal, group: Mapping[tuple[str, str], str]) -> bool:
    """What was refused in one round may be fused in a later one, or by way of a third."""
    leaves = [name for side in (one.first, one.second) for name in leaf_names(side)]
    groups = {group.get((one.graph, name), name) for name in leaves}
    return len(groups) > 1


def scheduling_stage(
    seen: SeenScheduling,
    last: Mapping[str, Graph],
    writes: Sequence[CopyRecord],
    kernels: Mapping[tuple[str, str], str],
    functional: Sequence[StageGraph] = (),
) -> SchedulingStage:
    """last: the graphs after all passes. writes: copies of whole results into inputs. kernels: of (graph, node).
    functional: the graphs before them."""
    made = {graph.graph: {node.name for node in graph.nodes} for graph in functional}
    cloned = [copy for number, graph in last.items() for copy in clones_in(graph, number, made.get(number, set()))]
    copies = [replace(one, kernel=kernels.get((one.graph, one.node), "")) for one in (*cloned, *writes, *seen.copies)]
    told = Counter(pair_of(one) for one in seen.refusals)
    group = {(one.graph, one.name): one.group for one in seen.nodes}
    refusals = tuple(replace(one, times=times) for one, times in told.items() if stayed_apart(one, group))
    return SchedulingStage(
        nodes=tuple(seen.nodes), refusals=refusals, copies=tuple(dict.fromkeys(copies)),
        bytes_before=seen.before, bytes_after=seen.after,
    )  # fmt: skip
