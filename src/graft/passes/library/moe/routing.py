"""Reads the routing of a mixture of experts: from logits to the weights and ids of each token's experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from graft.ir.nodes import is_op, options_of, same_sizes, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.library.moe.groups import ONE_GROUP, SCORES, ExpertGroups, is_filled, read_groups
from graft.passes.walk import GraphWalk, readers_text, require

aten = torch.ops.aten


SCATTERS = (aten.scatter_.src, aten.scatter.src)


@dataclass(frozen=True)
class Routing:
    """What `graft::moe_route` stands for: weights and ids, both [n, k], from logits [n, e].

    weights: None where the model has them as `shares` [n, e] alone, with 0 for experts that were not chosen.
    ordered: the heaviest first; else the model does not say, and nobody but the experts may read weights and ids.
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
    bias: Node | None = None
    groups: ExpertGroups = ONE_GROUP
    eps: float = 0.0
    scale: float = 1.0
    ordered: bool = True

    @property
    def experts(self) -> int:
        return tensor_of(self.logits).shape[-1]


@dataclass(frozen=True)
class WeighedScores:
    """What was made of the chosen experts' scores: over their sum and eps where `normalize`, times scale.

    node: None where the model has shares alone."""

    node: Node | None
    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0


def read_routing(walk: GraphWalk, topk: Node) -> Routing:
    """The routing around a `topk`: softmax or sigmoid above it, or below it where the model selects first."""
    walk.take(topk)
    options = options_of(topk)
    values, ids = walk.piece(topk, 0), walk.piece(topk, 1)
    require(ids is not None, topk, f"only the values of {where(topk)} are read, the experts' ids come from elsewhere")
    assert ids is not None
    check_topk(topk)
    choice, groups = read_groups(walk, options["self"], options["k"])
    scores, bias = read_bias(walk, choice)
    select_first = not is_op(scores, *SCORES)
    shares = None
    if select_first:
        require(values is not None, topk, f"only the ids of {where(topk)} are read, weights come from elsewhere")
        whole = groups == ONE_GROUP
        require(whole, topk, f"{where(topk)} takes the best of some groups, and they are scored when they are chosen")
        assert values is not None
        scoring, chosen, shares = read_selected(walk, topk, values, ids)
        logits, found = scores, WeighedScores(chosen)
    else:
        scoring = "softmax" if is_op(scores, aten.softmax.int) else "sigmoid"
        check_scores(walk.take(scores))
        logits = scores.args[0]
        found = read_scale(walk, read_normalization(walk, read_chosen(walk, topk, scores, values, ids, bias)))
    if is_op(logits, aten.to.dtype) and tensor_of(logits).dtype == torch.float32:
        if len(logits.users) == 1:
            walk.take(logits)
        logits = logits.args[0]  # the op computes in float32 by itself
    weights = None
    if found.node is not None:
        weights = read_cast(walk, found.node)
        shares = read_scattered(walk, ids, weights)
    kept = weights if weights is not None else shares
    return Routing(
        logits, options["k"], found.normalize, select_first, weights, ids, tensor_of(kept).dtype, scoring, shares,
        bias, groups, found.eps, found.scale, ordered=bool(options["sorted"]),
    )  # fmt: skip


def read_bias(walk: GraphWalk, choice: Any) -> tuple[Any, Node | None]:
    """scores + bias [e], by which experts are chosen and not weighed (DeepSeek-V3): scores, bias."""
    if not is_op(choice, aten.add.Tensor) or choice.kwargs:
        return choice, None
    scores, bias = sorted(choice.args[:2], key=lambda side: not is_op(side, *SCORES))
    if not is_op(scores, *SCORES) or not isinstance(bias, Node):
        return choice, None
    walk.take(choice)
    each = same_sizes(tensor_of(bias).shape, tensor_of(scores).shape[-1:])
    require(each, choice, f"{where(choice)} does not add one number for each expert")
    return scores, bias


def read_chosen(
    walk: GraphWalk, topk: Node, scores: Node, values: Node | None, ids: Node, bias: Node | None
) -> Node:  # fmt: skip
    """The scores of the chosen experts, without the bias: those that topk gave, or scores.gather(-1, ids)."""
    if values is not None:
        require(bias is None, topk, f"the values of {where(topk)}, with {where(bias or topk)}, weigh the experts")
        return values
    gathered = walk.reader(ids, aten.gather.default)
    source, dim, index = gathered.args[:3]
    fits = source is scores and dim in (1, -1) and index is ids
    require(fits, gathered, f"{where(gathered)} does not take the scores {where(scores)} of the chosen experts")
    return gathered


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


def check_topk(node: Node) -> None:
    options = options_of(node)
    require(isinstance(options["k"], int), node, f"{where(node)} takes a computed number of experts")
    rows = tensor_of(options["self"]).dim() == 2 and options["dim"] in (-1, 1)
    require(rows, node, f"{where(node)} is not over rows [n, e]")
    require(options["largest"], node, f"{where(node)} takes the smallest scores (largest=False)")


def check_scores(node: Node) -> None:
    """The experts are chosen by these, so that a rounding more would choose others."""
    over = is_op(node, aten.sigmoid.default) or options_of(node)["dim"] == -1
    require(over, node, f"{where(node)} is not over the experts")
    require(tensor_of(node).dtype == torch.float32, node, f"{where(node)} is not computed in float32")


def read_normalization(walk: GraphWalk, values: Node) -> WeighedScores:
    """values / (values.sum(-1, keepdim=True) + eps), in place or not; or the values as they are."""
    if not any(is_op(user, aten.sum.dim_IntList) for user in values.users):
        return WeighedScores(values)
    total = walk.reader(values, aten.sum.dim_IntList)
    require(total.args[1:] == ([-1], True), total, f"{where(total)} does not sum over a token's experts")
    eps, summed = 0.0, total
    if any(is_op(user, aten.add.Tensor) for user in total.users):
        summed = walk.reader(total, aten.add.Tensor)
        number = summed.args[1]
        plain = summed.args[0] is total and isinstance(number, int | float) and not summed.kwargs
        require(plain, summed, f"{where(summed)} does not add a number to the sum of the weights")
        eps = float(number)
    weights = walk.reader(summed, aten.div.Tensor, aten.div_.Tensor)
    plain = weights.args == (values, summed) and not weights.kwargs
    require(plain, weights, f"{where(weights)} does not divide the weights by their sum")
    return WeighedScores(weights, True, eps)


def read_scale(walk: GraphWalk, found: WeighedScores) -> WeighedScores:
    """weights * 2.5 (DeepSeek's routed_scaling_factor)."""
    users = list(found.node.users) if found.node is not None else []
    if len(users) != 1 or not is_op(users[0], aten.mul.Tensor) or not isinstance(users[0].args[1], int | float):
        return found
    return replace(found, node=walk.take(users[0]), scale=float(users[0].args[1]))
