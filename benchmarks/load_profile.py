"""Where the time of a load goes on a GPU: kernels, what the device waits behind, and the steps that took longest.

    python -m benchmarks.load_profile llama-3.1-8b --quantize fp8 --kv-cache-dtype fp8 --isl 128 --osl 128 \
        --requests 1600 --max-num-seqs 1024 [--json FILE]

The load runs twice: by the clock in a new engine, with the kernels that are compiled in it, and under the profiler.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import graft
from graft.base.timers import profile_events
from graft.bench.kernels.kernel_times import Launch, gpu_launches, union
from graft.bench.loads.spread import Load
from graft.bench.loads.throughput import random_prompts, run_load
from graft.engine.engine import Engine

LEAST_US = 5.0  # gaps below are what one launch behind another costs


@dataclass(frozen=True)
class SlowStep:
    index: int
    ms: float
    tokens: int  # requests that got one
    compiled: tuple[str, ...]


@dataclass(frozen=True)
class Gap:
    """Time in which nothing ran, between two kernels."""

    before: str
    after: str
    count: int
    ms: float


def idle(launches: Sequence[Launch]) -> list[Gap]:
    """By the kernels on both sides, the longest together first."""
    total: dict[tuple[str, str], list[float]] = defaultdict(list)
    ordered = sorted(launches, key=lambda one: one.start)
    last = ordered[0]
    for launch in ordered[1:]:
        waited = launch.start - (last.start + last.duration)
        if waited > LEAST_US:
            total[last.name, launch.name].append(waited)
        if launch.start + launch.duration > last.start + last.duration:
            last = launch
    found = [Gap(*names, len(each), sum(each) / 1e3) for names, each in total.items()]
    return sorted(found, key=lambda gap: -gap.ms)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of Triton's functions, as they are compiled."""
    from triton import knobs

    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *_, **about: names.append(str(about.get("repr")))
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


def timed_steps(engine: Engine, load: Load, prompts: Iterator[list[int]]) -> tuple[float, list[SlowStep]]:
    """Seconds, and every step."""
    steps: list[SlowStep] = []
    requests = [*zip(load.arrivals(), prompts, strict=False)]
    inner = engine.step
    with compilations() as compiled:

        def step() -> list[Any]:
            began, seen = time.perf_counter(), len(compiled)
            grown = inner()
            took = 1e3 * (time.perf_counter() - began)
            steps.append(SlowStep(len(steps), took, len(grown), tuple(compiled[seen:])))
            return grown

        engine.step = step
        try:
            began = time.perf_counter()
            run_load(engine, load, requests)
            return time.perf_counter() - began, steps
        finally:
            del engine.step


def profiled(engine: Engine, load: Load, prompts: Iterator[list[int]]) -> list[Launch]:
    requests = [*zip(load.arrivals(), prompts, strict=False)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_load(engine, load, requests)
    return gpu_launches(profile_events(profiler))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("isl", 128), ("osl", 128), ("requests", 1000), ("max-num-seqs", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quantize")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU on this machine: its kernels are what is measured")
    load = Load(asked.isl, asked.osl, asked.requests)
    llm = graft.LLM(
        asked.model, device="cuda", quantize=asked.quantize, kv_cache_dtype=asked.kv_cache_dtype,
        max_num_seqs=asked.max_num_seqs,
    )  # fmt: skip
    prompts = random_prompts(llm.model.module.config.vocab_size, load)
    with llm.held() as engine:
        seconds, steps = timed_steps(engine, load, prompts)
        launches = profiled(engine, load, prompts)
    tell(load, seconds, steps, launches)
    if asked.json:
        found = {"seconds": seconds, "steps": [*map(asdict, steps)], "gaps": [*map(asdict, idle(launches))]}
        asked.json.write_text(json.dumps(found))


def tell(load: Load, seconds: float, steps: Sequence[SlowStep], launches: Sequence[Launch]) -> None:
    span = (max(one.start + one.duration for one in launches) - min(one.start for one in launches)) / 1e3
    busy = union(launches) / 1e3
    rate = load.requests * load.osl / seconds
    print(f"{load.name}, first load: {rate:,.0f} tok/s, {seconds:.2f} s, {len(steps)} steps")
    for one in sorted(steps, key=lambda step: -step.ms)[:12]:
        print(f"  step {one.index:5d}  {one.ms:8.1f} ms  {one.tokens:5d} tokens  {', '.join(one.compiled)}")
    print(f"under the profiler: {span:,.0f} ms, busy {busy:,.0f}, idle {100 * (1 - busy / span):.1f} %")
    took: dict[str, list[float]] = defaultdict(list)
    for one in launches:
        took[one.name].append(one.duration)
    for name, each in sorted(took.items(), key=lambda item: -sum(item[1]))[:20]:
        print(f"  {sum(each) / 1e3:9.1f} ms {len(each):7d} x {sum(each) / len(each):8.1f} us  {name[:90]}")
    print("idle between")
    for gap in idle(launches)[:12]:
        print(f"  {gap.ms:9.1f} ms {gap.count:7d} x  {gap.before[:50]} → {gap.after[:50]}")


if __name__ == "__main__":
    main()
