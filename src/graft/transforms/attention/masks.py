"""The masks of one attention as the op's arguments: positions where they are proven, one tensor for the rest.

What a mask closes is -inf or the lowest number of the dtype. The two differ in a row that is closed throughout: NaN
from the one, the mean of all values from the other. So a boolean that closes with the lowest number is added as
numbers, what closes (or may close) with -inf sets `nan_rows`, and positions stand beside another mask only as -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graft.graph.edit import Editor
from graft.graph.nodes import is_op, same_sizes, static_int, tensor_of, where
from graft.graph.sizes import Sample, SizeEvaluator, number
from graft.ops.attention.reference import positions_mask
from graft.transforms.attention.operands import Operand, Step, emit, lifted
from graft.transforms.attention.parts import Attention, Piece, Refused

aten = torch.ops.aten
Positions = tuple[bool, int | None]  # is_causal, window
OPEN: Positions = (False, None)
SAME_VALUES = (
    *(aten.expand.default, aten.unsqueeze.default, aten.slice.Tensor, aten.reshape.default, aten.to.dtype),
    aten.contiguous.default,
)


@dataclass(frozen=True)
class MaskPlan:
    """Positions, and the masks that stay tensors with the views that give them four dims."""

    is_causal: bool = False
    window: int | None = None
    pieces: tuple[Piece, ...] = ()
    views: tuple[tuple[Step, ...], ...] = ()
    nan_rows: bool = False

    @property
    def tensor(self) -> str:
        """The same for masks that are the same tensor: layers share it."""
        pieces = [(p.node.name, p.value, p.opens, str(tensor_of(p.at).dtype)) for p in self.pieces]
        return f"{pieces} {self.views}"


def plan_masks(found: Attention, evaluator: SizeEvaluator) -> MaskPlan:
    """What the op is told. Raises Refused where no telling gives the same result."""
    placed = [(piece, positions(piece, found, evaluator)) for piece in found.pieces]
    placed = [(piece, at) for piece, at in placed if at != OPEN]
    others = [piece for piece, at in placed if at is None]
    if not others:
        return joined_positions(found.is_causal, [at for _, at in placed if at is not None])
    values = {piece: closing_value(piece, evaluator) for piece, _ in placed}
    outside = [(piece, at) for piece, at in placed if at is not None and values[piece] == -math.inf]
    kept = [piece for piece, at in placed if (piece, at) not in outside]
    check_kept(kept, values, softmax_rows=found.softmax_rows)
    plan = joined_positions(found.is_causal, [at for _, at in outside if at is not None])
    unsure = any(values[piece] in (None, -math.inf) for piece in kept)
    inputs, views = zip(*(four_dims(piece, found) for piece in kept), strict=True)
    return replace(plan, pieces=inputs, views=views, nan_rows=found.softmax_rows and (unsure or bool(outside)))


def joined_positions(is_causal: bool, places: Sequence[Positions]) -> MaskPlan:
    windows = [window for _, window in places if window is not None]
    return MaskPlan(is_causal or any(c for c, _ in places), min(windows, default=None))


def check_kept(kept: Sequence[Piece], values: dict[Piece, float | None], *, softmax_rows: bool) -> None:
    """Whether one tensor gives what the masks give one after the other."""
    added = [p for p in kept if p.value is None and not p.boolean]
    unknown = [p for p in added if values[p] is None]
    if len(kept) > 1 and len(unknown) > 1:
        raise Refused(f"two masks of unknown values are added, at {where(unknown[0].at)} and {where(unknown[1].at)}")
    for piece in kept:
        dtype = tensor_of(piece.at).dtype
        if len(kept) > 1 and values[piece] not in (None, -math.inf, torch.finfo(dtype).min):
            raise Refused(f"the mask at {where(piece.at)} closes with {values[piece]}, and is not the only one")
        if softmax_rows and dtype == torch.float16 and values[piece] not in (None, -math.inf, 0.0):
            raise Refused(  # float16 rounds the scores away below it, a kernel that adds in float32 does not
                f"{where(piece.at)} closes with the lowest float16; in the op a closed row would not be the same"
            )


def closing_value(piece: Piece, evaluator: SizeEvaluator) -> float | None:
    """What a mask closes with, everything else being zero; None where that is not known."""
    if piece.value is not None or piece.boolean:
        return piece.value
    node: Any = piece.node
    while is_op(node, *SAME_VALUES):
        node = node.args[0]
    if is_op(node, aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf):
        pair = [number(evaluator.gm, value) for value in node.args[1:3]]
    elif is_op(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        pair = [number(evaluator.gm, node.args[0]), number(evaluator.gm, node.args[2])]
    else:
        return None
    if 0.0 not in pair or None in pair:
        return None
    (closed,) = [value for value in pair if value != 0.0] or [0.0]
    assert closed is not None
    return float(torch.tensor(closed).to(tensor_of(piece.node).dtype).item())


# ── positions ───────────────────────────────────────────────────────────────────────────────────────────────────


def positions(piece: Piece, found: Attention, evaluator: SizeEvaluator) -> Positions | None:
    """is_causal and window where the mask follows from sizes and means exactly that, at every size it was tried."""
    s, t = found.q.shape[2], found.k.shape[2]
    key = (piece.node, piece.opens, str(s), str(t), tensor_of(piece.at).dtype)
    if key not in evaluator.kept:
        samples = evaluator.samples(piece.node, (s, t))
        open_places = [allowed(piece, sample) for sample in samples or ()]
        evaluator.kept[key] = meaning(open_places) if open_places else None
    return evaluator.kept[key]


def allowed(piece: Piece, sample: Sample) -> Tensor | None:
    """[s, t], True where a query may look; None when rows of the batch differ, or values are not 0 and closed."""
    mask = sample.tensor
    if mask.dtype == torch.bool:
        opened = mask if piece.opens else ~mask
    else:
        opened = mask == 0
        if not (opened | (mask <= torch.finfo(tensor_of(piece.at).dtype).min)).all():
            return None
    s, t = sample.sizes
    if opened.dim() == 0 or opened.shape[-1] not in (1, t) or (opened.dim() > 1 and opened.shape[-2] not in (1, s)):
        return None
    opened = opened.expand(*opened.shape[:-2], s, t).reshape(-1, s, t) if opened.dim() > 1 else opened.expand(1, s, t)
    return opened[0] if (opened == opened[0]).all() and opened[0].any(-1).all() else None


def meaning(open_places: Sequence[Tensor | None]) -> Positions | None:
    known = [places for places in open_places if places is not None]
    if len(known) < len(open_places):
        return None
    width = int(max(known, key=Tensor.numel)[-1].sum())  # the last query sees as much as any
    for is_causal, window in (OPEN, (True, None), (False, width), (True, width)):
        if all(torch.equal(places, expected(places, is_causal, window)) for places in known):
            return is_causal, window
    return None


def expected(places: Tensor, is_causal: bool, window: int | None) -> Tensor:
    s, t = places.shape
    mask = positions_mask(s, t, is_causal, window, places.device)
    return torch.ones_like(places) if mask is None else mask[0, 0]


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────


def four_dims(piece: Piece, found: Attention) -> tuple[Piece, tuple[Step, ...]]:
    """A mask as something that broadcasts to [b, h, s, t], read from a node through views."""
    shape = tensor_of(piece.node).shape
    if tensor_of(piece.at).dim() == 4 or len(shape) < 3 or static_int(shape[0]) == 1:
        return piece, leading(len(shape))
    if found.folded == ():  # [n, s, t] where there is one head
        return piece, ((aten.unsqueeze.default, (-3,)),)
    whole, heads = lifted(Operand.of(piece.node)), found.q.shape[1]
    if whole is not None and same_sizes(whole.shape[1:2], [heads]):
        return replace(piece, node=whole.node), whole.steps
    if None in (static_int(shape[1]), static_int(shape[2])):
        raise Refused(f"the mask {where(piece.node)} is folded to [b * h, s, t], and its heads cannot be told")
    return piece, ((aten.reshape.default, ([-1, heads, shape[1], shape[2]],)),)


def leading(rank: int) -> tuple[Step, ...]:
    """Dims of size one in front, up to four."""
    return tuple((aten.unsqueeze.default, (-(r + 1),)) for r in range(rank, 4))


def emit_mask(editor: Editor, plan: MaskPlan, found: Attention) -> tuple[Node | None, list[Node]]:
    """The op's mask, and the nodes that were made for it."""
    made: list[Node] = []

    def call(target: Any, *args: Any) -> Node:
        made.append(editor.call(target, args, before=found.out, like=found.anchor))
        return made[-1]

    whole: Node | None = None
    as_booleans = all(piece.boolean and piece.value in (None, -math.inf) for piece in plan.pieces)
    for piece, views in zip(plan.pieces, plan.views, strict=True):
        made += emit(editor, piece.node, views, found.out, found.anchor)
        node = made[-1] if views else piece.node
        if as_booleans:
            node = node if piece.opens else call(aten.bitwise_not.default, node)
            whole = node if whole is None else call(aten.bitwise_and.Tensor, whole, node)
        elif piece.boolean:
            whole = call_closed(call, piece, node, whole)
        else:
            whole = node if whole is None else call(aten.add.Tensor, whole, node)
    if whole is not None and not as_booleans:
        kinds = tensor_of(whole).dtype, tensor_of(found.q.node).dtype
        if torch.promote_types(*kinds) == kinds[1] != kinds[0]:
            whole = call(aten.to.dtype, whole, kinds[1])  # exact: the scores' dtype is the wider one
    return whole, made


def call_closed(call: Any, piece: Piece, node: Node, below: Node | None) -> Node:
    """The masks below, or zero, where a boolean opens; what it closes with elsewhere."""
    dtype = tensor_of(piece.at).dtype
    if below is not None and piece.opens:
        return call(aten.where.ScalarOther, node, below, piece.value)
    if below is not None:
        return call(aten.where.ScalarSelf, node, piece.value, below)
    pair = (0.0, piece.value) if piece.opens else (piece.value, 0.0)
    added = call(aten.where.Scalar, node, *pair)
    return added if tensor_of(added).dtype == dtype else call(aten.to.dtype, added, dtype)
