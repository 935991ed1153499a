"""One engine in one cell: its first calls, its times, and what it died of.

Times are taken with a clock around whole calls of `generate`, the device synchronised at both ends: an engine may
hand work to the device and be ahead of it. One call with a single new token gives the time to the first token, and
one with `new` more, less the former, that of the decode steps. On a GPU a call with a single token that does not
count goes before both, so that both find the device in the same state: busy, not rested.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graft.base.errors import OutOfCache, PeerNotRun
from graft.base.timers import synchronize
from graft.bench.baselines.baseline import BenchEngine
from graft.bench.limits.roofline import Roofline
from graft.bench.plan import BenchPlan, Cell
from graft.bench.rows import Row
from graft.engine.llm import LLM
from graft.engine.params import SamplingParams


class Graft:
    name = "graft"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        outputs = self.llm.generate([list(p) for p in prompts], params)
        failed = next((output.error for output in outputs if output.error), None)
        if failed is not None:
            raise failed
        if self.llm.stats.preemptions:
            raise OutOfCache("the batch does not fit into the key-value cache at once; raise --kv-cache-memory")
        return [output.token_ids for output in outputs]


@dataclass(frozen=True)
class CellWork:
    """What the cell asks of everyone: bytes that a decode step reads, floating point operations of the prompts."""

    step_bytes: float
    prompt_flops: float


@dataclass
class Runner:
    engine: BenchEngine
    device: torch.device
    prepared: float = 0.0  # seconds that it was built for before its first call
    setup_seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    failed: str = ""

    def attempt(self, work: Callable[[], Any]) -> float:
        """Seconds of `work`; whatever it raises ends this engine, not the run."""
        started = time.perf_counter()
        try:
            synchronize(self.device)
            started = time.perf_counter()
            work()
            synchronize(self.device)
        except PeerNotRun as error:
            self.failed = str(error)
        except Exception as error:  # noqa: BLE001  a baseline may die of anything, and that is its result
            lines = str(error).strip().splitlines()
            self.failed = f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
        return time.perf_counter() - started

    def warm_up(self, prompts: Sequence[Sequence[int]], new: int) -> None:
        def work() -> None:
            self.tokens = self.engine.generate(prompts, new)

        self.setup_seconds = self.attempt(work)

    def measure(
        self,
        short: Sequence[Sequence[int]],
        long: Sequence[Sequence[int]],
        new: int,
        before: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Prompts of a call with one token, of one with `new` more, and of one that does not count."""
        if before is not None and self.device.type == "cuda":
            self.attempt(lambda: self.engine.generate(before, 1))
        first = 0.0 if self.failed else self.attempt(lambda: self.engine.generate(short, 1))
        whole = 0.0 if self.failed else self.attempt(lambda: self.engine.generate(long, 1 + new))
        self.first.append(first)
        self.rest.append(whole - first)

    def row(
        self, plan: BenchPlan, cell: Cell, work: CellWork, roofline: Roofline | None, ours: list[list[int]]
    ) -> Row:
        row = Row(
            self.engine.name,
            cell.batch,
            cell.prompt,
            round(self.setup_seconds, 2),
            round(self.prepared + self.setup_seconds, 2),
            failed=self.failed,
        )
        if self.failed:
            return row
        first, rest = statistics.median(self.first), statistics.median(self.rest)
        tflops = work.prompt_flops / first / 1e12
        row = replace(
            row,
            first_token_ms=first * 1e3,
            prefill_tokens_per_s=cell.batch * cell.prompt / first,
            prefill_tflops=tflops,
            prefill_percent=None if roofline is None else 100 * tflops / roofline.matrix_tflops,
            same_tokens=agreement(self.tokens, ours),
        )
        if rest <= 0:  # on tiny models noise can be larger than the steps
            return replace(row, failed="the decode steps were too short to tell from noise; raise --new")
        step = rest / plan.new
        rate = work.step_bytes / step / 1e9
        return replace(
            row,
            token_ms=step * 1e3,
            decode_tokens_per_s=cell.batch / step,
            gb_per_s=rate,
            roofline_percent=None if roofline is None else 100 * rate / roofline.read_gb_per_s,
        )


def agreement(tokens: list[list[int]], ours: list[list[int]]) -> float | None:
    """The share of equal tokens; None where graft has none to compare with."""
    pairs = [(a, b) for left, right in zip(tokens, ours, strict=False) for a, b in zip(left, right, strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None
