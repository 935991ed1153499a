"""Where the time of a decode step goes, kernel by kernel; on a CPU op by op.

Kernels come from torch's profiler over some steps in a row; the time of a step is taken without it. The prompts run
once before: their blocks are found in the prefix cache, so that all requests begin to decode together, and a step in
which one of them is missing is no measurement but an error. Programmatic
dependent launch lets kernels overlap, so their sum may be more than the time in which the device was busy; both are
given, and so are the gaps, in which it was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from graft.base.errors import OutOfCache
from graft.base.timers import clocked, profile_events, synchronize
from graft.bench.bench import prompts_for
from graft.bench.kernels.kernel_bytes import kernel_bytes
from graft.bench.kernels.native_times import native_steps, watched
from graft.bench.limits.machine import device_name
from graft.bench.limits.roofline import Roofline
from graft.bench.limits.traffic import weight_bytes
from graft.bench.plan import Cell
from graft.bench.ranks import devices_of, kept_bytes, lowered_of, quantized_bytes
from graft.engine.core import Request
from graft.engine.engine import Engine
from graft.engine.llm import LLM
from graft.engine.params import SamplingParams

WARM_UP_STEPS = 3
UNTIMED_TOKENS = WARM_UP_STEPS + 4  # the first token, and those of an engine whose host is steps behind the device
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Launch:
    """One event of the profile; microseconds."""

    name: str
    grid: str
    start: float
    duration: float


@dataclass(frozen=True)
class KernelTime:
    """One kernel at one grid, in one step on average. `bytes`: what all its calls must read, where that is known."""

    name: str
    grid: str
    calls: float
    us: float
    us_each: float
    added_us: float  # by how much it moved the end of the step: what no kernel before it covers
    percent: float  # of the time of a step, as added
    bytes: float | None = None
    gb_per_s: float | None = None


@dataclass(frozen=True)
class StepTimes:
    """A decode step; microseconds."""

    batch: int
    prompt: int
    context: float  # tokens of a sequence, on average over the steps
    steps: int
    device_name: str
    on_gpu: bool
    wall_us: float
    sum_us: float
    busy_us: float
    gap_us: float
    calls: float
    step_bytes: float
    floor_us: float  # step_bytes at the measured bandwidth
    rows: tuple[KernelTime, ...]


def kernel_times(llm: LLM, cell: Cell, steps: int, roofline: Roofline) -> StepTimes:
    """`steps` decode steps by the clock, and as many under the profiler; fewer where the context ends."""
    device = llm.device
    calls = prompts_for(llm.model, cell)
    prompts = [next(calls) for _ in range(cell.batch)]
    with llm.held() as engine:  # the profiler sees the thread that started it
        entering = steps_to_enter(engine, cell, run_prompts(engine, prompts))
        room = llm.model.context - cell.prompt - UNTIMED_TOKENS - entering
        steps = max(1, min(steps, room // 2))
        params = SamplingParams(max_tokens=2 * steps + UNTIMED_TOKENS + entering, ignore_eos=True)
        requests = [engine.add(prompt, params) for prompt in prompts]
        try:
            while any(not request.new_tokens for request in requests):
                engine.step()
            run_steps(llm, WARM_UP_STEPS, device)
            began = [len(request.new_tokens) for request in requests]
            wall = run_steps(llm, steps, device) / steps * 1e6
            launches = profiled(llm, steps, device)
            check_whole(engine, requests, began, 2 * steps)
            context = cell.prompt + sum(began) / cell.batch + steps
        finally:
            engine.abort(requests)
    return summary(llm, cell, steps, context, wall, launches, roofline)


def run_prompts(engine: Engine, prompts: Sequence[Sequence[int]]) -> int:
    """A token of each; nothing of them but their blocks is left. The steps that it took."""
    requests = [engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True)) for prompt in prompts]
    steps = 0
    try:
        while not engine.idle:
            engine.step()
            steps += 1
    finally:
        engine.abort(requests)
    return steps


def steps_to_enter(engine: Engine, cell: Cell, before: int) -> int:
    """In how many steps all requests begin to decode: of a prompt that is in the cache the last block is computed
    again. before: the steps that the prompts took at first, and take again without a prefix cache."""
    if not engine.manager.prefix_reuse:
        return before
    return 1 + -(-cell.batch * engine.manager.block_size // engine.scheduler.max_num_batched_tokens)


def check_whole(engine: Engine, requests: Sequence[Request], began: Sequence[int], steps: int) -> None:
    """That every request got a token in every step; the host may be two steps behind the device. began: how many each
    had before."""
    failed = next((request.error for request in requests if request.error is not None), None)
    if failed is not None:
        raise failed
    least = min(len(request.new_tokens) - before for request, before in zip(requests, began, strict=True))
    if least < max(steps - 2, 1):
        raise OutOfCache(
            f"of a batch of {len(requests)} not every request decoded in every step: one got {least} tokens in"
            f" {steps} steps, with {engine.stats.preemptions} preemptions; raise --max-num-seqs or --kv-cache-memory,"
            " or take a smaller --batch or a shorter --prompt"
        )


def run_steps(llm: LLM, steps: int, device: torch.device) -> float:
    """Seconds; the host may be ahead of the device between them."""

    def work() -> None:
        for _ in range(steps):
            llm.engine.step()
        synchronize(device)

    synchronize(device)
    return clocked(work, 1, warm_up=0)[0]


def profiled(llm: LLM, steps: int, device: torch.device) -> list[Launch]:
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with watched(lowered_of(llm)) as noted, profile(activities=[activity]) as profiler:
        run_steps(llm, steps, device)
    events = profile_events(profiler)
    native = [Launch(*call) for call in native_steps(noted)]
    return gpu_launches(events) if on_gpu else cpu_calls(events) + native


def gpu_launches(events: Iterable[dict[str, Any]]) -> list[Launch]:
    return [
        Launch(event["name"], grid_text(event.get("args", {}).get("grid")), event["ts"], event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in GPU_EVENTS
    ]


def cpu_calls(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """Every op with its own time: what it calls is taken off, so that nothing counts twice."""
    calls = [e for e in events if e.get("ph") == "X" and e.get("cat") == "cpu_op"]
    own: list[tuple[dict[str, Any], list[float]]] = []
    open_calls: list[tuple[dict[str, Any], list[float]]] = []
    for event in sorted(calls, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        while open_calls and (
            open_calls[-1][0]["tid"] != event["tid"]
            or open_calls[-1][0]["ts"] + open_calls[-1][0]["dur"] <= event["ts"]
        ):
            open_calls.pop()
        if open_calls:
            open_calls[-1][1].append(event["dur"])
        open_calls.append((event, []))
        own.append(open_calls[-1])
    return [Launch(e["name"], "", e["ts"], max(e["dur"] - sum(inner), 0.0)) for e, inner in own]


def grid_text(grid: Sequence[int] | None) -> str:
    """[4096, 1, 1] → "4096", [8, 32, 1] → "8×32"."""
    if not grid:
        return ""
    sizes = list(grid)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "×".join(map(str, sizes))


def summary(
    llm: LLM, cell: Cell, steps: int, context: float, wall: float, launches: Sequence[Launch], roofline: Roofline
) -> StepTimes:
    device = llm.device
    on_gpu = device.type == "cuda"
    weights = quantized_bytes(llm, cell.batch) or weight_bytes(llm.model.module, cell.batch)
    read = weights + cell.batch * kept_bytes(llm, context)
    read /= devices_of(llm)
    total = sum(launch.duration for launch in launches) / steps
    # own times on a CPU lie inside each other's intervals, so there they never overlap
    busy = union(launches) / steps if on_gpu else total
    added = added_times(launches) if on_gpu else [launch.duration for launch in launches]
    rows = kernel_rows(launches, steps, wall, added)
    if on_gpu:
        rows = kernel_bytes(rows, llm, cell, context)
    return StepTimes(
        cell.batch, cell.prompt, context, steps, device_name(device), on_gpu, wall, total, busy, wall - busy,
        len(launches) / steps, read, read / roofline.read_gb_per_s / 1e3, tuple(rows),
    )  # fmt: skip


def kernel_rows(launches: Sequence[Launch], steps: int, wall: float, added: Sequence[float]) -> list[KernelTime]:
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for launch, more in zip(launches, added, strict=True):
        groups.setdefault((launch.name, launch.grid), []).append((launch.duration, more))
    rows = []
    for (name, grid), times in groups.items():
        total, more = (sum(column) / steps for column in zip(*times, strict=True))
        rows.append(
            KernelTime(name, grid, len(times) / steps, total, total * steps / len(times), more, 100 * more / wall)
        )
    return sorted(rows, key=lambda row: -row.added_us)


def added_times(launches: Sequence[Launch]) -> list[float]:
    """Of each, the time in which none that ends before it runs; together the time in which any runs."""
    found = [0.0] * len(launches)
    covered: list[tuple[float, float]] = []  # (from, to), apart and in order
    for index in sorted(range(len(launches)), key=lambda i: launches[i].start + launches[i].duration):
        first, last = launches[index].start, launches[index].start + launches[index].duration
        begin, found[index] = first, launches[index].duration
        while covered and covered[-1][1] > first:
            start, end = covered.pop()
            found[index] -= end - max(start, first)
            begin = min(begin, start)
        covered.append((begin, last))
    return found


def union(launches: Sequence[Launch]) -> float:
    """The time in which at least one of them ran."""
    busy, end = 0.0, float("-inf")
    for launch in sorted(launches, key=lambda one: one.start):
        last = launch.start + launch.duration
        busy += max(0.0, last - max(launch.start, end))
        end = max(end, last)
    return busy
