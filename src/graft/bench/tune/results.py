"""What timers of kernels give, and what they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.bench.loads.spread import Spread
from graft.ops.fused_linear.kinds import LinearShape
from graft.weights.packing import GROUP

BITS = {"plain": 16, "int8": 8, "fp8": 8, "int4": 4}
Result = float | str  # microseconds, or why it did not run


def weight_bytes(shape: LinearShape) -> int:
    """What a GEMM reads of its weight and scales."""
    rows = 2 * shape.n if shape.gated else shape.n
    scales = {"plain": 0, "int8": 4, "fp8": 4, "int4": 2 * -(-shape.k // GROUP)}[shape.format]
    return rows * (shape.k * BITS[shape.format] // 8 + scales)


@dataclass(frozen=True)
class StepSample:
    """Microseconds of a decode step: us, by which choices are compared; the median and the slowest of a hundred."""

    us: float
    p50: float
    p99: float


def step_sample(us: float, seconds: Sequence[float]) -> StepSample:
    """seconds: of each step that only decoded."""
    spread = Spread.of(seconds)
    if spread is None:
        return StepSample(us, us, us)
    return StepSample(us, round(1e3 * spread.p50, 3), round(1e3 * spread.p99, 3))
