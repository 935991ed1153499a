"""Kernel times of two runs: which changed by more than readings of the same kernel differ by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.stages.story import Story
from graft.workbench.diff_text import StyledLine
from graft.workbench.stages.words import cut, range_of, times_text

# What two processes with the same code differ by, beside the range of readings in one of them: on busy cores a small
# matmul took 2.6 µs in three processes and 4.5 in the fourth; a GPU is timed by its own events.
OF_A_CPU, OF_A_GPU = 2.0, 0.3  # µs a launch
SHARE = 0.05  # of the time
Range = tuple[float, float]


@dataclass(frozen=True)
class KernelTimes:
    """µs in all launches of kernels of one name, without its number, before and after; None where there is none.
    before_range, after_range: of the readings. within_noise: the readings do not tell them apart."""

    name: str
    before: float | None
    after: float | None
    before_range: Range | None = None
    after_range: Range | None = None
    within_noise: bool = False

    @property
    def change(self) -> float:
        return (self.after or 0.0) - (self.before or 0.0)


@dataclass(frozen=True)
class Taken:
    """noise: what this many launches differ by from process to process."""

    us: float
    between: Range
    noise: float

    def __add__(self, other: Taken) -> Taken:
        low, high = (one + two for one, two in zip(self.between, other.between, strict=True))
        return Taken(round(self.us + other.us, 3), (round(low, 3), round(high, 3)), self.noise + other.noise)


NOTHING = Taken(0.0, (0.0, 0.0), 0.0)


def diff_times(before: Story, after: Story) -> tuple[KernelTimes, ...]:
    """Those that changed most come first."""
    left, right = kernel_times(before), kernel_times(after)
    found = [compared(name, left.get(name), right.get(name)) for name in dict.fromkeys((*left, *right))]
    return tuple(sorted(found, key=lambda one: -abs(one.change)))


def kernel_times(story: Story) -> dict[str, Taken]:
    reading = OF_A_GPU if story.device.startswith("cuda") else OF_A_CPU
    found: dict[str, Taken] = {}
    for kernel in story.kernels.kernels:
        if kernel.us:
            name = kernel.name.rstrip("0123456789").rstrip("_")
            low, high = (kernel.launches * one for one in range_of(kernel))
            us = kernel.launches * kernel.us
            taken = Taken(us, (low, high), kernel.launches * reading + SHARE * us)
            found[name] = found.get(name, NOTHING) + taken
    return found


def compared(name: str, before: Taken | None, after: Taken | None) -> KernelTimes:
    if before is None or after is None:
        told = [(one.us, one.between) if one else (None, None) for one in (before, after)]
        return KernelTimes(name, told[0][0], told[1][0], told[0][1], told[1][1])
    return KernelTimes(name, before.us, after.us, before.between, after.between, alike(before, after))


def alike(one: Taken, two: Taken) -> bool:
    """Their ranges overlap, or lie no further apart than those of one program in two processes."""
    apart = max(one.between[0], two.between[0]) - min(one.between[1], two.between[1])
    return apart <= max(one.noise, two.noise)


def time_lines(times: Sequence[KernelTimes], unfold: bool) -> list[StyledLine]:
    """The sum, and the kernels whose time changed by more than noise; all of them with `unfold`."""
    if not times:
        return []
    before, after = (sum(t or 0.0 for t in side) for side in zip(*((o.before, o.after) for o in times), strict=True))
    changed = [one for one in times if not one.within_noise]
    noise = "" if changed else ", each within noise"
    lines = [StyledLine("head", f"kernel times, each alone: {before:.1f} → {after:.1f} µs{noise}")]
    texts = [time_line(one) for one in (times if unfold else changed)]
    return lines + [StyledLine("plain", text) for text in (texts if unfold else cut(texts, 8))]


def time_line(one: KernelTimes) -> str:
    noise = ", within noise" if one.within_noise else ""
    return f"  {one.name}: {time_text(one.before, one.before_range)} → {time_text(one.after, one.after_range)}{noise}"


def time_text(us: float | None, between: Range | None) -> str:
    return "none" if us is None else times_text(us, between or ())
