"""Reads the experts of a mixture, in the forms that Hugging Face's models are captured in, or as a model spells them.

grouped_mm: rows sorted by expert, one GEMM a group.  batched_mm: a matrix gathered for every row.  Loops over
experts are in loops.py, batched GEMMs over all of them in dense.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graft.ir.io.text import target_text
from graft.ir.nodes import is_op, same_sizes, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.library.moe.dense import read_dense
from graft.passes.library.moe.loops import EQUALS, read_sharing_loop, read_taking_loop
from graft.passes.library.moe.mlp import ADDS, ExpertWeight, Stack, Weights, read_activation, read_halves, weights_of
from graft.passes.library.moe.routing import Routing
from graft.passes.walk import GraphWalk, expect, readers_text, require, unexpected

aten = torch.ops.aten
GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback")  # by name: the second comes with transformers


@dataclass(frozen=True)
class Experts:
    """What `graft::moe_experts` stands for, beside weights and ids: x [n, d], gate_up [e, 2f, d], down [e, d, f].

    weigh_input: the routing's weights multiply x. sizes: those of the result, where it is not [n, d].
    """

    x: Node
    weights: Weights
    result: Node
    weigh_input: bool = False
    sizes: tuple[Any, ...] | None = None


def read_experts(walk: GraphWalk, routing: Routing) -> Experts:
    """From the routing's results down to the sum over each token's experts."""
    if routing.shares is not None and any(is_op(user, aten.transpose.int) for user in routing.shares.users):
        dense = read_dense(walk, routing)
        weights = weights_of([(None, dense.mlp)], dense.result)
        return Experts(dense.x, weights, dense.result, dense.weigh_input, dense.sizes)
    masks = [user for user in routing.ids.users if is_op(user, aten.one_hot.default, *EQUALS)]
    if masks or routing.shares is not None:
        shared = routing.shares is not None or any(
            is_op(user, aten.mul.Tensor, aten.to.dtype) for user in masks[0].users
        )
        x, mlps, result = (read_sharing_loop if shared else read_taking_loop)(walk, routing)
        return Experts(x, weights_of(sorted(mlps.items(), key=lambda item: item[0]), result), result)
    weights = walk.reader(routing.weights, aten.reshape.default)
    ids = walk.reader(routing.ids, aten.reshape.default)
    for node in (weights, ids):
        require(tensor_of(node).dim() == 1, node, f"{where(node)} is not one row a token and expert")
    if any(is_op(user, aten.sort.default) for user in ids.users):
        return read_grouped(walk, routing, weights, ids)
    if any(is_op(user, aten.clamp.default) for user in ids.users):
        return read_batched(walk, routing, weights, ids)
    forms = "expected aten.sort (grouped_mm) or aten.clamp (batched_mm)"
    raise Refused(ids, f"{where(ids)} is read by {readers_text(ids)}, {forms}")


def read_grouped(walk: GraphWalk, routing: Routing, weights: Node, ids: Node) -> Experts:
    k, e = routing.top_k, routing.experts
    sort = walk.reader(ids, aten.sort.default)
    by_expert, order = walk.piece(sort, 0), walk.piece(sort, 1)
    if sort.args != (ids,) or by_expert is None or order is None:
        raise Refused(sort, f"{where(sort)} does not sort the rows by expert")
    clamps = [c for c in by_expert.users if is_op(c, aten.clamp_.default) and c.args[1:] == (None, e - 1)]
    sorted_ids = [by_expert, *(walk.take(clamp) for clamp in clamps)]  # the ids are below e already
    sorted_weights = walk.reader(weights, aten.index.Tensor)
    require(sorted_weights.args[1] == [order], sorted_weights, f"{where(sorted_weights)} is in another order")
    weighted, rows = read_weighted(walk, sorted_weights)
    restored = walk.reader(weighted, aten.index.Tensor)
    read_inverse(walk, restored, order)
    result = read_sum(walk, restored, routing)

    down_call, down_bias = grouped_call(walk, unmasked(walk, rows, by_expert, e), weighted, sorted_ids)
    hidden, activation, gate, up = read_activation(walk, down_call.args[0], down_call)
    gemm, interleaved = read_halves(walk, *slices(gate, up, hidden), hidden)
    up_call, up_bias = grouped_call(walk, unmasked(walk, gemm, by_expert, e), hidden, sorted_ids)
    require(
        up_call.args[2] is down_call.args[2], up_call, f"{where(up_call)} and {where(down_call)} differ in groups"
    )
    read_offsets(walk, up_call, by_expert, e)
    source = up_call.args[0]
    if is_op(source, aten.to.dtype) and tensor_of(source).dtype == tensor_of(source.args[0]).dtype:
        source = walk.take(source).args[0]
    gathered = walk.call(unmasked(walk, source, by_expert, e), up_call, aten.index.Tensor)
    token = walk.call(gathered.args[1][0], gathered, aten.floor_divide.default)
    to_token = len(gathered.args[1]) == 1 and token.args == (order, k)
    require(to_token, token, f"{where(token)} does not lead from a row back to its token")
    up_side, down_side = (stored(call.args[1]) for call in (up_call, down_call))
    return Experts(gathered.args[0], Weights(up_side, down_side, up_bias, down_bias, activation, interleaved), result)


def read_batched(walk: GraphWalk, routing: Routing, weights: Node, ids: Node) -> Experts:
    k, e = routing.top_k, routing.experts
    chosen = walk.reader(ids, aten.clamp.default)
    require(
        chosen.args[1:] == (0, e - 1), chosen, f"{where(chosen)} does not keep the ids of {e} experts as they are"
    )
    weighted, rows = read_weighted(walk, weights)
    result = read_sum(walk, weighted, routing)
    down, down_bias, hidden = batched_call(walk, rows, weighted, chosen)
    gated, activation, gate, up = read_activation(walk, hidden, rows)
    gemm, interleaved = read_halves(walk, *slices(gate, up, gated), gated)
    gate_up, up_bias, repeated = batched_call(walk, gemm, gated, chosen)
    repeated = walk.call(repeated, gated, aten.repeat_interleave.self_int)
    require(repeated.args[1:] == (k, 0), repeated, f"{where(repeated)} does not repeat each token {k} times")
    return Experts(repeated.args[0], Weights(gate_up, down, up_bias, down_bias, activation, interleaved), result)


def read_weighted(walk: GraphWalk, weights: Node) -> tuple[Node, Node]:
    """rows * weights.unsqueeze(-1): that and the rows."""
    column = walk.reader(weights, aten.unsqueeze.default)
    weighted = walk.reader(column, aten.mul.Tensor)
    rows = weighted.args[1] if weighted.args[0] is column else weighted.args[0]
    fits = column.args[1] == -1 and isinstance(rows, Node) and rows is not column
    require(fits, weighted, f"{where(weighted)} does not weigh each row of the experts' results")
    return weighted, rows


def read_inverse(walk: GraphWalk, restored: Node, order: Node) -> None:
    """restored = weighted[inverse], with inverse[order] = 0, 1, 2…"""
    inverse = walk.call(restored.args[1][0], restored, aten.index_put_.default)
    undoes = len(restored.args[1]) == 1 and inverse.args[1] == [order] and len(inverse.args) == 3
    require(undoes, inverse, f"{where(inverse)} does not undo the sorting")
    walk.call(inverse.args[0], inverse, aten.empty_like.default)
    count = expect(inverse.args[2], inverse, aten.arange.default)  # the same for every layer
    same = same_sizes(tensor_of(count).shape, tensor_of(order).shape)
    require(same, count, f"{where(count)} does not count the rows")


def read_sum(walk: GraphWalk, rows: Node, routing: Routing) -> Node:
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


def slices(gate: Any, up: Any, hidden: Node) -> tuple[Node, Node]:
    return expect(gate, hidden, aten.slice.Tensor), expect(up, hidden, aten.slice.Tensor)


def unmasked(walk: GraphWalk, value: Any, by_expert: Node, e: int) -> Any:
    """Steps over masks that clear the rows of experts beyond the last; `topk` over e experts gives none."""
    while is_op(value, aten.masked_fill.Scalar, aten.masked_fill_.Scalar):
        source, mask, filler = walk.take(value).args
        column = walk.call(mask, value, aten.unsqueeze.default)
        beyond = walk.call(column.args[0], column, aten.ge.Scalar)
        fits = beyond.args == (by_expert, e) and filler == 0
        require(fits, value, f"{where(value)} masks more than experts beyond the last")
        value = source
    return value


def grouped_call(walk: GraphWalk, value: Any, reader: Node, ids: list[Node]) -> tuple[Node, Stack | None]:
    """A GEMM of each group of rows with its expert's matrix, (rows, weight, ends), and the experts' biases."""
    bias = None
    if is_op(value, *ADDS):
        bias = gathered_bias(walk, value, ids)
        reader, value = value, walk.take(value).args[0]
    if not isinstance(value, Node) or value.op != "call_function" or target_text(value.target) not in GROUPED:
        raise Refused(*unexpected(value, reader, " or ".join(GROUPED)))
    require(len(value.args) == 3 and not value.kwargs, value, f"{where(value)} has a bias or another dtype")
    return walk.take(value), bias


def gathered_bias(walk: GraphWalk, added: Node, ids: list[Node]) -> Stack:
    """rows + bias[ids]."""
    bias = walk.call(added.args[1], added, aten.index.Tensor)
    fits = len(bias.args[1]) == 1 and bias.args[1][0] in ids and not added.kwargs
    require(fits, bias, f"{where(bias)} is not each row's bias of its expert")
    return Stack(((None, ExpertWeight(bias.args[0])),))


def stored(weight: Node) -> Stack:
    """A stored weight, of which a GEMM took [e, in, out]."""
    transposed = is_op(weight, aten.transpose.int) and weight.args[1:] == (-2, -1)
    return Stack(((None, ExpertWeight(weight.args[0]) if transposed else ExpertWeight(weight, transposed=True)),))


def read_offsets(walk: GraphWalk, gemm: Node, by_expert: Node, e: int) -> None:
    """cumsum(histc(by_expert)): where each expert's rows end."""
    ends = walk.call(gemm.args[2], gemm, aten.cumsum.default)
    counts = walk.call(ends.args[0], ends, aten.histc.default)
    ids = counts.args[0]
    ids = walk.take(ids).args[0] if is_op(ids, aten.to.dtype) else ids
    fits = ids is by_expert and counts.args[1:] == (e, 0, e - 1) and ends.args[1] == -1
    require(fits, counts, f"{where(counts)} does not count the rows of {e} experts")


def batched_call(walk: GraphWalk, value: Any, reader: Node, chosen: Node) -> tuple[Stack, Stack | None, Any]:
    """bmm(weight[chosen], rows.unsqueeze(-1)).squeeze(-1), or the same transposed: weight, bias and rows."""
    bias = None
    if is_op(value, *ADDS):
        bias = gathered_bias(walk, value, [chosen])
        reader, value = value, walk.take(value).args[0]
    result = walk.call(value, reader, aten.squeeze.dim)
    gemm = walk.call(result.args[0], result, aten.bmm.default)
    transposed = result.args[1] == -2
    sides = reversed(gemm.args) if transposed else gemm.args
    matrices, column = sides
    matrices = walk.call(matrices, gemm, aten.index.Tensor)
    column = walk.call(column, gemm, aten.unsqueeze.default)
    fits = result.args[1] in (-1, -2) and column.args[1] == result.args[1] and matrices.args[1] == [chosen]
    require(fits, gemm, f"{where(gemm)} is not each row with its own expert's matrix")
    return Stack(((None, ExpertWeight(matrices.args[0], transposed=transposed)),)), bias, column.args[0]
