"""Where in a cache a graph writes, and whether that position exists: checked before anything is written.

Eager notices a position beyond the cache late or never: `cache[:, :, p : p + 1] = x` writes nothing when p is the
length of the cache, and `index_copy_` fails after the caches of earlier layers are written. So what computes the
positions is copied out of the graph into a small one of its own that runs first, on copies of the counters it moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graft.base.errors import PositionError
from graft.ir.effects import address, is_mutating, mutated_args, written_value
from graft.ir.nodes import is_op, leaves, outlives_call, static_int, tensor_val, val, where
from graft.ir.streams import SIZES
from graft.memory.writes import Write, owner_of, state_writes

aten = torch.ops.aten
OPEN_END = 2**62  # a slice without an end has the largest int64
LARGEST_COUNTER = 4096  # elements of a tensor that is copied to compute positions
# (target, dim, index, …)
BY_INDEX = (
    aten.index_copy_.default,
    aten.index_add_.default,
    aten.index_reduce_.default,
    aten.index_fill_.int_Scalar,
    aten.index_fill_.int_Tensor,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_.reduce,
    aten.scatter_.value_reduce,
    aten.scatter_add_.default,
    aten.scatter_reduce_.two,
)


@dataclass(frozen=True)
class WritePosition:
    """One dim of a written tensor and what chooses the site in it: an index tensor, or the bounds of a slice."""

    into: Node  # the tensor before the index or the slice
    dim: int
    first: Any
    last: Any = None  # of a slice: its end
    negative: bool = False  # sites may count from the end


def sites(write: Write) -> Iterator[WritePosition]:
    """The dims in which a write goes to a site, from the views of its target and from its own index."""
    node = write.into
    while node is not write.owner:
        if is_op(node, aten.slice.Tensor):
            source, dim, start, end = (*node.args, None, None)[:4]
            last = OPEN_END if end is None or (static_int(end) or 0) > OPEN_END else end
            yield WritePosition(source, rank_dim(source, dim), start, last, negative=True)
        elif is_op(node, aten.select.int):
            source, dim, index = node.args
            yield WritePosition(source, rank_dim(source, dim), index, negative=True)
        if not node.args or not isinstance(node.args[0], Node):
            return
        node = node.args[0]
    into, call = write.into, write.node
    if is_op(call, *BY_INDEX):
        yield WritePosition(into, rank_dim(into, call.args[1]), call.args[2])
    elif is_op(call, aten.index_put_.default):
        for dim, index in enumerate(call.args[1]):
            if isinstance(index, Node) and getattr(val(index), "dtype", torch.bool) != torch.bool:
                yield WritePosition(into, dim, index, negative=True)


def rank_dim(node: Node, dim: int) -> int:
    tensor = tensor_val(node)
    return dim % tensor.dim() if tensor is not None and dim < 0 else dim


def written_dims(gm: GraphModule) -> dict[Node, set[int]]:
    """For each input that is written at sites chosen by the program: in which of its dims."""
    found: dict[Node, set[int]] = {}
    for write in state_writes(gm):
        if write.positional and write.owner.op == "placeholder":
            dims = {site.dim for site in sites(write) if site.into is write.owner}
            found.setdefault(write.owner, set()).update(dims)
    return {owner: dims for owner, dims in found.items() if dims}


@dataclass(frozen=True)
class Check:
    """One position of one write: what to say, and how to read the values that the small graph gives."""

    where: str
    name: str
    dim: int
    negative: bool

    def problem(self, first: Any, last: Any, size: int) -> str | None:
        if isinstance(first, torch.Tensor):
            if first.numel() == 0:
                return None
            low, high = (first.item(),) * 2 if first.numel() == 1 else map(int, torch.aminmax(first))
        elif last is None:
            low = high = int(first)
        else:
            return self.slice_problem(int(first or 0), int(last), size)
        if low >= (-size if self.negative else 0) and high < size:
            return None
        wrong = high if high >= size else low
        return f"{self.where} writes position {wrong} of {self.name}, which has {size} in dim {self.dim}"

    def slice_problem(self, start: int, end: int, size: int) -> str | None:
        if end >= OPEN_END or start < 0 or end < 0 or start >= end or end <= size:
            return None
        return (
            f"{self.where} writes positions {start} to {end - 1} of {self.name}, which has {size} in dim {self.dim}"
        )


@dataclass(frozen=True)
class PositionChecks:
    """The small graph, and what its results mean. `unchecked`: writes whose position is known too late, with why."""

    graph_module: GraphModule | None
    checks: tuple[Check, ...]
    unchecked: tuple[str, ...]

    def __call__(self, inputs: Sequence[Any]) -> None:
        """Raises PositionError for a site that does not exist; `inputs` are those of the graph, in its order."""
        if self.graph_module is None:
            return
        try:
            values = self.graph_module.forward(*inputs)
        except IndexError as error:  # a selection on the way to the site
            raise PositionError(str(error)) from error
        for index, check in enumerate(self.checks):
            problem = check.problem(*values[3 * index : 3 * index + 3])
            if problem:
                raise PositionError(problem)


def position_checks(gm: GraphModule, names: dict[Node, str]) -> PositionChecks:
    """Reads the positions of every write into state, except those that are proven by fixed sizes."""
    found: dict[tuple[Any, ...], tuple[WritePosition, Check]] = {}
    unchecked: list[str] = []
    needed: set[Node] = set()
    writes = state_writes(gm)
    for write in writes:
        for site in sites(write):
            tensor = tensor_val(site.into)
            if tensor is None or is_fixed(site, tensor) or site.last == OPEN_END:
                continue
            earlier = [other for other in writes if other.node < write.node]
            sources = computation([n for n in (site.first, site.last) if isinstance(n, Node)], earlier)
            name = names.get(write.owner, str(write.owner.target))
            if isinstance(sources, str):
                unchecked.append(f"{where(write.node)}: its position in {name} is not checked: {sources}")
                continue
            if static_int(tensor.shape[site.dim]) is None:
                sources |= views(site.into, write.owner)
            needed |= sources
            # keys and values of one layer are written at one position: one check is enough for both
            alike = (site.first, site.last, str(tensor.shape[site.dim]), site.negative)
            found.setdefault(alike, (site, Check(where(write.node), name, site.dim, site.negative)))
    if not found:
        return PositionChecks(None, (), tuple(dict.fromkeys(unchecked)))
    small = small_graph(gm, needed, [site for site, _ in found.values()])
    return PositionChecks(small, tuple(check for _, check in found.values()), tuple(dict.fromkeys(unchecked)))


def position_inputs(gm: GraphModule) -> list[Node]:
    """The inputs by whose values the module's own buffers are written: `at` of `cache.index_copy_(0, at, x)`.

    Sizes of an input are no values of it: a program that counts for itself how far it has come has none.
    """
    found: dict[Node, None] = {}
    for write in state_writes(gm):
        firsts = [site.first for site in sites(write) if isinstance(site.first, Node)]
        waiting = firsts if write.owner.op == "get_attr" else []
        seen: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node in seen or is_op(node, *SIZES):
                continue
            seen.add(node)
            if node.op == "placeholder":
                found[node] = None
            waiting.extend(node.all_input_nodes)
    return list(found)


def views(node: Node, owner: Node) -> set[Node]:
    """The views that lead from the owner of a memory to `node`."""
    found = {owner}
    while (node := written_value(node)) is not owner:
        found.add(node)
        node = node.args[0]
    return found


def is_fixed(site: WritePosition, tensor: torch.Tensor) -> bool:
    """Capture has seen these very numbers."""
    bounds = [site.first, site.last, tensor.shape[site.dim]]
    return all(bound is None or static_int(bound) is not None for bound in bounds)


def computation(results: list[Node], writes: list[Write]) -> set[Node] | str:
    """The nodes that compute `results` after `writes`, or why they cannot run on their own ahead of the graph."""
    needed: set[Node] = set()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        problem = node_problem(node)
        if problem:
            return problem
        needed.add(node)
        if is_op(node, *SIZES) and outlives_call(node.args[0]):
            needed.add(node.args[0])  # its size, not what is in it
        else:
            todo += node.all_input_nodes
        owner = owner_of(node)
        if outlives_call(owner):
            todo += [write.node for write in writes if write.owner is owner]
            if any(write.owner is not owner and same_memory(write.owner, owner) for write in writes):
                return f"%{owner.name} is written through another buffer of the same memory"
    return needed


def same_memory(left: Node, right: Node) -> bool:
    attributes = left.op == right.op == "get_attr"
    return attributes and address(left.graph, left) == address(right.graph, right)


def node_problem(node: Node) -> str | None:
    for item in leaves(val(node)):
        if not isinstance(item, torch.Tensor):
            continue
        if item.device.type != "cpu":
            return f"%{node.name} is on {item.device.type}, and reading it would wait for the device"
        if item.is_floating_point() or item.is_complex():
            return f"it is computed from %{node.name}, which is no integer"
        if is_mutating(node) and (static_int(item.numel()) or LARGEST_COUNTER + 1) > LARGEST_COUNTER:
            return f"%{node.name} changes a large tensor"
    return None


def small_graph(gm: GraphModule, needed: set[Node], wanted: Sequence[WritePosition]) -> GraphModule:
    """The needed nodes in their order, on copies of what they write; gives (first, last, size) for each site."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    written = {owner_of(leaf) for node in needed if is_mutating(node) for leaf in mutated_args(node)}

    def copied(node: Node) -> Node:
        """A tensor whose size alone is asked for is there without the writes into it."""
        return copies[node] if node in copies else copies[written_value(node)]

    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, copied)
    for node in [n for n in copies if n in written and outlives_call(n)]:
        with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_function")):
            fresh = graph.call_function(aten.clone.default, (copies[node],))
        copies[node].replace_all_uses_with(fresh, delete_user_cb=lambda user, fresh=fresh: user is not fresh)
        copies[node] = fresh
    results: list[Any] = []
    for site in wanted:
        tensor = tensor_val(site.into)
        size = tensor.shape[site.dim] if tensor is not None else 0
        if static_int(size) is None:
            size = graph.call_function(aten.sym_size.int, (copied(site.into), site.dim))
        results += [copies[n] if isinstance(n, Node) else n for n in (site.first, site.last)]
        results.append(size)
    graph.output(results)
    return GraphModule(gm, graph, class_name="Positions")
