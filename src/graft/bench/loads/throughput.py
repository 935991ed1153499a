"""An engine under load: requests of fixed lengths, all at once or as they come, and what that took.

The engine is stepped by the calling thread, with arrivals between two steps; a token's time is the end of the step
that gave it. Prompts are random tokens, no two alike, so that nothing is found in a prefix cache.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graft.base.errors import GraftError
from graft.base.files import Progress
from graft.base.timers import synchronize
from graft.bench.loads.phases import LoadPhases
from graft.bench.loads.spread import HistogramBin, Load, Spread, behind_text, histogram
from graft.engine.core import Request
from graft.engine.engine import Engine
from graft.engine.llm import LLM
from graft.engine.params import SamplingParams

WARM_UP = 16  # requests that go first and do not count: kernels are compiled and graphs captured for them
WARM_NEW = 4


@dataclass(frozen=True)
class LoadRow:
    """What one load took. step_ms: of steps that only decode; batch: requests of a step on average, and of those that
    may run at once; cache_percent: the fullest that the key-value cache was."""

    load: Load
    seconds: float
    output_tokens_per_s: float
    requests_per_s: float
    first_token: Spread | None
    between_tokens: Spread | None
    step_ms: Spread | None
    steps: int
    prompt_steps: int
    prompt_percent: float  # of the time, in steps with prompts in them
    decode_percent: float
    batch: float
    max_num_seqs: int
    cache_percent: float
    preemptions: int
    bucket_misses: int
    behind: str = ""  # why the asked rate was not kept
    bound_tokens_per_s: float | None = None  # load_bound.py
    step_times: tuple[HistogramBin, ...] = ()
    phase_percent: Mapping[str, float] = field(default_factory=dict)  # load_phases.py
    idle_percent: float | None = None  # of the device, between two steps


@dataclass
class Log:
    """What the steps of a load left: when each request came and got its tokens, how long each step took."""

    came: dict[Request, float] = field(default_factory=dict)
    last: dict[Request, float] = field(default_factory=dict)
    first_token: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    decode_steps: list[float] = field(default_factory=list)
    prompt_steps: list[float] = field(default_factory=list)
    running: int = 0
    fullest: float = 0.0
    phases: LoadPhases = field(default_factory=LoadPhases)

    def note(self, engine: Engine, grown: Sequence[Request], now: float, seconds: float, decoding: bool) -> None:
        (self.decode_steps if decoding else self.prompt_steps).append(seconds)
        self.phases.settle(decoding)
        self.running += len(engine.scheduler.running)
        self.fullest = max(self.fullest, 1 - engine.manager.available / engine.manager.blocks)
        for request in grown:
            before = self.last.get(request)
            if before is None:
                self.first_token.append(now - self.came[request])
            else:
                self.between.append(now - before)
            self.last[request] = now


def measure_load(llm: LLM, load: Load, progress: Progress | None = None) -> LoadRow:
    load.check_context(llm.model.context)
    prompts = random_prompts(llm.model.module.config.vocab_size, load)
    warm, log = Load(load.isl, min(load.osl, WARM_NEW), min(load.requests, WARM_UP)), Log()
    first, rest = ([*zip(one.arrivals(), prompts, strict=False)] for one in (warm, load))  # made outside of the clock
    with llm.held() as engine:
        run_load(engine, warm, first)
        with log.phases.watch(engine):
            began = time.perf_counter()
            run_load(engine, load, rest, log, progress)
            seconds = time.perf_counter() - began
        return row_of(engine, load, log, seconds)


def run_load(
    engine: Engine, load: Load, requests: Sequence[tuple[float, list[int]]], log: Log | None = None,
    progress: Progress | None = None,
) -> None:  # fmt: skip
    """Steps the engine until every request, a time and a prompt, has ended. One that fails is an error."""
    params = SamplingParams(max_tokens=load.osl, ignore_eos=True)
    waiting = [*reversed(requests)]
    entered: list[Request] = []
    ended = 0
    began = time.perf_counter()
    try:
        while waiting or not engine.idle:
            now = time.perf_counter() - began
            while waiting and waiting[-1][0] <= now:
                at, prompt = waiting.pop()
                entered.append(engine.add(prompt, params))
                if log is not None:
                    log.came[entered[-1]] = at
            if engine.idle:
                time.sleep(waiting[-1][0] - now)
                continue
            before = engine.stats
            grown = engine.step()
            after = time.perf_counter() - began
            if log is not None:
                decoding = engine.stats.prefill_seconds == before.prefill_seconds
                log.note(engine, grown, after, after - now, decoding)
            ended += check_ended(grown)
            if progress is not None:
                progress(f"{load.name}: requests", ended, load.requests)
        synchronize(engine.tensors[0].device)
    finally:
        engine.abort(entered)


def check_ended(grown: Sequence[Request]) -> int:
    failed: GraftError | None = next((r.error for r in grown if r.error is not None), None)
    if failed is not None:
        raise failed
    return sum(r.finish_reason is not None for r in grown)


def random_prompts(vocabulary: int, load: Load) -> Iterator[list[int]]:
    source = random.Random(f"{load.name} {load.requests}")
    while True:
        yield [source.randrange(vocabulary) for _ in range(load.isl)]


def row_of(engine: Engine, load: Load, log: Log, seconds: float) -> LoadRow:
    tokens, steps = load.requests * load.osl, len(log.decode_steps) + len(log.prompt_steps)
    reached = load.requests / seconds
    return LoadRow(
        load,
        seconds,
        tokens / seconds,
        reached,
        Spread.of(log.first_token),
        Spread.of(log.between),
        Spread.of(log.decode_steps),
        steps,
        len(log.prompt_steps),
        100 * sum(log.prompt_steps) / seconds,
        100 * sum(log.decode_steps) / seconds,
        log.running / max(steps, 1),
        engine.scheduler.max_num_seqs,
        100 * log.fullest,
        engine.stats.preemptions,
        engine.stats.bucket_misses,
        behind_text(load.rate, list(log.last.values())),
        step_times=histogram(log.decode_steps, log.prompt_steps),
        phase_percent=log.phases.shares(seconds),
        idle_percent=None if log.phases.idle is None else 100 * log.phases.idle / seconds,
    )
