"""Every write of a graph that outlives the call: into an input or an attribute of the module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graft.ir.effects import alias_sources, is_maybe_view, mutated_args
from graft.ir.nodes import arg_values, is_op, outlives_call, tensor_val
from graft.ir.storage import storage_id

aten, ops = torch.ops.aten, torch.ops.graft

# put values at positions of argument 0; what they add up (accumulate, reduce) is no longer a plain write
PLACING = (
    aten.index_copy_.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten.index_fill_.int_Scalar,
    aten.index_fill_.int_Tensor,
    aten.scatter_.src,
    aten.scatter_.value,
)


@dataclass(frozen=True)
class Write:
    """`node` writes the memory of `owner`, a placeholder or an attribute, through its argument `into`.

    positional: a part is written, at a position: through a view of a part, or by index. Otherwise all of it may be.
    """

    node: Node
    owner: Node
    into: Node
    positional: bool


def state_writes(gm: GraphModule) -> list[Write]:
    """Every write into an input or an attribute, in graph order; one for each memory that a call writes."""
    found = []
    for node in gm.graph.nodes:
        for into in dict.fromkeys(mutated_args(node)):
            owner = owner_of(into)
            if outlives_call(owner):
                found.append(Write(node, owner, into, is_positional(node, into, owner)))
    return found


def owner_of(node: Node) -> Node:
    """The node that owns the memory; a `reshape` or its like that was seen to copy owns its result."""
    while sources := alias_sources(node):
        if is_maybe_view(node) and was_copied(node, sources[0]):
            break
        node = sources[0]
    return node


def was_copied(node: Node, source: Node) -> bool:
    """When the graph was captured, the two were in different memory. A value made later says nothing."""
    values = tensor_val(node), tensor_val(source)
    if values[0] is None or values[1] is None or "made_by" in node.meta or "made_by" in source.meta:
        return False
    result, given = storage_id(values[0]), storage_id(values[1])
    return result is not None and given is not None and result != given


def is_positional(node: Node, into: Node, owner: Node) -> bool:
    if is_op(node, *PLACING):
        return not any(a.name == "accumulate" and value for a, value in arg_values(node))
    rotating = ops.rope_kv_write.default, ops.rope_attention.default
    if is_op(node, ops.paged_attention.default, ops.paged_latent_attention.default, *rotating):
        return True
    part, whole = tensor_val(into), tensor_val(owner)
    # sizes compared by expression: a slice of a symbolic length counts as a part
    return part is not None and whole is not None and str(part.numel()) != str(whole.numel())
