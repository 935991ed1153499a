"""Reads the routing of a mixture of experts: from logits to the weights and ids of each token's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from graft.graph.nodes import is_op, options_of, tensor_of, where
from graft.transforms.walk import NoFit, Walk, readers_text, require

aten = torch.ops.aten


@dataclass(frozen=True)
class Routing:
    """What `graft::moe_route` stands for: weights and ids, both [n, k], from logits [n, e]."""

    logits: Node
    top_k: int
    normalize: bool
    select_first: bool
    weights: Node
    ids: Node

    @property
    def experts(self) -> int:
        return tensor_of(self.logits).shape[-1]


def read_routing(walk: Walk, topk: Node) -> Routing:
    """The routing around a `topk`: softmax above it, or below it where the model selects first."""
    walk.take(topk)
    scores, k = options_of(topk)["self"], options_of(topk)["k"]
    values, ids = walk.piece(topk, 0), walk.piece(topk, 1)
    if values is None or ids is None:
        read, other = ("values", "ids") if ids is None else ("ids", "weights")
        raise NoFit(topk, f"only the {read} of {where(topk)} are read, the experts' {other} come from elsewhere")
    check_topk(topk)
    select_first = not is_op(scores, aten.softmax.int)
    if select_first:
        softmaxes = [user for user in values.users if is_op(user, aten.softmax.int)]
        require(
            len(softmaxes) == 1,
            topk,
            f"{where(topk)} takes {where(scores)}, which is no softmax, and its values go to {readers_text(values)},"
            " not to one",
        )
        logits, weights, normalize = scores, walk.take(softmaxes[0]), False
        check_softmax(weights)
    else:
        check_softmax(walk.take(scores))
        logits = scores.args[0]
        weights, normalize = read_normalization(walk, values)
    if is_op(logits, aten.to.dtype) and tensor_of(logits).dtype == torch.float32:
        if len(logits.users) == 1:
            walk.take(logits)
        logits = logits.args[0]  # the op computes in float32 by itself
    casts = [user for user in weights.users if is_op(user, aten.to.dtype)]
    if len(casts) == len(weights.users) == 1:
        weights = walk.take(casts[0])
    return Routing(logits, k, normalize, select_first, weights, ids)


def check_topk(node: Node) -> None:
    options = options_of(node)
    require(isinstance(options["k"], int), node, f"{where(node)} takes a computed number of experts")
    rows = tensor_of(options["self"]).dim() == 2 and options["dim"] in (-1, 1)
    require(rows, node, f"{where(node)} is not over rows [n, e]")
    require(options["largest"], node, f"{where(node)} takes the smallest scores (largest=False)")
    require(
        options["sorted"], node, f"{where(node)} has no set order (sorted=False), the op gives the heaviest first"
    )


def check_softmax(node: Node) -> None:
    require(options_of(node)["dim"] == -1, node, f"{where(node)} is not over the experts")
    require(tensor_of(node).dtype == torch.float32, node, f"{where(node)} is not computed in float32")


def read_normalization(walk: Walk, values: Node) -> tuple[Node, bool]:
    """values / values.sum(-1, keepdim=True), in place or not; or the values as they are."""
    if not any(is_op(user, aten.sum.dim_IntList) for user in values.users):
        return values, False
    total = walk.reader(values, aten.sum.dim_IntList)
    require(total.args[1:] == ([-1], True), total, f"{where(total)} does not sum over a token's experts")
    weights = walk.reader(total, aten.div.Tensor, aten.div_.Tensor)
    plain = weights.args == (values, total) and not weights.kwargs
    require(plain, weights, f"{where(weights)} does not divide the weights by their sum")
    return weights, True
