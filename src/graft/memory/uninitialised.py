"""Memory that nobody has written (`torch.empty`) and that reaches a result or state: named, since it differs by run.

    %e = aten.empty([4]);  copy_(%e[:3], %x);  return %e       the last element is whatever lay there

What is written is followed element by element where sizes are numbers; otherwise only a write of all of it counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graft.ir.branches import is_control_flow
from graft.ir.edit import attribute
from graft.ir.effects import alias_sources, is_mutating, mutated_args, storage_root
from graft.ir.nodes import (
    OpOverload,
    is_op,
    leaves,
    options_of,
    outlives_call,
    output_node,
    same_sizes,
    schema_of,
    tensor_val,
    where,
)

aten = torch.ops.aten
EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
# write all of their first argument whatever it held; `out=` arguments are written so as well
WRITES_ALL = frozenset(
    f"aten::{name}_"
    for name in (
        *("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential", "geometric"),
        *("cauchy", "log_normal"),
    )
) | {"aten::_foreach_copy_", "aten::_foreach_zero_"}
# write parts of it, at positions of which the graph knows nothing
WRITES_SOME = frozenset(f"aten::{n}_" for n in ("index_put", "index_copy", "index_fill", "scatter", "masked_fill"))
SEEDS = ("rng_state", "philox_seed", "philox_offset")  # results of attention: what its random numbers begin with
MOST_ELEMENTS = 1 << 22  # of a mask; larger memory counts as written only where a write is of all of it


@dataclass
class Allocation:
    """One allocation, and which of its elements hold values that somebody computed from written ones."""

    node: Node
    written: torch.Tensor | None  # None: sizes are symbols, or it is very large
    whole: bool = False
    by_position: bool = False

    def part(self, node: Node) -> torch.Tensor | None:
        """The elements that a view of it is of; None where that is not known."""
        tensor = tensor_val(node)
        if self.written is None or tensor is None:
            return None
        return self.written.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def complete(self, node: Node) -> bool:
        """Whether all that a view of it shows is written."""
        part = self.part(node)
        return self.whole if part is None else bool(part.all())

    def write(self, into: Node, clean: bool) -> None:
        tensor, own = tensor_val(into), tensor_val(self.node)
        if tensor is not None and own is not None and same_sizes(tensor.shape, own.shape):
            self.whole = clean
        self.whole &= clean
        if (part := self.part(into)) is not None:
            part.fill_(clean)

    def reason(self) -> str:
        if self.by_position:
            return "of which parts are written, at positions that are known at run time only"
        some = self.written is not None and bool(self.written.any())
        return "of which only a part is written" if some else "which nothing has written"


def uninitialised_notes(gm: GraphModule) -> tuple[str, ...]:
    """A note for each result and each state that may hold memory which was never written."""
    notes, results = follow(gm)
    notes += [f"result {index} holds values of {told(source)}" for index, source in results.items()]
    return tuple(f"uninitialised memory: {note}" for note in dict.fromkeys(notes))


def follow(gm: GraphModule) -> tuple[list[str], dict[int, Allocation]]:
    """What is written into state, and which results hold such memory."""
    made = {node: allocation(node) for node in gm.graph.nodes if name_of(node) in EMPTY or unwritten_seed(node)}
    memories = {node: memory for node, memory in made.items() if memory is not None}
    tainted: dict[Node, Allocation] = {}  # values that were computed from such memory
    notes: list[str] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or node in made:
            continue
        if (grown := resized(node, memories)) is not None:
            memories[storage_root(node)] = grown
            continue
        source = next(read_from(node, memories, tainted), None) or next(made_inside(gm, node), None)
        for into in mutated_args(node):
            root = storage_root(into)
            if root in memories:
                follow_write(node, into, memories[root], source)
            elif source is not None:
                tainted[root] = source
            if source is not None and outlives_call(root):
                notes.append(f"{where(node)} writes values of {told(source)} into {root.target}")
        if source is not None and not is_mutating(node):
            tainted[node] = source
    found = ((i, held(leaf, memories, tainted)) for i, leaf in enumerate(result_leaves(gm)) if isinstance(leaf, Node))
    return notes, {index: source for index, source in found if source is not None}


def result_leaves(gm: GraphModule) -> list[Any]:
    return list(leaves(output_node(gm.graph).args))


def made_inside(gm: GraphModule, node: Node) -> Iterator[Allocation]:
    """What a branch or body that the call runs gives back without having written it."""
    if is_control_flow(node):
        for argument in node.all_input_nodes:
            inner = attribute(gm, str(argument.target)) if argument.op == "get_attr" else None
            if isinstance(inner, GraphModule):
                yield from follow(inner)[1].values()


def unwritten_seed(node: Node) -> bool:
    """Whether it is the state of random numbers of an attention that has sampled none."""
    call = node.args[0] if is_op(node, getitem) else None
    return isinstance(call, Node) and node.args[1] in seed_results(call) and options_of(call).get("dropout_p") == 0


def seed_results(call: Node) -> set[int]:
    """Of a call, which results are the state of its random numbers."""
    schema = schema_of(call)
    return set() if schema is None else {i for i, result in enumerate(schema.returns) if result.name in SEEDS}


def resized(node: Node, memories: dict[Node, Allocation]) -> Allocation | None:
    """The memory that `resize_` leaves, where it has more elements than before; the new ones are nobody's."""
    if not is_op(node, aten.resize_.default):
        return None
    before, after = tensor_val(node.args[0]), tensor_val(node)
    if before is None or after is None or statically_known_true(after.numel() <= before.numel()):
        return None
    memory = allocation(node)
    root = storage_root(node)
    if memory is not None and memory.written is not None and isinstance(before.numel(), int):
        known = memories[root].written if root in memories else torch.ones(before.numel(), dtype=torch.bool)
        if known is not None:
            memory.written[: len(known)] = known
    return memory


