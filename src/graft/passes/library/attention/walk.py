"""Spelled-out attention, read backwards from the softmax: every step is named or the site is refused with a reason.

q·kᵀ → scale → soft cap → masks → (a sink's logit) → softmax → (its column dropped, a cast) → · v
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.io.text import op_text
from graft.ir.nodes import is_op, same_shape, same_sizes, tensor_of, tensor_val, where
from graft.ir.patterns.match import Refused
from graft.ir.sizes.follow import number
from graft.passes.library.attention.matmuls import MATMULS, operands, scores_matmul
from graft.passes.library.attention.operands import factor_of
from graft.passes.library.attention.parts import MaskTerm, ScoreChain, lowest
from graft.passes.library.attention.sinks import check_columns, read_sinks

aten = torch.ops.aten
ADDS = (aten.add.Tensor, aten.add_.Tensor)
FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)
WHERES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
MULTIPLIES = (aten.mul.Tensor, aten.div.Tensor, aten.mul_.Tensor, aten.div_.Tensor)
# what leaves the weights as they are on their way to the values
PLAIN = (aten.to.dtype, aten.reshape.default, aten.slice.Tensor, aten.contiguous.default, aten.clone.default)
# what the scores may come through, besides adds and wheres
THROUGH = (*FILLS, *MULTIPLIES, aten.tanh.default, aten.reshape.default, aten.to.dtype)
FAR = 24  # nodes looked at, or steps walked, before softmax and matmul count as strangers


# ── after the softmax ───────────────────────────────────────────────────────────────────────────────────────────


def values_of(softmax: Node) -> Node | None:
    """The matmul that the weights feed, perhaps through calls that keep their shape; None: this is no attention."""
    shape, todo, seen = tensor_of(softmax), [softmax], {softmax}
    while todo and len(seen) < FAR:
        node = todo.pop(0)
        for user in node.users:
            if node in (operands(user) or ()):
                return user
            tensor = tensor_val(user)
            kept = tensor is not None and same_shape(tensor, shape)
            if user not in seen and (kept or is_op(user, *PLAIN, aten.transpose.int)):
                seen.add(user)
                todo.append(user)
    return None


def weights_path(softmax: Node, matmul: Node) -> list[Node]:
    """The nodes from softmax to the matmul, or why they do more than the op."""
    path = [softmax]
    while True:
        node = path[-1]
        if len(node.users) > 1:
            second = next(reader for reader in node.users if reader is not matmul)
            raise Refused(node, f"the attention weights {where(node)} have a second reader {where(second)}")
        (reader,) = node.users
        if reader is matmul:
            if (operands(matmul) or (None,))[0] is not node:
                raise Refused(matmul, f"the weights are the right operand of {where(matmul)}")
            return path
        if is_op(reader, aten.dropout.default, aten.dropout_.default):
            raise Refused(
                reader, f"{where(reader)} is training-mode dropout (p={reader.args[1]}); call eval() before capture"
            )
        if not is_op(reader, *PLAIN):
            raise Refused(
                reader,
                f"the weights go through {where(reader)} ({op_text(reader)}) after the softmax;"
                " the op has no such step",
            )
        if is_op(reader, aten.reshape.default) and not same_sizes(
            tensor_of(reader).shape[-2:], tensor_of(node).shape[-2:]
        ):
            raise Refused(reader, f"{where(reader)} lays queries and keys of the weights out anew")
        path.append(reader)


# ── before the softmax ──────────────────────────────────────────────────────────────────────────────────────────


def read_scores(gm: GraphModule, softmax: Node, path: list[Node]) -> tuple[ScoreChain, Node]:
    """Walks from softmax up to q·kᵀ, the second result. A scale on q or k is not part of the walk's."""
    walk = ScoreChain(gm, list(path))
    node = softmax.args[0]
    if is_op(node, aten.to.dtype) and tensor_of(node).dtype == torch.float32:
        walk.inner.append(node)  # softmax computes in float32 anyway
        node = node.args[0]
    node = read_sinks(walk, node)
    check_columns(walk, softmax, path)
    while scores_matmul(node) is None:
        walk.inner.append(node)
        node = read_step(walk, node)
    walk.inner.append(node)
    walk.pieces.reverse()
    return walk, node


