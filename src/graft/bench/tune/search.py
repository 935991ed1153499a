"""Measures which kernel is best for the linear layers of a model, token count by token count.

First each candidate alone; then, for the token counts asked for, the fastest few inside a whole decode step. Kernels
of a step overlap (programmatic dependent launch), so the best alone is not always the best there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from graft.base.errors import GraftError, NoGpu
from graft.base.files import Progress
from graft.bench.tune.results import Result, StepSample, weight_bytes
from graft.ops.fused_linear.choice import look_up, overridden, shipped_table
from graft.ops.fused_linear.kinds import (
    INTEGERS,
    BalancedGemm,
    Gemm,
    How,
    Int4Gemm,
    IntegerGemm,
    LinearShape,
    Matvec,
    count_text,
    how_problem,
    how_text,
)
from graft.ops.fused_linear.tables import Table, TunedEntry

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
KEPT = 3  # candidates that are tried in a step
MARGIN = 0.001  # of a step: a smaller gain is not told from noise
Timer = Callable[[LinearShape, int, Sequence[How]], Sequence[Result]]
StepTimer = Callable[[int], StepSample | str]  # a step of so many sequences, by the kernels of the current table


@dataclass(frozen=True)
class Failure:
    """A candidate that did not run."""

    shape: LinearShape | None  # None: the whole step
    tokens: int
    how: How
    reason: str

    def text(self) -> str:
        if self.shape is None:
            return f"a step of {count_text(self.tokens)}: {self.reason}"
        what = how_text(self.how, self.shape.format)
        return f"{self.shape.key()}, {count_text(self.tokens)}: {what}: {self.reason}"


@dataclass(frozen=True)
class TunedShape:
    """The candidates of one shape and token count: microseconds of those that ran, the fastest first."""

    shape: LinearShape
    tokens: int
    times: dict[How, float]
    shipped: How  # what the table that comes with graft would take
    best: How
    measured: str = "alone"

    @property
    def gb_per_s(self) -> float:
        return weight_bytes(self.shape) / self.times[self.best] / 1000

    @property
    def gain(self) -> float | None:
        """How many times as fast as the shipped choice, alone; None where that one did not run."""
        return self.times[self.shipped] / self.times[self.best] if self.shipped in self.times else None


@dataclass(frozen=True)
class StepTime:
    """Microseconds of a decode step, and with the shipped choices; None where it did not run with those."""

    tokens: int
    us: float
    shipped_us: float | None


@dataclass(frozen=True)
class StepTrial:
    """A decode step with `how` for one shape and for the others the best until then; without a shape, `what` says."""

    tokens: int
    what: str
    shape: LinearShape | None
    how: How
    sample: StepSample


@dataclass(frozen=True)
class Tuning:
    device: str
    trials: tuple[TunedShape, ...]  # those in which something ran
    steps: tuple[StepTime, ...]
    failures: tuple[Failure, ...]
    tried: tuple[StepTrial, ...] = ()  # in a step, in the order in which they were

    @property
    def table(self) -> Table:
        return table_of(self.trials, self.device)


def table_of(trials: Sequence[TunedShape], device: str) -> Table:
    table: Table = {}
    for trial in trials:
        entry = TunedEntry(trial.best, trial.times[trial.best], device, trial.measured)
        table.setdefault(trial.shape, {})[trial.tokens] = entry
    return table


def candidates(shape: LinearShape, tokens: int, units: int = 132) -> Iterator[How]:
    """Kernels worth a try. units: multiprocessors of the device."""
    from graft.ops.fused_linear.triton import padded_tokens

    yield None
    matvecs = [Matvec(rows, warps) for rows in (1, 2, 4) for warps in (2, 4, 8)]
    int4s = [Int4Gemm(4, 8, 3), Int4Gemm(4, 8, 0, 128), Int4Gemm(8, 8, 0, 128), Int4Gemm(8, 4), Int4Gemm(8, 4, 0, 96)]
    yield from (how for how in (*matvecs, *int4s) if how_problem(how, shape, tokens) is None)
    if tokens == 1 and shape.format != "int4":
        return
    block = padded_tokens(tokens)
    if shape.format in INTEGERS:
        yield from integer_gemms(shape, tokens, min(block, 64), units)
        return
    tiles = ((64, 4), (64, 6), (128, 3))
    for rows in (32, 64):
        for splits in (1, 2, 4):
            if splits == 1 or shape.n // rows * splits <= 9 * units:  # more programs fill no gap
                for depth, stages in tiles:
                    yield Gemm(rows, block, depth, splits, 4, stages, early=512 // depth)
    if tokens > 16:  # with more rows a program the tokens are read less often
        for splits in (1, 2, 4):
            yield Gemm(128, block, 64, splits, 8, 3)
        if shape.format == "plain":
            yield from balanced_shares(shape, max(64, block), units)
    depth, stages = tiles[0]
    yield Gemm(64, block, depth, 1, 4, stages)
    if shape.norm:
        yield Gemm(64, block, depth, 1, 4, stages, norm_inside=True)


def integer_gemms(shape: LinearShape, tokens: int, block: int, units: int) -> Iterator[IntegerGemm]:
    """Blocks of 64 rows; of many tokens also of 128."""
    few, int4 = block <= 32, shape.format == "int4"
    depths = ((128, 2), (128, 3)) if int4 else ((256, 4),) if few else ((128, 3), (128, 4))
    blocks = [(64, block, 4)] if tokens <= 64 else [(64, 64, 4), (64, 128, 4), (128, 64, 8)]
    for rows, most, warps in blocks:
        for splits in (1, 2, 4):
            if splits == 1 or shape.n // rows * splits * -(-tokens // most) <= 9 * units:
                for depth, stages in depths:
                    for early in (0, 4) if few else (0,):
                        yield IntegerGemm(rows, most, depth, splits, warps, stages, early)


def balanced_shares(shape: LinearShape, block: int, units: int) -> Iterator[BalancedGemm]:
    """Rows a program such that every multiprocessor has one; of more rows than that, blocks of 128."""
    for splits in (1, 2, 4):
        rows = -(-shape.n * splits // (16 * units)) * 16
        if rows <= 256 or splits == 1:
            for depth, stages, early in ((64, 5, 8), (128, 3, 0)):
                yield BalancedGemm(rows if rows <= 256 else 128, block, depth, splits, 4, stages, early)


def tune(
    shapes: Sequence[LinearShape],
    counts: Sequence[int],
    device: torch.device,
    progress: Progress | None = None,
    *,
    timer: Timer | None = None,
    step: StepTimer | None = None,
    in_step: Sequence[int] = (),
    keep: Callable[[Table], None] | None = None,
) -> Tuning:
    """step, in_step: how a decode step is timed, and for which of the counts; the shapes are then all that it has.
    keep: gets each choice as it is made, so that an interrupted run loses one."""
    from graft.ops.launch import device_name

    if timer is None:
        if device.type != "cuda":
            raise NoGpu("tuning")
        from graft.bench.tune.timers import KernelTimer

        timer = KernelTimer(device)
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    trials, steps, failures, tried = [], [], [], []
    work = [(shape, tokens) for shape in shapes for tokens in counts]
    for done, (shape, tokens) in enumerate(work):
        if progress:
            progress(f"{shape.key()}, {count_text(tokens)}", done, len(work))
        trial, failed = measure(shape, tokens, units, timer)
        if keep and trial:
            keep(table_of(trial, device_name(device)))
        trials += trial
        failures += failed
    if not trials:
        reasons = "; ".join(failure.text() for failure in failures[:3]) or "there was nothing to measure"
        raise GraftError(f"no kernel ran, so none was chosen: {reasons}")
    for tokens in in_step:
        if step is None:
            raise GraftError("in_step needs a timer of decode steps: pass step=")
        of_count = [trial for trial in trials if trial.tokens == tokens]
        refined, found, failed, in_steps = refine(of_count, tokens, device_name(device), step, progress)
        tried += in_steps
        better = {trial.shape: trial for trial in refined}
        trials = [better[trial.shape] if trial.tokens == tokens else trial for trial in trials]
        steps += found
        failures += failed
    return Tuning(device_name(device), tuple(trials), tuple(steps), tuple(failures), tuple(tried))


def measure(shape: LinearShape, tokens: int, units: int, timer: Timer) -> tuple[list[TunedShape], list[Failure]]:
    """One trial of every candidate and the shipped choice, none where nothing ran; and what did not run."""
    shipped = look_up(shipped_table(), shape, tokens, "").how
    ways = list(dict.fromkeys([*candidates(shape, tokens, units), shipped]))
    results = dict(zip(ways, timer(shape, tokens, ways), strict=True))
    failures = [Failure(shape, tokens, how, text) for how, text in results.items() if isinstance(text, str)]
    ran = {how: result for how, result in results.items() if not isinstance(result, str)}
    times = dict(sorted(ran.items(), key=lambda pair: pair[1]))
    return [TunedShape(shape, tokens, times, shipped, next(iter(times)))] if times else [], failures


def refine(
    trials: Sequence[TunedShape], tokens: int, device: str, step: StepTimer, progress: Progress | None = None
) -> tuple[list[TunedShape], list[StepTime], list[Failure], list[StepTrial]]:
    """The trials of one token count with what is best in a step: from the faster of the best alone and the shipped
    choices on, one shape after the other, its fastest few."""
    failures: list[Failure] = []
    tried: list[StepTrial] = []

    def timed(hows: Mapping[LinearShape, How], shape: LinearShape | None = None, what: str = "") -> float | None:
        entries: Table = {one: {tokens: TunedEntry(how, 0.0, device)} for one, how in hows.items()}
        with overridden(entries):
            result = step(tokens)
        if isinstance(result, str):
            failures.append(Failure(shape, tokens, hows[shape] if shape else None, f"in a step: {result}"))
            return None
        tried.append(StepTrial(tokens, what, shape, hows[shape] if shape else None, result))
        return result.us

    best = {trial.shape: trial.best for trial in trials}
    shipped = {trial.shape: trial.shipped for trial in trials}
    least, usual = timed(best, what="the fastest alone"), timed(shipped, what="the choices that come with graft")
    if least is None:
        return list(trials), [], failures, tried
    if usual is not None and usual < least and all(trial.shipped in trial.times for trial in trials):
        best, least = shipped, usual
    for done, trial in enumerate(trials):
        if progress:
            progress(f"in a step of {count_text(tokens)}: {trial.shape.key()}", done, len(trials))
        for how in list(trial.times)[:KEPT]:
            other = {**best, trial.shape: how}
            us = timed(other, trial.shape) if other != best else None
            if us is not None and us < least * (1 - MARGIN):
                best, least = other, us
    refined = [replace(trial, best=best[trial.shape], measured="in a step") for trial in trials]
    return refined, [StepTime(tokens, least, usual)], failures, tried
