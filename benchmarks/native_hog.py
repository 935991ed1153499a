"""Decoding while another process keeps one core busy: how much of the rate is left.

python benchmarks/native_hog.py
python benchmarks/native_hog.py --dtype bfloat16 --against none --new 32

Rates of `alone` and `with a busy core` are taken in turns, in one process; the ratio is that of their medians. With
two cores a proportional fall is to 0.5 to 0.75; the target is 0.40. Where threads are waited for one by one, the rate
falls to a tenth and less.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import graft
from graft.bench.baselines.hf import EagerBaseline
from graft.bench.bench import prompts_for
from graft.bench.plan import Cell
from graft.bench.runner import Graft, Runner
from graft.bench.threads import checked_threads, use_threads
from graft.cli.show import quiet_libraries

TARGET = 0.40
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True:\n    pass\n"


@dataclass(frozen=True)
class Fall:
    """Tokens a second of one engine, alone and beside the busy process."""

    engine: str
    alone: float
    busy: float

    @property
    def left(self) -> float:
        return self.busy / self.alone

    def line(self) -> str:
        return f"{self.engine:22} {self.alone:8.2f} {self.busy:8.2f} {self.left:8.2f}"


class Hog:
    """A process that keeps one core busy while `on`, and is stopped in between."""

    def __init__(self, cpu: int) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", BUSY, str(cpu)])
        self.process.send_signal(signal.SIGSTOP)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(runners: Mapping[str, tuple[Runner, Runner]], calls: Any, hog: Hog, new: int, repeats: int) -> None:
    """The first of each pair runs alone, the second beside the busy process; in turns."""
    for _ in range(repeats):
        for alone, busy in runners.values():
            alone.measure([next(calls)], [next(calls)], new)
            with hog.on():
                busy.measure([next(calls)], [next(calls)], new)


def falls(runners: Mapping[str, tuple[Runner, Runner]], new: int) -> list[Fall]:
    found = []
    for name, pair in runners.items():
        failed = next((runner.failed for runner in pair if runner.failed), "")
        if failed:
            print(f"{name}: {failed}")
            continue
        alone, busy = (new / statistics.median(runner.rest) for runner in pair)
        found.append(Fall(name, alone, busy))
    return found


def hog_table(
    llm: graft.LLM, against: bool, prompt: int, new: int, repeats: int, cpu: int | None = None
) -> list[Fall]:
    """graft and, if `against`, Hugging Face eager, with `llm` and its module."""
    cores = sorted(os.sched_getaffinity(0))
    engines = [Graft(llm), *([EagerBaseline(llm.model)] if against else [])]
    device = torch.device("cpu")
    runners = {c.name: (Runner(c, device), Runner(c, device)) for c in engines}
    calls = prompts_for(llm.model, Cell(1, prompt))
    for alone, _ in runners.values():
        alone.warm_up([next(calls)], 2)
    hog = Hog(cores[-1] if cpu is None else cpu)
    try:
        measure(runners, calls, hog, new, repeats)
    finally:
        hog.close()
    return falls(runners, new)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu", type=int, help="the core that is kept busy; the last one if left out")
    parser.add_argument("--against", choices=("eager", "none"), default="eager")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    quiet_libraries()
    threads = checked_threads(args.threads, torch.device("cpu"))
    with use_threads(threads):
        llm = graft.LLM(
            args.model, dtype=args.dtype, device="cpu", backend=args.backend, kv_cache_memory="64MiB",
            keep_weights=True,
        )  # fmt: skip
        found = hog_table(llm, args.against == "eager", args.prompt, args.new, args.repeats, args.cpu)
    if args.json:
        print(json.dumps([{**vars(fall), "left": fall.left} for fall in found]))
        return
    print(f"{args.model}, {args.dtype}, threads: {threads}, one core kept busy; tokens/s, medians of {args.repeats}")
    print(f"{'engine':22} {'alone':>8} {'busy':>8} {'left':>8}")
    for fall in found:
        print(fall.line())


if __name__ == "__main__":
    main()
