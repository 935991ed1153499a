"""One-element buffers that a program writes, in an AOTInductor graph.

There a buffer is an attribute of the graph, and Inductor's constant folding takes an attribute of one element for a
number, whoever writes it (torch 2.11 to 2.13, stock AOTInductor as well): the counter of a cache goes from 0 to 1 at
every call.

    before:  %next = aten.add(%steps, 1); aten.copy_(%steps, %next)                     becomes copy_(%steps, 1)
    after:   %read = aten.select(%steps, 0, 0).view([1]); %next = aten.add(%read, 1); …   select is not folded

Inductor reads through the views, so they cost nothing.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from graft.ir.edit import abstract_call, attribute
from graft.ir.effects import mutated_roots
from graft.ir.nodes import val

aten = torch.ops.aten


def keep_counters(graph: Graph) -> int:
    """Puts views that are not folded between written one-element buffers and their readers; gives how many."""
    owner = graph.owning_module
    if owner is None:
        return 0
    written = mutated_roots(graph)
    counters = [node for node in graph.find_nodes(op="get_attr") if node in written and is_one_element(node)]
    for node in counters:
        read_through_select(graph, node, tuple(attribute(owner, str(node.target)).shape))
    return len(counters)


def is_one_element(node: Node) -> bool:
    tensor = attribute(node.graph.owning_module, str(node.target))
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel() == 1


def read_through_select(graph: Graph, node: Node, shape: tuple[int, ...]) -> None:
    """Writes keep the buffer itself: in this graph they are `copy_` behind all that reads it."""
    writes = [user for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
    made: list[Node] = []
    read = node
    first = (aten.repeat.default, [2])  # of a buffer without dims: Inductor folds every view of it, and has no select
    for target, *args in (*([] if shape else [first]), (aten.select.int, 0, 0), (aten.view.default, list(shape))):
        with graph.inserting_after(read):
            read = graph.call_function(target, (read, *args))
        made.append(read)
    node.replace_all_uses_with(read, delete_user_cb=lambda user: user not in writes and user is not made[0])
    if val(node) is not None:
        for new in made:
            new.meta["val"] = abstract_call(new)
