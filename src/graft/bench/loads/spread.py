"""Loads and spreads of times, whoever is measured: an engine in this process, or a server."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from graft.base.errors import PromptTooLong, UsageError

PERCENTILES = (50, 90, 99)
HEALTHY = 0.95  # of the asked rate
LEAST_TOKENS = 300_000  # new ones, of a load without a number of requests: some ten seconds of a large GPU


@dataclass(frozen=True)
class Load:
    """`isl` tokens of a prompt, `osl` new ones; `rate`: requests a second, exponential gaps; None: all at once."""

    isl: int
    osl: int
    requests: int
    rate: float | None = None

    def __post_init__(self) -> None:
        if min(self.isl, self.osl, self.requests) < 1:
            raise UsageError(
                f"lengths and --requests must be at least 1, but are {self.name} (ISL/OSL) and {self.requests}"
            )
        if self.rate is not None and not self.rate > 0:
            raise UsageError(f"--rate must be more than 0 requests a second, but is {self.rate}")

    @property
    def name(self) -> str:
        return f"{self.isl}/{self.osl}"

    def check_context(self, context: int | None) -> None:
        if context is not None and self.isl + self.osl > context:
            raise PromptTooLong(self.isl, self.osl, context)

    def arrivals(self) -> list[float]:
        """Seconds after the beginning; the same in every run. Gaps are scaled to keep the rate exactly: a few dozen
        of them have a rate of their own."""
        if self.rate is None:
            return [0.0] * self.requests
        source, at, times = random.Random(0), 0.0, []
        for _ in range(self.requests):
            times.append(at)
            at += source.expovariate(self.rate)
        last = (self.requests - 1) / self.rate
        return [last * one / times[-1] for one in times] if last else times


@dataclass(frozen=True)
class AskedLoad:
    """As it was asked for: without a number of requests it takes one that fits an engine."""

    isl: int
    osl: int
    requests: int | None
    rate: float | None = None

    def among(self, seqs: int, blocks: int, block_size: int) -> Load:
        """requests: as many as run at once, or that several times: a batch that never fills, or a few requests that
        are left over and decode alone, measure something else. seqs, blocks: of the engine."""
        at_once = min(seqs, max(blocks // -(-(self.isl + self.osl) // block_size), 1))
        waves = -(-LEAST_TOKENS // (at_once * self.osl))
        return self.with_requests(at_once * waves)

    def with_requests(self, count: int) -> Load:
        """count: if none was asked for."""
        return Load(self.isl, self.osl, count if self.requests is None else self.requests, self.rate)


@dataclass(frozen=True)
class Spread:
    """Milliseconds."""

    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread | None:
        if not seconds:
            return None
        cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
        return Spread(*(1e3 * cuts[p - 1] for p in PERCENTILES))


@dataclass(frozen=True)
class HistogramBin:
    """Steps that took no more than so many milliseconds, and more than the bin before it has."""

    up_to_ms: float
    decode: int
    prompts: int  # steps with prompts in them


def histogram(decode: Sequence[float], prompts: Sequence[float]) -> tuple[HistogramBin, ...]:
    """By 1, 2, 5, 10, … ms, from the first bin that has a step to the last. Seconds are given."""
    counts = [Counter(map(bin_of, some)) for some in (decode, prompts)]
    used = counts[0] | counts[1]
    if not used:
        return ()
    indices = range(min(used), max(used) + 1)
    return tuple(HistogramBin(bin_end(i), counts[0][i], counts[1][i]) for i in indices)


def bin_end(index: int) -> float:
    return (1.0, 2.0, 5.0)[index % 3] * 10.0 ** (index // 3)


def bin_of(seconds: float) -> int:
    index = -9  # a microsecond
    while bin_end(index) < 1e3 * seconds:
        index += 1
    return index


def behind_text(rate: float | None, ends: Sequence[float]) -> str:
    """Why the asked rate of requests a second was not kept. ends: when each was answered, in seconds; how long one
    answer takes does not count between the first and the last of them."""
    seconds = max(ends, default=0.0) - min(ends, default=0.0)
    if rate is None or not seconds:
        return ""
    reached = (len(ends) - 1) / seconds
    if reached >= HEALTHY * rate:
        return ""
    return f"{rate:g} requests/s were asked for and {reached:.2f} were kept up: lower --rate to that"
