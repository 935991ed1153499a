"""Reads the experts of a mixture, in either of the forms in which Hugging Face's models can be captured.

grouped_mm: rows sorted by expert, one product a group.  batched_mm: a matrix gathered for every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graft.graph.nodes import arg_values, is_op, same_sizes, tensor_of, where
from graft.graph.text import op_text, target_text
from graft.transforms.moe_routing import Routing
from graft.transforms.walk import NoFit, Walk, expect, readers_text, require, unexpected

aten, ops = torch.ops.aten, torch.ops.graft
GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback")  # by name: the second comes with transformers


@dataclass(frozen=True)
class Experts:
    """What `graft::moe_experts` stands for, beside weights and ids: x [n, d], gate_up [e, 2f, d], down [e, d, f]."""

    x: Node
    gate_up: Node
    down: Node
    activation: str
    result: Node


def read_experts(walk: Walk, routing: Routing) -> Experts:
    """From the routing's results down to the sum over each token's experts."""
    weights = walk.reader(routing.weights, aten.reshape.default)
    ids = walk.reader(routing.ids, aten.reshape.default)
    for node in (weights, ids):
        require(tensor_of(node).dim() == 1, node, f"{where(node)} is not one row a token and expert")
    if any(is_op(user, aten.sort.default) for user in ids.users):
        return read_grouped(walk, routing, weights, ids)
    if any(is_op(user, aten.clamp.default) for user in ids.users):
        return read_batched(walk, routing, weights, ids)
    forms = "expected aten.sort (grouped_mm) or aten.clamp (batched_mm)"
    raise NoFit(ids, f"{where(ids)} is read by {readers_text(ids)}, {forms}")


def read_grouped(walk: Walk, routing: Routing, weights: Node, ids: Node) -> Experts:
    k, e = routing.top_k, routing.experts
    sort = walk.reader(ids, aten.sort.default)
    by_expert, order = walk.piece(sort, 0), walk.piece(sort, 1)
    if sort.args != (ids,) or by_expert is None or order is None:
        raise NoFit(sort, f"{where(sort)} does not sort the rows by expert")
    for clamp in list(by_expert.users):
        if is_op(clamp, aten.clamp_.default) and clamp.args[1:] == (None, e - 1):
            walk.take(clamp)  # the ids are below e already
    sorted_weights = walk.reader(weights, aten.index.Tensor)
    require(sorted_weights.args[1] == [order], sorted_weights, f"{where(sorted_weights)} is in another order")
    weighted, rows = read_weighted(walk, sorted_weights)
    restored = walk.reader(weighted, aten.index.Tensor)
    read_inverse(walk, restored, order)
    result = read_sum(walk, restored, routing)

    down_call = grouped_call(walk, unmasked(walk, rows, by_expert, e), weighted)
    hidden, activation, product = read_gated(walk, down_call.args[0], down_call)
    up_call = grouped_call(walk, unmasked(walk, product, by_expert, e), hidden)
    require(
        up_call.args[2] is down_call.args[2], up_call, f"{where(up_call)} and {where(down_call)} differ in groups"
    )
    read_offsets(walk, up_call, by_expert, e)
    gate_up, down = (stored_as_rows(call) for call in (up_call, down_call))
    source = up_call.args[0]
    if is_op(source, aten.to.dtype) and tensor_of(source).dtype == tensor_of(source.args[0]).dtype:
        source = walk.take(source).args[0]
    gathered = walk.call(unmasked(walk, source, by_expert, e), up_call, aten.index.Tensor)
    token = walk.call(gathered.args[1][0], gathered, aten.floor_divide.default)
    to_token = len(gathered.args[1]) == 1 and token.args == (order, k)
    require(to_token, token, f"{where(token)} does not lead from a row back to its token")
    return Experts(gathered.args[0], gate_up, down, activation, result)


def read_batched(walk: Walk, routing: Routing, weights: Node, ids: Node) -> Experts:
    k, e = routing.top_k, routing.experts
    chosen = walk.reader(ids, aten.clamp.default)
    require(
        chosen.args[1:] == (0, e - 1), chosen, f"{where(chosen)} does not keep the ids of {e} experts as they are"
    )
    weighted, rows = read_weighted(walk, weights)
    result = read_sum(walk, weighted, routing)
    down, hidden = batched_call(walk, rows, weighted, chosen)
    gated, activation, product = read_gated(walk, hidden, rows)
    gate_up, repeated = batched_call(walk, product, gated, chosen)
    repeated = walk.call(repeated, gated, aten.repeat_interleave.self_int)
    require(repeated.args[1:] == (k, 0), repeated, f"{where(repeated)} does not repeat each token {k} times")
    return Experts(repeated.args[0], gate_up, down, activation, result)


def read_weighted(walk: Walk, weights: Node) -> tuple[Node, Node]:
    """rows * weights.unsqueeze(-1): the product and the rows."""
    column = walk.reader(weights, aten.unsqueeze.default)
    product = walk.reader(column, aten.mul.Tensor)
    rows = product.args[1] if product.args[0] is column else product.args[0]
    fits = column.args[1] == -1 and isinstance(rows, Node) and rows is not column
    require(fits, product, f"{where(product)} does not weigh each row of the experts' results")
    return product, rows


def read_inverse(walk: Walk, restored: Node, order: Node) -> None:
    """restored = weighted[inverse], with inverse[order] = 0, 1, 2…"""
    inverse = walk.call(restored.args[1][0], restored, aten.index_put_.default)
    undoes = len(restored.args[1]) == 1 and inverse.args[1] == [order] and len(inverse.args) == 3
    require(undoes, inverse, f"{where(inverse)} does not undo the sorting")
    walk.call(inverse.args[0], inverse, aten.empty_like.default)
    count = expect(inverse.args[2], inverse, aten.arange.default)  # the same for every layer
    same = same_sizes(tensor_of(count).shape, tensor_of(order).shape)
    require(same, count, f"{where(count)} does not count the rows")


def read_sum(walk: Walk, rows: Node, routing: Routing) -> Node:
    """The sum over each token's experts, [n, d], in the dtype of the model."""
    pairs = walk.reader(rows, aten.reshape.default)
    sizes = (tensor_of(routing.ids).shape[0], routing.top_k, tensor_of(rows).shape[-1])
    side_by_side = same_sizes(tensor_of(pairs).shape, sizes)
    require(side_by_side, pairs, f"{where(pairs)} does not put a token's experts side by side")
    total = walk.reader(pairs, aten.sum.dim_IntList)
    plain = total.args[1:] == ([-2],) and not total.kwargs
    require(plain, total, f"{where(total)} is not the sum over a token's experts")
    casts = [user for user in total.users if is_op(user, aten.to.dtype)]
    return walk.take(casts[0]) if len(casts) == len(total.users) == 1 else total


