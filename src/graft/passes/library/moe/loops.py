"""Reads experts that are written as a loop: each takes the tokens that chose it, or all of them with a share of 0.

taken:   k, token = where(one_hot(ids)[e]);  y.index_add_(0, token, expert(x[token]) * weights[token, k])
shared:  y = y + expert(x) * shares[:, e]
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from graft.ir.checks import is_check
from graft.ir.io.text import op_text
from graft.ir.nodes import is_op, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.library.moe.mlp import ADDS, Mlp, read_mlp
from graft.passes.library.moe.routing import Routing, is_filled
from graft.passes.walk import GraphWalk, require

aten = torch.ops.aten
EQUALS = (aten.eq.Scalar, aten.eq.Tensor)
INDEX_ADDS = (aten.index_add_.default, aten.index_add.default)
COMPARISONS = (operator.ge, operator.le, operator.gt, operator.lt, operator.eq)
Experts = dict[int, Mlp]


# ── each expert takes its tokens ────────────────────────────────────────────────────────────────────────────────


def read_taking_loop(walk: GraphWalk, routing: Routing) -> tuple[Node, Experts, Node]:
    """x, the experts' MLPs and the result."""
    weights = routing.weights
    require(weights is not None, routing.ids, f"{where(routing.ids)} goes to a loop over experts without weights")
    mlps: Experts = {}
    sums, sources = [], []
    for expert, (token, slot) in read_hits(walk, routing).items():
        total, accumulated, rows = read_accumulation(walk, token)
        while is_op(rows, aten.to.dtype):
            rows = walk.take(rows).args[0]
        rows = walk.call(rows, total, aten.mul.Tensor)
        out, column = sorted(rows.args, key=lambda side: is_column(side, weights, token, slot))
        require(
            is_column(column, weights, token, slot),
            rows,
            f"{where(rows)} does not weigh each row of expert {expert} by {where(weights)} of its token",
        )
        take_column(walk, column)
        mlps[expert] = read_mlp(walk, out, rows)
        sources.append(read_taken(walk, mlps[expert].x, token))
        sums.append((total, accumulated))
    require(len(set(sources)) == 1, routing.ids, "the experts read rows of different tensors")
    check_complete(mlps, routing)
    return sources[0], mlps, read_chain(walk, sums, [], routing)


def read_hits(walk: GraphWalk, routing: Routing) -> dict[int, tuple[Node, Node]]:
    """For each expert its (token, slot) pairs: where `one_hot(ids)` or `ids == expert` holds."""
    masks: list[tuple[Any, Node, bool]] = []  # expert, mask [n, k] or flipped [k, n]
    for user in list(routing.ids.users):
        if is_op(user, *EQUALS):
            masks.append((user.args[1], walk.take(user), False))
        elif is_op(user, aten.one_hot.default):
            fits = user.args[1:] == (routing.experts,)
            require(fits, user, f"{where(user)} does not have one column for each of {routing.experts} experts")
            transposed = [one for one in walk.take(user).users if is_op(one, aten.transpose.int)]
            flipped = len(transposed) == 1 and transposed[0].args[1:] == (-3, -1)
            positions = walk.take(transposed[0]) if flipped else user
            for select in list(positions.users):
                fits = is_op(select, aten.select.int) and select.args[1] == (-3 if flipped else -1)
                require(fits, select, f"{where(select)} does not take the tokens of one expert")
                masks.append((select.args[2], walk.take(select), flipped))
    return {expert: read_positions(walk, mask, flipped) for expert, mask, flipped in masks}


def read_positions(walk: GraphWalk, mask: Node, flipped: bool) -> tuple[Node, Node]:
    found = walk.reader(mask, aten.where.default, aten.nonzero_numpy.default)
    first, second = walk.piece(found, 0), walk.piece(found, 1)
    if first is None or second is None:
        raise Refused(found, f"of the rows and positions that {where(found)} gives, only one is read")
    for index in (first, second):
        take_checks(walk, index)
    return (second, first) if flipped else (first, second)


