"""Where the time of a load goes: what the thread that steps the engine does, and how long the device waits for it.

    schedule · launch · prefill, decode (the model runs, or is waited for) · sampling · detokenize · bookkeeping

The engine's own methods are timed from outside while a load runs; what one of them calls counts for that alone. On a
GPU the model's time is what is left of it when the host has done everything else, since a step is launched before the
one ahead of it is known; the device is idle from the end of a step to the beginning of the next, by its own events.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graft.engine.decode.in_flight import InFlightStep
from graft.engine.decode.loop import DecodeLoop
from graft.engine.engine import Engine

MODEL = "model"  # prefill or decode: which of them is known when the step is
PHASES = ("schedule", "launch", "prefill", "decode", "sampling", "detokenize", "bookkeeping")


class LoadPhases:
    """Seconds of each phase, and of the device between two steps (None: it has no events)."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.idle: float | None = None
        self.within: list[float] = []  # of each call that is running: what timed ones took within it
        self.ended: torch.cuda.Event | None = None  # the end of the last step, while none follows it

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Its methods are timed until the end of the block."""
        loop = engine.loop
        timed = [
            (engine.scheduler, "schedule", "schedule"),
            (engine, "run", MODEL if loop is None else "launch"),
            (engine, "choose", "sampling"),
            (engine, "meets_stop_string", "detokenize"),
            (engine, "advance", "bookkeeping"),
            *([] if loop is None else [(loop, "begin", "launch"), (loop, "go_ahead", "launch")]),
        ]
        for owner, name, phase in timed:
            setattr(owner, name, self.timed(getattr(owner, name), phase))
        if loop is not None:
            self.watch_steps(loop)
        try:
            yield
        finally:
            for owner, name in [(owner, name) for owner, name, _ in timed] + (
                [] if loop is None else [(loop, "land")]
            ):
                delattr(owner, name)

    def timed(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed_call(*given: Any, **named: Any) -> Any:
            self.within.append(0.0)
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds[phase] += took - self.within.pop()
                if self.within:
                    self.within[-1] += took

        return timed_call

    def watch_steps(self, loop: DecodeLoop) -> None:
        """Waiting for a step's tokens is the model's time; the gap before it the device's."""
        for name in ("begin", "go_ahead"):
            launch = getattr(loop, name)

            def launched(*given: Any, launch: Callable[..., Any] = launch) -> InFlightStep | None:
                step = launch(*given)
                if step is not None:
                    step.tokens = self.timed(step.tokens, MODEL)
                    if self.ended is not None:  # nothing was in flight: the device has waited until now
                        self.gap(self.ended, step)
                return step

            setattr(loop, name, launched)
        land = loop.land

        def landed(step: InFlightStep) -> None:
            land(step)
            self.ended = step.arrival.done
            if self.ended is not None and loop.in_flight:
                self.gap(self.ended, loop.in_flight[0])

        loop.land = landed

    def gap(self, ended: torch.cuda.Event, step: InFlightStep) -> None:
        """Counted at once: the events of a step are used again by the one after the next."""
        if step.arrival.begin is not None:
            step.arrival.begin.synchronize()  # it comes right behind what has ended
            self.idle = (self.idle or 0.0) + ended.elapsed_time(step.arrival.begin) / 1e3
        self.ended = None

    def settle(self, decoding: bool) -> None:
        """A step is known: the model's time since the last was prefill's or decode's."""
        self.seconds["decode" if decoding else "prefill"] += self.seconds.pop(MODEL, 0.0)

    def shares(self, seconds: float) -> dict[str, float]:
        """Percent of the time; other: between the calls, and while there was nothing to do."""
        found = {name: 100 * self.seconds[name] / seconds for name in PHASES}
        return found | {"other": 100 - sum(found.values())}
