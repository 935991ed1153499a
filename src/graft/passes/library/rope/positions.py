"""Values that a graph computes from positions and constants: that each position stands for itself, and what they are
at given positions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from graft.ir.canonical.normal_form import is_random
from graft.ir.edit import attribute
from graft.ir.effects import is_mutating
from graft.ir.nodes import is_op, leaves, module_path, options_of, static_int, tensor_of, tensor_val, val, where
from graft.ir.patterns.match import Refused
from graft.passes.walk import require

aten = torch.ops.aten
SIZE = aten.sym_size.int
# of each element by itself, broadcast or not
ELEMENTWISE = frozenset(
    {aten.to.dtype, aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.neg.default,
     aten.cos.default, aten.sin.default, aten.clone.default}
)  # fmt: skip
# along one dim, which must not be that of the positions
ALONG = frozenset(
    {aten.cat.default, aten.stack.default, aten.repeat_interleave.self_int, aten.slice.Tensor, aten.select.int}
)
RESHAPES = (aten.reshape.default, aten.flatten.using_ints)
MOVES = frozenset({aten.unsqueeze.default, aten.transpose.int, aten.expand.default, *RESHAPES})
RESIZES = frozenset({aten.expand.default, aten.reshape.default})  # may be given sizes that are known when it runs


@dataclass(frozen=True)
class Computed:
    """A value that follows from `positions` [b, s]; `nodes` compute it, in the order of the graph.

    It is [b, s, d], or with a dim for heads that it is broadcast over [b, 1, s, d].
    """

    result: Node
    positions: Node
    nodes: tuple[Node, ...]
    heads: bool

    def at(self, gm: GraphModule, positions: torch.Tensor) -> torch.Tensor:
        """positions: [b, s] → [b, s, d], the dim for heads left out."""
        sizes = {
            str(size): given for size, given in zip(tensor_of(self.positions).shape, positions.shape, strict=True)
        }
        values: dict[Node, Any] = {self.positions: positions}
        with torch.no_grad():
            for node in self.nodes:
                if node.op == "get_attr":
                    values[node] = attribute(gm, str(node.target))
                elif is_op(node, SIZE):
                    values[node] = sizes[str(val(node))]
                elif node is not self.positions:
                    args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
                    values[node] = node.target(*args, **kwargs)
        result = values[self.result].detach()
        return result[:, 0] if self.heads else result

    def owner(self) -> str:
        """The module that computes it, as a prefix of names."""
        path = module_path(self.result)
        return f"{path}." if path else "rope."


def computed_from_positions(result: Node, mutated: Collection[Node]) -> Computed:
    """What computes `result` from one input of positions alone, each position by itself; Refused where not so."""
    nodes = sorted(ancestors(result))
    inputs = [node for node in nodes if node.op == "placeholder" and not is_size_source(node, nodes)]
    require(len(inputs) == 1, result, f"{where(result)} is computed from {names(inputs)}, not from positions alone")
    (positions,) = inputs
    kind = tensor_of(positions)
    whole = not kind.is_floating_point() and kind.dim() == 2
    require(whole, positions, f"{where(positions)} is {kind.dtype} of {kind.dim()} dims, not positions [b, s]")
    sizes = [str(size) for size in kind.shape]
    open_sizes = all(static_int(size) is None for size in kind.shape) and sizes[0] != sizes[1]
    require(open_sizes, positions, f"the sizes {sizes} of {where(positions)} are fixed, so they name no dim")
    varying = {positions}
    kept = [node for node in nodes if node.op != "placeholder" or node is positions]
    for node in kept:
        if node in mutated:
            raise Refused(node, f"{where(node)} is written by the graph")
        if node is positions or node.op == "get_attr":
            continue
        if is_op(node, SIZE):
            require(str(val(node)) in sizes, node, f"{where(node)} is a size that the positions do not have")
        elif any(source in varying for source in node.all_input_nodes):
            check_each_by_itself(node, varying, sizes)
            varying.add(node)
        else:
            check_constant(node, sizes)
    shape = [str(size) for size in tensor_of(result).shape]
    heads = shape[:-1] == [sizes[0], "1", sizes[1]]
    fits = (heads or shape[:-1] == sizes) and static_int(tensor_of(result).shape[-1]) is not None
    require(fits, result, f"{where(result)} has the shape {shape}, not {[*sizes, 'd']}")
    return Computed(result, positions, tuple(kept), heads)


def ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def is_size_source(node: Node, nodes: list[Node]) -> bool:
    """An input of which only sizes are read here."""
    readers = [user for user in node.users if user in nodes]
    return bool(readers) and all(is_op(user, SIZE) for user in readers)


def names(nodes: list[Node]) -> str:
    return " and ".join(f"%{node.name}" for node in nodes) or "constants"


def check_constant(node: Node, sizes: list[str]) -> None:
    """A call that no position reaches gives the same in every call of the graph."""
    require(not is_random(node) and not is_mutating(node), node, f"{where(node)} is not the same in every call")
    sized = [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(val(leaf), torch.SymInt)]
    require(not sized or node.target in RESIZES, node, f"{where(node)} depends on the number of tokens")
    made = tensor_val(node)
    require(made is not None, node, f"{where(node)} is not one tensor")
    tokens = sizes[1] in [str(size) for size in tensor_of(node).shape]
    require(not tokens, node, f"{where(node)} has a value for each slot of the batch, whatever its position")


def check_each_by_itself(node: Node, varying: Collection[Node], sizes: list[str]) -> None:
    """The call computes what it gives for a position from that position alone."""
    require(tensor_val(node) is not None, node, f"{where(node)} is not one tensor")
    reached = [source for source in node.all_input_nodes if source in varying]
    if node.target in ELEMENTWISE:
        sources = {tuple(from_right(source, sizes)) for source in (*reached, node)}
        require(len(sources) == 1, node, f"{where(node)} pairs positions with each other")
        scalars = [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(val(leaf), torch.SymInt)]
        require(not scalars, node, f"{where(node)} depends on the number of tokens")
    elif node.target in ALONG:
        options = options_of(node)
        rank = tensor_of(reached[0]).dim() + is_op(node, aten.stack.default)
        left = options["dim"] % rank
        dims = from_left(reached[0], sizes)
        require(left > max(dims), node, f"{where(node)} works along a dim of the positions")
    elif is_op(node, aten.matmul.default):
        check_matmul(node, varying, sizes)
    elif node.target in MOVES:
        check_move(node, reached[0], sizes)
    else:
        raise Refused(node, f"{where(node)} calls {node.target}, which may mix positions")


def from_left(node: Node, sizes: list[str]) -> list[int]:
    """The dims of a value that are those of the positions: batch and tokens."""
    shape = [str(size) for size in tensor_of(node).shape]
    require(
        all(shape.count(size) == 1 for size in sizes),
        node,
        f"{where(node)} has the shape {shape}, not one dim for each of {sizes}",
    )
    return [shape.index(size) for size in sizes]


def from_right(node: Node, sizes: list[str]) -> list[int]:
    return [dim - tensor_of(node).dim() for dim in from_left(node, sizes)]


def check_matmul(node: Node, varying: Collection[Node], sizes: list[str]) -> None:
    """Frequencies [b, d, 1] by positions [b, 1, s], or the other way round: no dim of the positions is summed."""
    left, right = node.args[:2]
    both = left in varying and right in varying
    require(not both, node, f"{where(node)} multiplies positions with each other")
    summed = -1 if left in varying else -2
    source = left if left in varying else right
    require(tensor_of(source).dim() > 2, node, f"{where(node)} multiplies a value of {tensor_of(source).dim()} dims")
    require(summed not in from_right(source, sizes), node, f"{where(node)} sums over positions")


def check_move(node: Node, source: Node, sizes: list[str]) -> None:
    """Views keep the two dims of the positions; a reshape may only change what comes after them."""
    dims = from_left(node, sizes)
    if is_op(node, *RESHAPES):
        before, after = ([str(size) for size in tensor_of(n).shape[: max(dims) + 1]] for n in (source, node))
        require(before == after, node, f"{where(node)} reshapes the dims of the positions")
