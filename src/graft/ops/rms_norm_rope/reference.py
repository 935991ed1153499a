"""RMSNorm of every head, then the rotary embedding: the two references one after the other."""

from __future__ import annotations

from torch import Tensor

from graft.ops.rms_norm.reference import rms_norm
from graft.ops.rope.reference import rope


def rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float = 0.0,
    cast_last: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """x: [b, h, s, d], [b, s, h, d] or [t, h, d]; weight: [d]; cos, sin as graft::rope takes them for that layout."""
    return rope(rms_norm(x, weight, eps, offset, cast_last), cos, sin, interleaved)