def read_step(walk: ScoreChain, node: Node) -> Node:
    """One step up: a mask, the soft cap, a factor or a fold of heads."""
    if not walk.scaled and (scores := read_mask(walk, node)) is not None:
        return scores
    found = factor_of(walk.gm, node, in_place=True)
    if found is not None:
        return read_factor(walk, *found)
    if is_op(node, aten.reshape.default):
        folded = same_sizes(tensor_of(node.args[0]).shape[-2:], tensor_of(node).shape[-2:])
        if folded and tensor_of(node.args[0]).dim() in (3, 4):
            return node.args[0]
    if is_op(node, *ADDS, *FILLS, *WHERES):
        raise Refused(node, f"a mask is applied at {where(node)}, before the scores are scaled or capped")
    if is_op(node, *MULTIPLIES):
        raise Refused(
            node,
            f"the scores are multiplied by a tensor at {where(node)}; the op adds masks, and its scale is a number",
        )
    if is_op(node, aten.to.dtype):
        raise Refused(
            node, f"the scores become {tensor_of(node).dtype} at {where(node)}; the op keeps the inputs' dtype"
        )
    raise Refused(node, f"the scores come from {where(node)} ({op_text(node)}), which is not q·kᵀ")


def read_factor(walk: ScoreChain, source: Node, factor: float) -> Node:
    walk.scaled = True
    if not is_op(source, aten.tanh.default, aten.tanh_.default):
        walk.scale *= factor
        return source
    if walk.softcap is not None or walk.scale != 1.0:
        raise Refused(source, f"the scores are scaled or capped again after the cap at {where(source)}")
    walk.softcap = factor
    walk.inner.append(source)
    inside = factor_of(walk.gm, source.args[0], in_place=True)
    if inside is not None and math.isclose(inside[1] * factor, 1.0, rel_tol=1e-6):
        walk.inner.append(source.args[0])
        return inside[0]
    walk.scale = factor  # tanh(s) * c is a cap of c on scores that are c times as large
    return source.args[0]


# ── masks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def read_mask(walk: ScoreChain, node: Node) -> Node | None:
    """The scores that a mask was laid on at `node`, the mask noted; None when there is none."""
    if is_op(node, *ADDS):
        return read_added(walk, node)
    if is_op(node, *FILLS):
        scores, mask, value = node.args
        return read_closing(walk, node, scores, mask, value, opens=False)
    if is_op(node, *WHERES):
        mask, first, second = node.args
        if leads_to_matmul(first):
            return read_closing(walk, node, first, mask, second, opens=True)
        return read_closing(walk, node, second, mask, first, opens=False)
    return None


def read_added(walk: ScoreChain, node: Node) -> Node:
    sides = [n for n in node.args[:2] if isinstance(n, Node) and same_shape(tensor_of(n), tensor_of(node))]
    scores = next((side for side in sides if leads_to_matmul(side)), None)
    if scores is None:
        raise Refused(node, f"{where(node)} adds what scores are broadcast to, or no scores that come from q·kᵀ")
    other = node.args[1] if scores is node.args[0] else node.args[0]
    if not isinstance(other, Node) or node.kwargs or len(node.args) > 2:
        raise Refused(node, f"{where(node)} adds one number to all scores, or a multiple of a mask")
    if not tensor_of(other).dtype.is_floating_point:
        raise Refused(node, f"{where(node)} adds a {tensor_of(other).dtype} tensor to the scores")
    walk.pieces.append(MaskTerm(other, node))
    return scores


def read_closing(walk: ScoreChain, node: Node, scores: Any, mask: Node, value: Any, *, opens: bool) -> Node:
    """A boolean that puts -inf, or the lowest number of the dtype, into the scores."""
    closed, dtype = number(walk.gm, value), tensor_of(node).dtype
    if closed is None or not isinstance(scores, Node):
        raise Refused(node, f"{where(node)} puts a tensor, not a number, where its mask closes")
    closed = float(torch.tensor(closed).to(dtype).item())
    if not closed <= lowest(dtype):
        raise Refused(
            node,
            f"{where(node)} closes with {closed:g}, neither -inf nor the lowest {dtype}: scores could be lower, and a"
            f" closed row is not what the op gives; fill with -inf or torch.finfo({dtype}).min",
        )
    if not same_shape(tensor_of(scores), tensor_of(node)):
        raise Refused(node, f"the mask at {where(node)} has more dims or rows than the scores")
    if is_op(value, aten.full_like.default) and set(value.users) == {node}:
        walk.inner.append(value)  # reads the scores for their shape alone
    walk.pieces.append(MaskTerm(mask, node, closed, opens))
    return scores


def leads_to_matmul(node: Any, steps: int = FAR) -> bool:
    """Whether the scores come this way: up through masks, factors and views to a matmul."""
    while isinstance(node, Node) and node.op == "call_function" and steps:
        steps -= 1
        if node.target in MATMULS:
            return len({tensor_of(n).dim() for n in operands(node) or (node,)}) == 1
        sides = node.args[:2] if is_op(node, *ADDS) else node.args[1:3] if is_op(node, *WHERES) else ()
        if sides:
            return any(leads_to_matmul(side, steps // 2) for side in sides)
        if not is_op(node, *THROUGH):
            return False
        node = node.args[0]
    return False