def take_checks(walk: GraphWalk, index: Node) -> None:
    """Export checks that as many tokens were found as there can be; the op asks for no number."""
    for size in [user for user in index.users if is_op(user, aten.sym_size.int)]:
        compared = [user for user in size.users if is_op(user, *COMPARISONS)]
        checks = [user for node in (size, *compared) for user in node.users if is_check(user)]
        for node in (size, *compared, *checks):
            walk.take(node)


def read_accumulation(walk: GraphWalk, token: Node) -> tuple[Node, Any, Any]:
    """y.index_add(0, token, rows), or y[token] += rows: the call, y, and rows."""
    found = [user for user in token.users if is_op(user, *INDEX_ADDS, aten.index_put_.default)]
    if len(found) != 1:
        raise Refused(token, f"{where(token)} is not where one index_add, or one `+=`, puts an expert's rows")
    call = walk.take(found[0])
    if not is_op(call, aten.index_put_.default):
        accumulated, dim, _, rows = call.args[:4]
        plain = dim in (0, -tensor_of(call).dim()) and len(call.args) == 4 and not call.kwargs
        require(plain, call, f"{where(call)} does not add rows as they are")
        return call, accumulated, rows
    accumulated, positions, rows, *accumulate = call.args
    require(positions == [token], call, f"{where(call)} does not put rows where their tokens are")
    if accumulate == [True]:
        return call, accumulated, rows
    total = walk.call(rows, call, *ADDS)
    taken = [side for side in total.args[:2] if is_op(side, aten.index.Tensor) and side.args[1] == [token]]
    fits = len(taken) == 1 and taken[0].args[0] is accumulated and not total.kwargs
    require(fits, total, f"{where(total)} does not add to the rows that {where(call)} puts back")
    walk.take(taken[0])
    return call, accumulated, next(side for side in total.args[:2] if side is not taken[0])


def is_column(node: Any, weights: Node, token: Node, slot: Node) -> bool:
    """weights[token, slot, None]."""
    if is_op(node, aten.unsqueeze.default) and node.args[1] == -1:
        return is_op(node.args[0], aten.index.Tensor) and node.args[0].args == (weights, [token, slot])
    if not is_op(node, aten.index.Tensor) or node.args[1] != [token, slot]:
        return False
    source = node.args[0]
    return is_op(source, aten.unsqueeze.default) and source.args == (weights, -1)


def take_column(walk: GraphWalk, column: Node) -> None:
    walk.take(walk.take(column).args[0])


def read_taken(walk: GraphWalk, rows: Any, token: Node) -> Node:
    """x[token], or x[None, token] without its first dim: x."""
    while is_op(rows, aten.reshape.default, aten.squeeze.dim):
        require(tensor_of(rows).dim() == 2, rows, f"{where(rows)} does not give a row for each token of an expert")
        rows = walk.take(rows).args[0]
    if is_op(rows, aten.index_select.default) and rows.args[2] is token and rows.args[1] == -2:
        return walk.take(rows).args[0]
    rows = walk.call(rows, token, aten.index.Tensor)
    source, positions = rows.args
    if positions == [None, token] and is_op(source, aten.unsqueeze.default) and source.args[1] == -3:
        source, positions = walk.take(source).args[0], [token]
    require(positions == [token], rows, f"{where(rows)} does not take the rows of an expert's tokens")
    return source


# ── each expert takes all tokens ────────────────────────────────────────────────────────────────────────────────


def read_sharing_loop(walk: GraphWalk, routing: Routing) -> tuple[Node, Experts, Node]:
    """x, the experts' MLPs and the result."""
    mlps: Experts = {}
    sums, weighted = [], []
    for expert, column in read_columns(walk, routing).items():
        rows = walk.reader(column, aten.mul.Tensor)
        out = rows.args[1] if rows.args[0] is column else rows.args[0]
        mlps[expert] = read_mlp(walk, out, rows)
        added = [user for user in rows.users if is_op(user, *ADDS) and not user.kwargs]
        require(len(rows.users) == 1 == len(added), rows, f"{where(rows)} is not added to what other experts gave")
        left, right = walk.take(added[0]).args
        sums.append((added[0], right if left is rows else left))
        weighted.append(rows)
    check_complete(mlps, routing)
    sources = {mlp.x for mlp in mlps.values()}
    require(len(sources) == 1, routing.ids, "the experts read different tensors")
    return sources.pop(), mlps, read_chain(walk, sums, weighted, routing)