def read_gated(walk: Walk, hidden: Any, reader: Node) -> tuple[Node, str, Node]:
    """activation(gate) * up, with gate and up the halves of one product: the call, the activation, the product."""
    hidden = walk.call(hidden, reader, aten.mul.Tensor, ops.swiglu.default)
    if is_op(hidden, ops.swiglu.default):
        gate, up, activation, upcast = (value for _, value in arg_values(hidden))
        require(not upcast, hidden, f"{where(hidden)} computes in float32, the op in the model's dtype")
    else:
        activated, up = sorted(hidden.args, key=lambda half: is_op(half, aten.slice.Tensor))
        activation = activation_of(activated, hidden)
        gate = walk.take(activated).args[0]
    gate, up = (walk.call(half, hidden, aten.slice.Tensor) for half in (gate, up))
    product, f = gate.args[0], tensor_of(hidden).shape[-1]
    halves = gate.args == (product, -1, 0, f) and up.args == (product, -1, f, 2 * f)
    require(halves, gate, f"{where(gate)} and {where(up)} are not the first and the second half of one product")
    return hidden, activation, product


def activation_of(node: Any, reader: Node) -> str:
    if is_op(node, aten.silu.default):
        return "silu"
    if is_op(node, aten.gelu.default):
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    if not isinstance(node, Node):
        raise NoFit(reader, f"{where(reader)} is no product of an activation and a projection")
    raise NoFit(node, f"the experts' activation {where(node)} is {op_text(node)}, known are silu, gelu and gelu_tanh")


def unmasked(walk: Walk, value: Any, by_expert: Node, e: int) -> Any:
    """Steps over masks that clear the rows of experts beyond the last; `topk` over e experts gives none."""
    while is_op(value, aten.masked_fill.Scalar, aten.masked_fill_.Scalar):
        source, mask, filler = walk.take(value).args
        column = walk.call(mask, value, aten.unsqueeze.default)
        beyond = walk.call(column.args[0], column, aten.ge.Scalar)
        fits = beyond.args == (by_expert, e) and filler == 0
        require(fits, value, f"{where(value)} masks more than experts beyond the last")
        value = source
    return value


def grouped_call(walk: Walk, value: Any, reader: Node) -> Node:
    """A product of each group of rows with its expert's matrix: (rows, weight, ends)."""
    if is_op(value, aten.add_.Tensor, aten.add.Tensor):
        raise NoFit(value, f"{where(value)} adds a bias to the experts, which the op does not have")
    if not isinstance(value, Node) or value.op != "call_function" or target_text(value.target) not in GROUPED:
        raise NoFit(*unexpected(value, reader, " or ".join(GROUPED)))
    require(len(value.args) == 3 and not value.kwargs, value, f"{where(value)} has a bias or another dtype")
    return walk.take(value)


def stored_as_rows(product: Node) -> Node:
    """The stored weight [e, out, in] of a grouped product, which takes [e, in, out]."""
    weight = product.args[1]
    turned = is_op(weight, aten.transpose.int) and weight.args[1:] == (-2, -1)
    require(turned, weight, f"the weight {where(weight)} is stored as [e, in, out], the op takes [e, out, in]")
    return weight.args[0]


def read_offsets(walk: Walk, product: Node, by_expert: Node, e: int) -> None:
    """cumsum(histc(by_expert)): where each expert's rows end."""
    ends = walk.call(product.args[2], product, aten.cumsum.default)
    counts = walk.call(ends.args[0], ends, aten.histc.default)
    ids = counts.args[0]
    ids = walk.take(ids).args[0] if is_op(ids, aten.to.dtype) else ids
    fits = ids is by_expert and counts.args[1:] == (e, 0, e - 1) and ends.args[1] == -1
    require(fits, counts, f"{where(counts)} does not count the rows of {e} experts")


def batched_call(walk: Walk, value: Any, reader: Node, chosen: Node) -> tuple[Node, Any]:
    """bmm(weight[chosen], rows.unsqueeze(-1)).squeeze(-1): the weight and the rows."""
    if is_op(value, aten.add_.Tensor, aten.add.Tensor):
        raise NoFit(value, f"{where(value)} adds a bias to the experts, which the op does not have")
    result = walk.call(value, reader, aten.squeeze.dim)
    product = walk.call(result.args[0], result, aten.bmm.default)
    matrices = walk.call(product.args[0], product, aten.index.Tensor)
    column = walk.call(product.args[1], product, aten.unsqueeze.default)
    fits = result.args[1] == -1 and column.args[1] == -1 and matrices.args[1] == [chosen]
    require(fits, product, f"{where(product)} is not each row with its own expert's matrix")
    return matrices.args[0], column.args[0]
