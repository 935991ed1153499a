"""Reads experts that all compute every token in one batched GEMM, and are weighed by their shares [n, e].

gpt-oss:  y = sum((bmm(act(bmm(x, gate_up)), down)) * shares^T, 0), x repeated for every expert
Llama 4:  y = sum(bmm(act(bmm(x * shares^T, gate_up)), down), 0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graft.ir.nodes import is_op, static_int, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.library.moe.mlp import Mlp, read_mlp
from graft.passes.library.moe.routing import Routing
from graft.passes.walk import GraphWalk, readers_text, require

aten = torch.ops.aten
VIEWS = (aten.reshape.default, aten.view.default, aten.unsqueeze.default)


@dataclass(frozen=True)
class Dense:
    x: Node
    mlp: Mlp
    result: Node
    weigh_input: bool
    sizes: tuple[Any, ...] | None  # of the result, where it is not [n, d]


def read_dense(walk: GraphWalk, routing: Routing) -> Dense:
    shares = routing.shares
    assert shares is not None
    transposed = walk.reader(shares, aten.transpose.int)
    column = transposed
    while (views := [user for user in column.users if is_op(user, *VIEWS)]) and len(column.users) == 1:
        column = walk.take(views[0])
    one_each = static_int(tensor_of(column).shape[-1]) == 1
    require(one_each, column, f"{where(column)} is not one share for each expert and token")
    weighed = walk.reader(column, aten.mul.Tensor)
    other = weighed.args[1] if weighed.args[0] is column else weighed.args[0]
    total = read_total(walk, weighed, routing)
    inside = total.args[0] is weighed
    out, sizes = strip(walk, other if inside else total.args[0])
    mlp = read_mlp(walk, out, total)
    require(
        mlp.down.weight.expert is None and tensor_of(out).dim() == 3,
        total,
        f"{where(total)} does not add up what experts gave in one batched GEMM",
    )
    if inside:
        return Dense(read_repeated(walk, mlp.x, total, routing), mlp, total, False, sizes)
    rows, _ = strip(walk, mlp.x)
    require(rows is weighed, total, f"what goes into the experts of {where(total)} is not weighed by {where(shares)}")
    return Dense(read_repeated(walk, other, weighed, routing), mlp, total, True, sizes)


def read_total(walk: GraphWalk, weighed: Node, routing: Routing) -> Node:
    """The sum over experts: it reads what was weighed, or what the experts made of it."""
    queue, seen = [weighed], {weighed}
    for node in queue:
        if is_op(node, aten.sum.dim_IntList) and node is not weighed:
            source = tensor_of(node.args[0])
            over = node.args[1:] == ([-source.dim()],) and not node.kwargs
            fits = over and static_int(source.shape[0]) == routing.experts
            require(fits, node, f"{where(node)} is not the sum over {routing.experts} experts")
            return walk.take(node)
        fresh = [user for user in node.users if user not in seen and user.op == "call_function"]
        queue += fresh
        seen |= set(fresh)
    raise Refused(weighed, f"{where(weighed)} is read by {readers_text(weighed)}, and no sum over experts follows")


def strip(walk: GraphWalk, value: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """Steps over reshapes; the sizes of the last one, less the experts."""
    sizes = None
    while is_op(value, aten.reshape.default, aten.view.default):
        sizes = tuple(value.args[1][1:]) if sizes is None else sizes
        value = walk.take(value).args[0]
    return value, sizes


def read_repeated(walk: GraphWalk, rows: Any, reader: Node, routing: Routing) -> Node:
    """x repeated for every expert: x."""
    rows, _ = strip(walk, rows)
    e = routing.experts
    if is_op(rows, aten.repeat.default) and rows.args[1] in ([e, 1], [e, 1, 1]):
        source = walk.take(rows).args[0]
    elif is_op(rows, aten.expand.default) and list(rows.args[1])[:1] == [e]:
        source = walk.call(walk.take(rows).args[0], rows, aten.unsqueeze.default)
        require(source.args[1] == -3, source, f"{where(source)} is not x once for every expert")
        source = source.args[0]
    else:
        source = rows  # a GEMM with [e, …] repeats it by itself
    while is_op(source, aten.unsqueeze.default) and source.args[1] == -3:
        source = walk.take(source).args[0]
    fits = isinstance(source, Node) and tensor_of(source).dim() == 2
    require(fits, reader, f"{where(reader)} does not read [n, d] rows, repeated for {e} experts")
    return source