def read_columns(walk: GraphWalk, routing: Routing) -> dict[int, Node]:
    """For each expert its column [n, 1] of shares: of the scattered weights, or Σ weights · (ids == expert)."""
    if routing.shares is not None:
        return columns_of(walk, routing.shares, routing.experts)
    found: dict[int, Node] = {}
    for equal in [user for user in routing.ids.users if is_op(user, *EQUALS)]:
        mask = walk.take(equal)
        while len(mask.users) == 1 and is_op(next(iter(mask.users)), aten.to.dtype):
            mask = walk.take(next(iter(mask.users)))
        weighted = walk.reader(mask, aten.mul.Tensor)
        require(
            set(weighted.args) == {mask, routing.weights},
            weighted,
            f"{where(weighted)} is not the weights of the tokens that chose expert {equal.args[1]}",
        )
        total = walk.reader(weighted, aten.sum.dim_IntList)
        kept = total.args[1:] == ([-1], True)
        require(
            total.args[1] == [-1] and not total.kwargs, total, f"{where(total)} does not sum over a token's experts"
        )
        found[equal.args[1]] = total if kept else walk.reader(total, aten.unsqueeze.default)
    return found


def columns_of(walk: GraphWalk, shares: Node, experts: int) -> dict[int, Node]:
    found: dict[int, Node] = {}
    others: list[Node] = []
    sources = [shares]
    for user in list(shares.users):
        whole = is_op(user, aten.slice.Tensor) and user.args[1:] == (-2, 0, 2**63 - 1)
        if whole:
            sources.append(walk.take(user))
    for node in [user for source in sources for user in source.users if user not in sources]:
        if is_op(node, aten.select.int) and node.args[1] == -1:
            column = walk.reader(walk.take(node), aten.unsqueeze.default)
            require(column.args[1] == -1, column, f"{where(column)} is no column of shares")
            found[node.args[2]] = column
        elif is_op(node, aten.slice.Tensor) and node.args[1] == -1 and node.args[3] == node.args[2] + 1:
            found[node.args[2]] = walk.take(node)
        else:
            others.append(node)
    if others and len(found) < experts:
        forms = "known are a column for each expert, and their transpose in a GEMM with all experts' results"
        raise Refused(others[0], f"{where(shares)} is read by {op_text(others[0])} at {where(others[0])}; {forms}")
    return found


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_complete(mlps: Experts, routing: Routing) -> None:
    missing = sorted(set(range(routing.experts)) ^ mlps.keys())
    require(
        not missing,
        routing.ids,
        f"of {routing.experts} experts that {where(routing.ids)} can name, the loop has {len(mlps)}; the first that"
        f" is not in both is {missing[0] if missing else ''}",
    )


def read_chain(walk: GraphWalk, sums: list[tuple[Node, Any]], first: list[Node], routing: Routing) -> Node:
    """y = 0 + …, one expert after the other: the last sum. `sums`: each call, and what it adds to, which is a call
    before it, zeros, or one of `first`, where two experts' rows are added to each other."""
    before = dict(sums)
    inner = set(before.values()) & before.keys()
    roots = [accumulated for accumulated in before.values() if accumulated not in before]
    last = [call for call in before if call not in inner]
    if len(last) != 1 or len(roots) != 1 or len(set(before.values())) != len(before):
        raise Refused(routing.ids, "the experts' results are not added up one after the other")
    root = roots[0]
    if is_filled(root, 0) and len(before) == len(sums):
        walk.take(root)
    elif root not in first or len(before) != len(sums) - 1:
        site = root if isinstance(root, Node) else last[0]
        raise Refused(site, f"the experts' results are added to {where(site)}, which is not zero")
    return last[0]