def told(memory: Allocation) -> str:
    return f"{where(memory.node)}, {memory.reason()}"


def name_of(node: Node) -> str:
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def allocation(node: Node) -> Allocation | None:
    tensor = tensor_val(node)
    if tensor is None:
        return None
    sizes = [*tensor.shape, *tensor.stride()]
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return Allocation(node, None)
    if tensor.numel() == 0:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if extent > MOST_ELEMENTS:
        return Allocation(node, None)
    written = torch.ones(extent, dtype=torch.bool)
    written.as_strided(tensor.shape, tensor.stride()).fill_(False)  # gaps between elements are nobody's
    return Allocation(node, written)


def read_from(node: Node, memories: dict[Node, Allocation], tainted: dict[Node, Allocation]) -> Iterator[Allocation]:
    """The unwritten memory that a call reads the values of."""
    name = name_of(node).removeprefix("aten::")
    if name.endswith("_like") or name.startswith(("new_", "sym_")) or is_view(node):
        return
    overwritten = overwritten_args(node)
    for argument in node.all_input_nodes:
        if argument not in overwritten and (memory := held(argument, memories, tainted)) is not None:
            yield memory


def held(node: Node, memories: dict[Node, Allocation], tainted: dict[Node, Allocation]) -> Allocation | None:
    root = storage_root(node)
    if root in memories:
        return None if memories[root].complete(node) else memories[root]
    return tainted.get(node) or tainted.get(root)


def is_view(node: Node) -> bool:
    return bool(alias_sources(node)) and not is_mutating(node)


def overwritten_args(node: Node) -> list[Node]:
    """Arguments that the call writes and whose old values it does not read."""
    name = name_of(node)
    if name in WRITES_ALL or (name in WRITES_SOME and not accumulates(node)):
        return [leaf for leaf in leaves(node.args[0]) if isinstance(leaf, Node)]
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
        outs = [argument.name for argument in node.target._schema.arguments if argument.is_out]
        return [leaf for name in outs for leaf in leaves(node.kwargs.get(name)) if isinstance(leaf, Node)]
    return []


def accumulates(node: Node) -> bool:
    return is_op(node, aten.index_put_.default) and (node.args[3:4] == (True,) or bool(node.kwargs.get("accumulate")))


def follow_write(node: Node, into: Node, memory: Allocation, source: Allocation | None) -> None:
    if into not in overwritten_args(node):
        pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
        if source is not None and not (source is memory and pointwise):
            memory.write(into, clean=False)
    elif name_of(node) not in WRITES_SOME:
        memory.write(into, clean=source is None)
    elif source is not None:
        memory.write(into, clean=False)
    else:
        memory.by_position = True
