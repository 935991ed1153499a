"""Two engines in turns, step for step: what one saves, and how much of that is noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graft.bench.bench import WARM_UP, prompts_for
from graft.bench.plan import Cell
from graft.bench.runner import Graft, Runner
from graft.engine.llm import LLM

CERTAIN = 2.0  # standard errors


@dataclass(frozen=True)
class ShapeTimes:
    """Milliseconds of a step of one shape, repeat by repeat, without the fusion and with it."""

    shape: str  # decode, prefill
    before: tuple[float, ...]
    after: tuple[float, ...]

    @staticmethod
    def of(data: dict[str, Any]) -> ShapeTimes:
        return ShapeTimes(data["shape"], tuple(data["before"]), tuple(data["after"]))

    @property
    def measurable(self) -> bool:
        """A decode step is the difference of two calls, which may be less than nothing where steps are short."""
        return all(time > 0 for time in (*self.before, *self.after))

    @property
    def saving(self) -> float:
        """The share of a step: the median over pairs that were measured one after the other."""
        return statistics.median(self.shares) if self.measurable else 0.0

    @property
    def shares(self) -> list[float]:
        return [(a - b) / a for a, b in zip(self.before, self.after, strict=True)]

    @property
    def noise(self) -> float:
        """Of that median: from the spread of the pairs around it, which a few disturbed ones do not move."""
        if not self.measurable:
            return 1.0
        middle = self.saving
        spread = 1.4826 * statistics.median(abs(share - middle) for share in self.shares)
        return CERTAIN * 1.2533 * spread / math.sqrt(len(self.shares))

    def to_dict(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "before": list(self.before),
            "after": list(self.after),
            "before_ms": statistics.median(self.before),
            "after_ms": statistics.median(self.after),
            "saving": self.saving,
            "noise": self.noise,
        }


def verdict(times: Sequence[ShapeTimes], gain: float) -> tuple[bool, str]:
    """Whether it pays: a shape gets faster by `gain` and more than noise, and none gets slower by as much."""
    lost = next((one for one in times if not one.measurable), None)
    if lost is not None:
        return False, f"{lost.shape} steps are shorter than the noise of their times"
    told = ", ".join(f"{one.shape} {one.saving:+.1%} ± {one.noise:.1%}" for one in times)
    worse = next((one for one in times if -one.saving >= gain and -one.saving > one.noise), None)
    if worse is not None:
        return False, f"a {worse.shape} step gets slower: {told}"
    if any(one.saving >= gain and one.saving > one.noise for one in times):
        return True, told
    return False, f"no step gets {gain:.0%} faster and by more than noise: {told}"


def alternate(before: LLM, after: LLM, prompt: int, new: int, repeats: int) -> tuple[ShapeTimes, ...]:
    """Decode steps and prefills of both, the one that goes first changing from repeat to repeat."""
    cell = Cell(1, prompt)
    calls = prompts_for(before.model, cell)
    runners = [Runner(Graft(llm), llm.device) for llm in (before, after)]
    warm = [next(calls)]
    for runner in runners:
        runner.warm_up(warm, WARM_UP)
    for repeat in range(repeats):
        short, long, idle = ([next(calls)] for _ in range(3))
        for runner in runners if repeat % 2 == 0 else runners[::-1]:
            runner.measure(short, long, new, idle)
            if runner.failed:
                raise RuntimeError(runner.failed)
    one, other = runners
    steps = [tuple(1e3 * rest / new for rest in runner.rest) for runner in runners]
    firsts = [tuple(1e3 * first for first in runner.first) for runner in (one, other)]
    return (ShapeTimes("decode", *steps), ShapeTimes("prefill", *firsts))
