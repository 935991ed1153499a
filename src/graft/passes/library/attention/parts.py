"""What reading attention gives: the masks it meets, the state of a walk, and the whole in the op's terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import tensor_of
from graft.passes.library.attention.operands import Operand


def lowest(dtype: torch.dtype) -> float:
    """From here on a number counts as the dtype's lowest: bfloat16's in float32, say.

    A score below 1e30 that is added to half the largest float32 is rounded away. float16 is too fine for that.
    """
    limits = torch.finfo(dtype)
    return limits.min if dtype == torch.float16 else limits.min / 2


@dataclass(frozen=True)
class MaskTerm:
    """One mask where it met the scores.

    node: the boolean or added tensor. value: what a boolean closes with, None for an added tensor and for the mask of
    scaled_dot_product_attention. opens: a boolean is True where a query may look.
    """

    node: Node
    at: Node
    value: float | None = None
    opens: bool = True

    @property
    def boolean(self) -> bool:
        return tensor_of(self.node).dtype == torch.bool


@dataclass
class ScoreChain:
    """What the way from softmax up to the first matmul holds."""

    gm: GraphModule
    inner: list[Node]
    pieces: list[MaskTerm] = field(default_factory=list)
    scale: float = 1.0
    softcap: float | None = None
    sinks: Node | None = None
    sinks_first: bool = False
    sinks_at: Node | None = None  # where they join the scores
    shifted: bool = False  # the row's maximum is taken away before softmax
    scaled: bool = False  # past the masks: a factor was read


@dataclass(frozen=True)
class Attention:
    """A site that is attention, in the op's terms."""

    anchor: Node
    out: Node
    inner: tuple[Node, ...]  # every node that goes, besides `out`
    q: Operand
    k: Operand
    v: Operand
    order: tuple[int, ...]  # of the result's dims, seen from […, s, d]
    scale: float
    pieces: tuple[MaskTerm, ...] = ()  # in the order in which the scores meet them
    softcap: float | None = None
    sinks: Node | None = None
    is_causal: bool = False
    softmax_rows: bool = True  # a row that is closed throughout is what softmax makes of it, NaN or the mean
    folded: tuple[Any, ...] | None = None  # sizes of [b * h, s, d]; () for a single head without its dim
