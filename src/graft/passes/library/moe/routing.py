"""Reads the routing of a mixture of experts: from logits to the weights and ids of each token's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from graft.ir.nodes import is_op, options_of, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.walk import GraphWalk, readers_text, require

aten = torch.ops.aten


SCATTERS = (aten.scatter_.src, aten.scatter.src)
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
FULLS = (aten.full.default, aten.full_like.default, aten.new_full.default)


@dataclass(frozen=True)
class Routing:
    """What `graft::moe_route` stands for: weights and ids, both [n, k], from logits [n, e].

    weights: None where the model has them as `shares` [n, e] alone, with 0 for experts that were not chosen.
    """

    logits: Node
    top_k: int
    normalize: bool
    select_first: bool
    weights: Node | None
    ids: Node
    dtype: torch.dtype
    scoring: str = "softmax"
    shares: Node | None = None

    @property
    def experts(self) -> int:
        return tensor_of(self.logits).shape[-1]


def read_routing(walk: GraphWalk, topk: Node) -> Routing:
    """The routing around a `topk`: softmax or sigmoid above it, or below it where the model selects first."""
    walk.take(topk)
    scores, k = options_of(topk)["self"], options_of(topk)["k"]
    values, ids = walk.piece(topk, 0), walk.piece(topk, 1)
    if values is None or ids is None:
        read, other = ("values", "ids") if ids is None else ("ids", "weights")
        raise Refused(topk, f"only the {read} of {where(topk)} are read, the experts' {other} come from elsewhere")
    check_topk(topk)
    select_first = not is_op(scores, aten.softmax.int, aten.sigmoid.default)
    if select_first:
        scoring, weights, shares = read_selected(walk, topk, values, ids)
        logits, normalize = scores, False
    else:
        scoring = "softmax" if is_op(scores, aten.softmax.int) else "sigmoid"
        check_scores(walk.take(scores))
        logits, shares = scores.args[0], None
        weights, normalize = read_normalization(walk, values)
    if is_op(logits, aten.to.dtype) and tensor_of(logits).dtype == torch.float32:
        if len(logits.users) == 1:
            walk.take(logits)
        logits = logits.args[0]  # the op computes in float32 by itself
    if weights is not None:
        weights = read_cast(walk, weights)
        shares = read_scattered(walk, ids, weights)
    kept = weights if weights is not None else shares
    return Routing(logits, k, normalize, select_first, weights, ids, tensor_of(kept).dtype, scoring, shares)


def read_cast(walk: GraphWalk, node: Node) -> Node:
    casts = [user for user in node.users if is_op(user, aten.to.dtype)]
    return walk.take(casts[0]) if len(casts) == len(node.users) == 1 else node


def read_selected(walk: GraphWalk, topk: Node, values: Node, ids: Node) -> tuple[str, Node | None, Node | None]:
    """What becomes of the largest logits: the scoring, and their weights [n, k], or their shares [n, e]."""
    wide = [user for user in values.users if is_op(user, aten.to.dtype) and tensor_of(user).dtype == torch.float32]
    source = walk.take(wide[0]) if len(wide) == len(values.users) == 1 else values
    scored = [user for user in source.users if is_op(user, aten.softmax.int, aten.sigmoid.default)]
    if len(scored) == 1:
        if is_op(scored[0], aten.sigmoid.default):
            return "sigmoid", walk.take(scored[0]), None
        require(options_of(scored[0])["dim"] == -1, scored[0], f"{where(scored[0])} is not over the experts")
        return "softmax", walk.take(scored[0]), None
    scattered = read_scattered(walk, ids, values, -float("inf"))
    if scattered is not None:
        wide = read_cast(walk, scattered)
        sigmoids = [user for user in wide.users if is_op(user, aten.sigmoid.default)]
        fits = len(sigmoids) == len(wide.users) == 1
        require(fits, wide, f"{where(wide)} is read by {readers_text(wide)}, expected one aten.sigmoid")
        return "sigmoid", None, read_cast(walk, walk.take(sigmoids[0]))
    raise Refused(
        topk,
        f"{where(topk)} takes {where(options_of(topk)['self'])}, which is no softmax or sigmoid, and its values go to"
        f" {readers_text(values)}, not to one",
    )


def read_scattered(walk: GraphWalk, ids: Node, values: Node, fill: float = 0.0) -> Node | None:
    """A row for each token with `values` at the experts' columns and `fill` elsewhere, where the model makes it."""
    found = [user for user in ids.users if is_op(user, *SCATTERS) and user.args[3] is values]
    if len(found) != 1:
        return None
    target, dim, index, _ = walk.take(found[0]).args
    fits = index is ids and dim in (1, -1) and is_filled(target, fill)
    require(fits, found[0], f"{where(found[0])} does not put the weights of each token among {fill}")
    walk.take(target)
    return found[0]


def is_filled(node: object, value: float) -> bool:
    """A new tensor with one number everywhere."""
    return (value == 0 and is_op(node, *ZEROS)) or (is_op(node, *FULLS) and options_of(node)["fill_value"] == value)


def check_topk(node: Node) -> None:
    options = options_of(node)
    require(isinstance(options["k"], int), node, f"{where(node)} takes a computed number of experts")
    rows = tensor_of(options["self"]).dim() == 2 and options["dim"] in (-1, 1)
    require(rows, node, f"{where(node)} is not over rows [n, e]")
    require(options["largest"], node, f"{where(node)} takes the smallest scores (largest=False)")
    require(
        options["sorted"], node, f"{where(node)} has no set order (sorted=False), the op gives the heaviest first"
    )


def check_scores(node: Node) -> None:
    """The experts are chosen by these, so that a rounding more would choose others."""
    over = is_op(node, aten.sigmoid.default) or options_of(node)["dim"] == -1
    require(over, node, f"{where(node)} is not over the experts")
    require(tensor_of(node).dtype == torch.float32, node, f"{where(node)} is not computed in float32")


def read_normalization(walk: GraphWalk, values: Node) -> tuple[Node, bool]:
    """values / values.sum(-1, keepdim=True), in place or not; or the values as they are."""
    if not any(is_op(user, aten.sum.dim_IntList) for user in values.users):
        return values, False
    total = walk.reader(values, aten.sum.dim_IntList)
    require(total.args[1:] == ([-1], True), total, f"{where(total)} does not sum over a token's experts")
    weights = walk.reader(total, aten.div.Tensor, aten.div_.Tensor)
    plain = weights.args == (values, total) and not weights.kwargs
    require(plain, weights, f"{where(weights)} does not divide the weights by their sum")
    return weights, True
