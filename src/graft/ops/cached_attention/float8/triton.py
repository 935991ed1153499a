"""Heads on their way into a float8 cache (paged_cache.py): their scales, and themselves divided by those."""

from __future__ import annotations

import triton
import triton.language as tl

from graft.ops.fused_linear.round_rows import LEAST, TOP, to_fp8
from graft.ops.triton_math import INTERPRETED


@triton.jit
def scales_for(heads):
    """[m, d] → [m, 1], with which the largest magnitude of each is 448; NaN where a head has one."""
    wide = heads.to(tl.float32)
    broken = tl.sum(wide * 0.0, axis=1)  # NaN where one is no number, which a maximum passes over
    return (tl.maximum(tl.max(tl.abs(wide), axis=1) / TOP, LEAST) + broken)[:, None]


@triton.jit
def larger(a, b):
    """The scales of heads of which one has a part and the other the rest."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divided(heads, scales):
    return to_fp8(heads.to(tl.float32) * (1.0 / scales), INTERPRETED)
