"""The masks of one attention as the op's arguments: positions where they are proven, one tensor for the rest.

What a mask closes is -inf or a very low number. The two differ in a row that is closed throughout: NaN from the one,
the mean of all values from the other. So a boolean that closes with a low number is added as numbers, what closes (or
may close) with -inf sets `nan_rows`, and positions stand beside another mask only as -inf. Alone, positions that
leave every query a key may close with any number that comes to -inf there (`as_good_as_inf`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graft.ir.edit import Editor
from graft.ir.nodes import is_op, same_sizes, static_int, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.ir.sizes.follow import Sample, SizeEvaluator, number
from graft.ops.attention.reference import positions_mask
from graft.passes.library.attention.operands import Operand, ViewStep, emit, lifted
from graft.passes.library.attention.parts import Attention, MaskTerm, lowest

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
    pieces: tuple[MaskTerm, ...] = ()
    views: tuple[tuple[ViewStep, ...], ...] = ()
    nan_rows: bool = False
    stays: tuple[str, ...] = ()  # for every piece, why it is a tensor

    @property
    def tensor(self) -> str:
        """The same for masks that are the same tensor: layers share it."""
        pieces = [(p.node.name, p.value, p.opens, str(tensor_of(p.at).dtype)) for p in self.pieces]
        return f"{pieces} {self.views}"


def plan_masks(found: Attention, evaluator: SizeEvaluator) -> MaskPlan:
    """What the op is told. Raises Refused where no telling gives the same result."""
    located = [(piece, positions(piece, found, evaluator)) for piece in found.pieces]
    located = [(piece, at) for piece, at in located if at != OPEN]
    if all(isinstance(at, tuple) for _, at in located):
        return joined_positions(found.is_causal, [at for _, at in located if isinstance(at, tuple)])
    values = {piece: closing_value(piece, evaluator) for piece, _ in located}
    outside = [(piece, at) for piece, at in located if isinstance(at, tuple) and values[piece] == -math.inf]
    kept = [(piece, at) for piece, at in located if (piece, at) not in outside]
    check_kept([piece for piece, _ in kept], values, softmax_rows=found.softmax_rows)
    plan = joined_positions(found.is_causal, [at for _, at in outside])
    unsure = any(values[piece] in (None, -math.inf) for piece, _ in kept)
    inputs, views = zip(*(four_dims(piece, found) for piece, _ in kept), strict=True)
    stays = tuple(f"the mask {where(piece.node)} stays a tensor: {why(at)}" for piece, at in kept)
    nan_rows = found.softmax_rows and (unsure or bool(outside))
    return replace(plan, pieces=inputs, views=views, nan_rows=nan_rows, stays=stays)


def why(at: Positions | str) -> str:
    return (
        at if isinstance(at, str) else "it closes with a finite number beside another mask, whose rows it may close"
    )


def joined_positions(is_causal: bool, found: Sequence[Positions]) -> MaskPlan:
    windows = [window for _, window in found if window is not None]
    return MaskPlan(is_causal or any(c for c, _ in found), min(windows, default=None))


def check_kept(kept: Sequence[MaskTerm], values: dict[MaskTerm, float | None], *, softmax_rows: bool) -> None:
    """Whether one tensor gives what the masks give one after the other."""
    added = [p for p in kept if p.value is None and not p.boolean]
    unknown = [p for p in added if values[p] is None]
    if len(kept) > 1 and len(unknown) > 1:
        raise Refused(
            unknown[0].at,
            f"two masks of unknown values are added, at {where(unknown[0].at)} and {where(unknown[1].at)}",
        )
    for piece in kept:
        dtype = tensor_of(piece.at).dtype
        if len(kept) > 1 and values[piece] not in (None, -math.inf, torch.finfo(dtype).min):
            raise Refused(
                piece.at, f"the mask at {where(piece.at)} closes with {values[piece]}, and is not the only one"
            )
        if softmax_rows and dtype == torch.float16 and values[piece] not in (None, -math.inf, 0.0):
            raise Refused(  # float16 rounds the scores away below it, a kernel that adds in float32 does not
                piece.at,
                f"{where(piece.at)} closes with the lowest float16; in the op a closed row would not be the same",
            )


def closing_value(piece: MaskTerm, evaluator: SizeEvaluator) -> float | None:
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


# In float32 softmax gives nothing to a score that lies this much below the row's maximum: exp(-104) rounds to 0.
VANISHES = 104.0
ROUNDED = 1 + 2**-6  # a score with the number added to it is rounded, to 8 bits in bfloat16


def as_good_as_inf(found: Attention, dtype: torch.dtype) -> float:
    """The highest number that, added to or put in place of a score, gives it no weight where a key stays open.

    What is added to a score must outweigh the distance between two scores of a row. With a soft cap c that is at most
    2c. Without one, q·kᵀ was finite before it was scaled, so scores are within the dtype's maximum times the scale.
    What counts as the dtype's lowest number (`lowest`) closes whatever the scale: only scores as low undercut it.
    """
    bound = abs(found.softcap) if found.softcap is not None else torch.finfo(dtype).max * min(abs(found.scale), 1.0)
    return max(lowest(dtype), -(2 * bound + VANISHES) * ROUNDED)


def positions(piece: MaskTerm, found: Attention, evaluator: SizeEvaluator) -> Positions | str:
    """is_causal and window where the mask follows from sizes and means exactly that, at every size it was tried; or
    why it does not."""
    s, t = found.q.shape[2], found.k.shape[2]
    dtype = tensor_of(piece.at).dtype
    low = as_good_as_inf(found, dtype)
    key = (piece.node, piece.opens, piece.value, str(s), str(t), dtype, low)
    if key not in evaluator.kept:
        samples = evaluator.samples(piece.node, (s, t))
        evaluator.kept[key] = meaning([allowed(piece, sample, low) for sample in samples]) if samples else UNKNOWN
    return evaluator.kept[key]


UNKNOWN = "it does not follow from sizes alone, by ops that are evaluated for masks"


def allowed(piece: MaskTerm, sample: Sample, low: float) -> Tensor | str:
    """[s, t], True where a query may look; or why that is not all there is to say."""
    mask = sample.tensor
    if mask.dtype == torch.bool:
        opened = mask if piece.opens else ~mask
        if piece.value is not None and piece.value > low:
            return too_high(piece.value, piece)
    else:
        opened = mask == 0
        other = mask[~(opened | (mask <= low))]
        if other.numel():
            one_value = bool((other == other.reshape(-1)[0]).all()) and bool(other.reshape(-1)[0] < 0)
            return (
                too_high(float(other.reshape(-1)[0]), piece)
                if one_value
                else "it holds more than 0 and one low number"
            )
    s, t = sample.sizes
    if opened.dim() == 0 or opened.shape[-1] not in (1, t) or (opened.dim() > 1 and opened.shape[-2] not in (1, s)):
        return f"its shape {list(opened.shape)} is not that of {s} queries and {t} keys"
    opened = opened.expand(*opened.shape[:-2], s, t).reshape(-1, s, t) if opened.dim() > 1 else opened.expand(1, s, t)
    if not (opened == opened[0]).all():
        return "its rows differ between sequences or heads"
    return opened[0] if opened[0].any(-1).all() else "it leaves a query without any key"


def too_high(value: float, piece: MaskTerm) -> str:
    dtype = str(tensor_of(piece.at).dtype)
    return (
        f"it closes with {value:g}, and {dtype} scores may lie further apart than that; close with -inf, or with"
        f" torch.finfo({dtype}).min"
    )


def meaning(open_keys: Sequence[Tensor | str]) -> Positions | str:
    known = [keys for keys in open_keys if isinstance(keys, Tensor)]
    if len(known) < len(open_keys):
        return next(reason for reason in open_keys if isinstance(reason, str))
    width = int(max(known, key=Tensor.numel)[-1].sum())  # the last query sees as much as any
    for is_causal, window in (OPEN, (True, None), (False, width), (True, width)):
        if all(torch.equal(keys, expected(keys, is_causal, window)) for keys in known):
            return is_causal, window
    return "it is neither causal nor a window"


def expected(keys: Tensor, is_causal: bool, window: int | None) -> Tensor:
    s, t = keys.shape
    mask = positions_mask(s, t, is_causal, window, keys.device)
    return torch.ones_like(keys) if mask is None else mask[0, 0]


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────


def four_dims(piece: MaskTerm, found: Attention) -> tuple[MaskTerm, tuple[ViewStep, ...]]:
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
        raise Refused(
            piece.node, f"the mask {where(piece.node)} is folded to [b * h, s, t], and its heads cannot be told"
        )
    return piece, ((aten.reshape.default, ([-1, heads, shape[1], shape[2]],)),)


def leading(rank: int) -> tuple[ViewStep, ...]:
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


def call_closed(call: Any, piece: MaskTerm, node: Node, below: Node | None) -> Node:
    """The masks below, or zero, where a boolean opens; what it closes with elsewhere."""
    dtype = tensor_of(piece.at).dtype
    if below is not None and piece.opens:
        return call(aten.where.ScalarOther, node, below, piece.value)
    if below is not None:
        return call(aten.where.ScalarSelf, node, piece.value, below)
    pair = (0.0, piece.value) if piece.opens else (piece.value, 0.0)
    added = call(aten.where.Scalar, node, *pair)
    return added if tensor_of(added).dtype == dtype else call(aten.to.dtype, added, dtype)
