"""What quantizing did to a weight, read back from what is stored; and whether that is all it did.

A quantized weight may differ from the original by its rounding and by nothing else: every number is the nearest one
that its scale can give, and no group loses more than half a step of plain scaling on average. Scales that belong to
another row or group break the first, scales that are too large or too small break the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.base.errors import QuantizationError
from graft.weights.packing import GROUP, MIDDLE, PACKED, unpack_bytes, unpack_int4
from graft.weights.quantize import FP8_TOP, INT4_TOP, INT8_TOP, least_scale, pieces

HALF = 0.5  # a step: the nearest number is no further away
# The quotient of a weight and its scale is rounded to float32, here and there: 2 roundings of numbers up to 448.
SLACK = 448 * 2**-22
# A scale in bfloat16 is up to 2^-9 off, so the largest weight may be clipped by that much of 7 steps.
LOSS_SLACK = 1 + 2**-5


@dataclass(frozen=True)
class Rounding:
    """relative: ‖q · s − w‖ / ‖w‖. steps: how far the worst weight is from where it was, in steps of its scale (of
    fp8, of its own exponent); what is clipped counts from the end of the range."""

    relative: float
    steps: float


def measure(
    weight: Tensor, q: Tensor, scale: Tensor, name: str = "the weight", columns: Tensor | None = None
) -> Rounding:
    """Compares the stored form with the original times `columns`; raises QuantizationError for more than rounding."""
    lost = total = torch.zeros((), dtype=torch.float64, device=weight.device)
    worst = torch.zeros((), device=weight.device)
    for rows, piece in pieces(weight, columns):
        groups, whole, step = in_groups(piece, q[rows], scale[rows])
        difference = whole * step - groups
        check_loss(difference, groups, q.dtype, scale.dtype, name)
        worst = torch.maximum(worst, steps_off(groups / step, whole, q.dtype).amax())
        lost = lost + difference.double().square().sum()
        total = total + groups.double().square().sum()
    steps = float(worst)
    if not steps <= HALF + SLACK:
        raise QuantizationError(
            f"{name}: a quantized weight is {steps:.3g} steps from the original, and 0.5 is what rounding allows;"
            " its scale is not the one it was rounded with"
        )
    return Rounding(float((lost / total).sqrt()) if float(total) else 0.0, steps)


def in_groups(piece: Tensor, q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, stored numbers and scale of what shares one, all float32: [rows, groups, size], the last [.., 1]."""
    if q.dtype is not PACKED:
        return piece[:, None], unpack_bytes(q, piece.shape[1]).float()[:, None], scale.float()[:, None, None]
    n, k = piece.shape
    groups = scale.shape[1]
    padding = (0, groups * GROUP - k)
    weights = torch.nn.functional.pad(piece, padding).view(n, groups, GROUP)
    whole = torch.nn.functional.pad(unpack_int4(q, k), padding).float().view(n, groups, GROUP)
    return weights, whole, scale.float()[..., None]


def steps_off(exact: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    """How far each stored number is from the exact quotient, in steps."""
    if dtype is torch.int8:
        return (whole - exact.clamp(-INT8_TOP, INT8_TOP)).abs()
    if dtype is PACKED:
        return (whole - exact.clamp(-MIDDLE, INT4_TOP)).abs()
    exact = exact.clamp(-FP8_TOP, FP8_TOP)
    # e4m3: 8 steps between two powers of 2, and none finer than 2^-9
    step = torch.exp2(exact.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (whole - exact).abs() / step


def check_loss(difference: Tensor, groups: Tensor, dtype: torch.dtype, kept: torch.dtype, name: str) -> None:
    """Raises where a group lost more than half a step of plain scaling, on average."""
    top = {torch.int8: INT8_TOP, PACKED: INT4_TOP}.get(dtype, 16)  # fp8: half a step is 1/16 of a number
    half = groups.abs().amax(-1) / top * (1.0 if top == 16 else HALF)
    loss = difference.square().mean(-1).sqrt()
    floor = MIDDLE * least_scale(kept)  # where scales are that coarse themselves
    if bool((loss > half * LOSS_SLACK + floor).any()):
        raise QuantizationError(
            f"{name}: a group of quantized weights lost more than rounding does; its scale is off"
        )
