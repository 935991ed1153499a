"""How far off a replacement is, and how far off it may be: a few times as far as the original is in that dtype.

The yardstick is float64. The original's own distance from it is the error analysis of that computation in that dtype;
the floor below it is one rounding of the result and the sum of the longest reduction, which another order of the same
operations may cost. A bound above a tenth of the values says nothing: such a trial counts as not covered unless the
replacement keeps within that tenth, or gives the original's very bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.ops.cases import UNIT
from graft.passes.numeric.execution import Execution
from graft.passes.numeric.inputs import same

TIMES = 3.0  # as far off as the original
CEILING = 0.1  # of the largest value
GAIN = 3.5  # roundings by which the mean factor of all values may be off, over the root of the number of rows


@dataclass(frozen=True)
class Difference:
    """Both relative to the largest exact value. unclear: why the bound means nothing here; '' where it does."""

    error: float = 0.0
    limit: float = 0.0
    unclear: str = ""
    what: str = "off"

    @property
    def wrong(self) -> bool:
        return not self.error <= self.limit and not self.unclear


def difference(exact: Tensor, before: Tensor, after: Tensor, execution: Execution) -> Difference:
    """execution: the original's."""
    if before.shape != after.shape or before.dtype != after.dtype:
        given = f"{after.dtype} {tuple(after.shape)}, not {before.dtype} {tuple(before.shape)}"
        return Difference(float("inf"), 0.0, what=f"{given}, so it is off")
    if not before.is_floating_point() and not before.is_complex():
        return decisions(exact, before, after)
    dtype = torch.complex128 if before.is_complex() else torch.float64
    right, first, second = (t.to(dtype) for t in (exact, before, after))
    if lost_specials(right, first, second):
        return Difference(float("inf"), 0.0, what="finite where the original is not: off")
    counts = torch.isfinite(first) & torch.isfinite(right) & ~rounds_to_infinity(exact, after)
    right, first, second = right[counts], first[counts], second[counts]
    scale = largest(right)
    unit, own, error = scale or 1.0, largest(first - right), largest(second - right)
    roots = max(execution.longest, 1) ** 0.5
    floor = roundings(execution) * scale
    info = torch.finfo(before.dtype)
    limit = max(TIMES * own, floor) + info.tiny * info.eps * roots  # the last: one step among subnormal numbers each
    if limit > CEILING * unit:
        return beyond_ceiling(error / unit, limit / unit, own / unit, same(before, after))
    found = Difference(error / unit, limit / unit)
    normal = info.tiny / info.eps
    return found if found.wrong else gain(right, first, second, row_rounding(after, execution), normal) or found


def decisions(exact: Tensor, before: Tensor, after: Tensor) -> Difference:
    """Whole numbers (a routing, an index) are equal, or the original itself decides otherwise than float64."""
    apart = float((before != after).any())
    unclear = "the original itself decides otherwise than float64" if apart and not same(exact, before) else ""
    return Difference(apart, 0.0, unclear)


def roundings(execution: Execution) -> float:
    """What another order of the same operations may cost, relative to the largest value."""
    precision = UNIT[execution.coarsest]
    return 2 * precision + 4 * min(precision, UNIT[torch.float32]) * max(execution.longest, 1) ** 0.5


def row_rounding(result: Tensor, execution: Execution) -> float:
    """What roundings may be off by in the mean over all rows: a sum that is off is a factor on its whole row."""
    precision = UNIT[execution.coarsest]
    each = precision + 4 * min(precision, UNIT[torch.float32]) * max(execution.longest, 1) ** 0.5
    rows = max(result.numel() // max(result.shape[-1], 1), 1) if result.dim() else 1
    return each / rows**0.5


def close(before: Tensor, after: Tensor, execution: Execution) -> bool:
    """Whether two results are so near each other that there is nothing to look into."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if not before.is_floating_point() or not before.numel():
        return same(before, after)
    first, second = before.double(), after.double()
    apart, scale = (first - second).abs().max().item(), first.abs().max().item()
    if not apart <= 0.5 * roundings(execution) * scale < float("inf"):
        return False
    info = torch.finfo(before.dtype)
    return gain(first, first, second, row_rounding(after, execution), info.tiny / info.eps) is None


def beyond_ceiling(error: float, limit: float, own: float, equal: bool) -> Difference:
    if equal or error <= CEILING:
        return Difference(0.0 if equal else error, CEILING)
    if error > limit:
        return Difference(error, limit)
    return Difference(error, limit, unclear=f"the original itself is off by {own:.0%} of the values")


def gain(right: Tensor, first: Tensor, second: Tensor, rounding: float, normal: float) -> Difference | None:
    """A factor on all values that hides below the rounding of each (× 1.001 in bfloat16): roundings cancel out in
    the mean over many, a factor does not. None where that is not so, or too small a number to tell."""
    power = (right * right.conj()).sum().real.item() if right.is_complex() else (right * right).sum().item()
    if not normal**2 < power < float("inf"):
        return None
    factors = [abs(complex((t * right.conj()).sum().item()) / power - 1) for t in (first, second)]
    limit = factors[0] + GAIN * rounding
    return Difference(factors[1], limit, what="off in the mean") if factors[1] > limit else None


def lost_specials(right: Tensor, first: Tensor, second: Tensor) -> bool:
    """Where the original gives no finite number and float64 gives none either, the replacement must give none, and an
    infinity keeps its sign. Where the original alone overflowed, the replacement may do the same or be right."""
    odd = ~torch.isfinite(first)
    if not bool(odd.any()):
        return False
    right, first, second = right[odd], first[odd], second[odd]
    alike = (first == second) | (first.isnan() & ~torch.isfinite(second)) | second.isnan()
    overflowed = torch.isfinite(right) & ((second - right).abs() <= 1e-2 * right.abs())
    return not bool((alike | overflowed).all())


def rounds_to_infinity(exact: Tensor, after: Tensor) -> Tensor:
    """Where the replacement is infinite because the exact number is beyond its dtype. That the original is finite
    there (a sum of squares that overflowed below a root gives 0) makes it no better."""
    nearest = exact.to(after.dtype)
    return torch.isfinite(exact) & torch.isinf(nearest) & (nearest == after)


def largest(values: Tensor) -> float:
    """The largest magnitude; not a number counts as infinitely far."""
    return values.abs().nan_to_num(nan=float("inf")).max().item() if values.numel() else 0.0
