"""The native backend on a CPU beside Hugging Face, llama.cpp and OpenVINO, as ratios of one run against the targets.

python benchmarks/native.py
python benchmarks/native.py --new 16 --repeats 3 --formats bf16,file --json

Formats of graft: bf16, int8, int4, and `file`, the GGUF file's own blocks, which llama.cpp reads too. Hugging Face
eager runs in float32 and in bfloat16, and the faster one counts: which that is depends on the CPU. An engine that is
not installed, or a format that is not native from end to end, is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import graft
from graft.base.errors import GraftError
from graft.bench.baselines.baseline import BenchEngine, Peer, Task
from graft.bench.baselines.hf import EagerBaseline
from graft.bench.baselines.llama_cpp import LlamaCpp
from graft.bench.baselines.openvino import OpenVino
from graft.bench.bench import prompts_for
from graft.bench.limits.roofline import cpu_read
from graft.bench.limits.traffic import step_bytes
from graft.bench.plan import Cell
from graft.bench.runner import Graft, Runner
from graft.bench.threads import checked_threads, use_threads
from graft.cli.show import quiet_libraries
from graft.models.load import load_model
from native_hog import hog_table

CPU = torch.device("cpu")
# None: floats, from a model that was loaded as such. A GGUF file that the engine loads itself stays in its own blocks
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "file": {},
}
EAGER = ("eager float32", "eager bfloat16")


@dataclass(frozen=True)
class Speed:
    """Medians of one engine at one batch size: ms until the first tokens, tokens a second after them."""

    engine: str
    batch: int
    first_ms: float | None = None
    tokens_per_s: float | None = None
    failed: str = ""


@dataclass(frozen=True)
class Verdict:
    what: str
    target: float
    measured: float | None
    why_not: str = ""

    def line(self) -> str:
        if self.measured is None:
            return f"{self.what:58} {self.target:6.2f}        {self.why_not}"
        word = "met" if self.measured >= self.target else "MISSED"
        return f"{self.what:58} {self.target:6.2f} {self.measured:8.2f} {word}"


class Named(Graft):
    def __init__(self, name: str, llm: graft.LLM) -> None:
        super().__init__(llm)
        self.name = name


class NamedEager(EagerBaseline):
    def __init__(self, name: str, model: Any) -> None:
        super().__init__(model)
        self.name = name


@dataclass
class Results:
    speeds: dict[tuple[str, int], Speed] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # engines that could not be made, and why

    def why_not(self, names: Sequence[str], batch: int) -> str:
        for name in names:
            speed = self.speeds.get((name, batch))
            reason = speed.failed if speed else self.missing.get(name, "not asked for")
            if reason:
                return f"{name}: {reason}"
        return ""

    def rate(self, name: str, batch: int = 1) -> float | None:
        speed = self.speeds.get((name, batch))
        return speed.tokens_per_s if speed else None

    def ratio(self, what: str, target: float, ours: str, baselines: Sequence[str], batch: int = 1) -> Verdict:
        """Our rate over that of the fastest baseline."""
        own = self.rate(ours, batch)
        theirs = [rate for rate in (self.rate(name, batch) for name in baselines) if rate]
        if own is None or not theirs:
            return Verdict(what, target, None, self.why_not([ours, *baselines], batch))
        return Verdict(what, target, own / max(theirs))

    def prefill(self, what: str, ours: str, baselines: Sequence[str]) -> Verdict:
        """The fastest baseline's time over ours."""
        found = {name: self.speeds[name, 1].first_ms for name in (ours, *baselines) if (name, 1) in self.speeds}
        own, theirs = found.get(ours), [ms for name, ms in found.items() if name != ours and ms]
        if own is None or not theirs:
            return Verdict(what, 1.0, None, self.why_not([ours, *baselines], 1))
        return Verdict(what, 1.0, min(theirs) / own)


def verdicts(results: Results, bandwidth: float | None, left: float | None) -> list[Verdict]:
    return [
        results.ratio("bf16 / Hugging Face eager", 3.5, "graft bf16", EAGER),
        results.ratio("int8 / Hugging Face eager", 6.0, "graft int8", EAGER),
        results.ratio("4-bit, the file's own / Hugging Face eager", 7.0, "graft file", EAGER),
        results.ratio("4-bit, the file's own / llama.cpp", 1.15, "graft file", ["llama.cpp"]),
        results.ratio("4-bit, int4 / Hugging Face eager", 7.0, "graft int4", EAGER),
        results.ratio("4-bit, the file's own / llama.cpp, batch 8", 1.5, "graft file", ["llama.cpp"], 8),
        Verdict("bf16, share of the read bandwidth", 0.70, bandwidth, results.why_not(["graft bf16"], 1)),
        Verdict("bf16, rate left beside a busy core", 0.40, left, results.why_not(["graft bf16"], 1)),
        *(
            results.prefill(
                f"prefill, fastest baseline / graft {name}", f"graft {name}", [*EAGER, "llama.cpp", "openvino"]
            )
            for name in ("bf16", "file")
        ),
    ]


def native_llm(model: str, options: dict[str, Any] | None, tokens: int) -> graft.LLM:
    """Raises GraftError where a part of the step would not be native: its time would be another backend's."""
    cache = tokens * 30 * 2 * 1024 * 4  # more than any of the small models keeps
    given = {"device": "cpu", "backend": "native", "kv_cache_memory": cache}
    source = load_model(model, dtype="bfloat16", device="cpu") if options is None else model
    llm = graft.LLM(source, **given, **(options or {}))
    eager = next((note for note in llm.built.notes if note.startswith("native: eager")), None)
    if eager is not None:
        raise GraftError(f"not run: not native from end to end: {eager.removeprefix('native: ')}")
    if options is not None and llm.quantized is None:
        raise GraftError("not run: the weights came as floats")
    return llm


def make_engines(args: argparse.Namespace, results: Results) -> tuple[dict[str, graft.LLM], list[BenchEngine]]:
    engines = {}
    for name in args.formats.split(","):
        try:
            engines[f"graft {name}"] = native_llm(args.model, FORMATS[name], 8 * (args.prompt + args.new + 64))
        except GraftError as error:
            results.missing[f"graft {name}"] = str(error).splitlines()[0]
    dtypes = args.eager.split(",")
    eager = [NamedEager(f"eager {dtype}", load_model(args.model, dtype=dtype, device="cpu")) for dtype in dtypes]
    return engines, list(eager)


def measure_cell(args: argparse.Namespace, batch: int, engines: Sequence[BenchEngine], results: Results) -> None:
    """All in turns; Hugging Face gets fewer steps, since without 16-bit instructions each takes it seconds."""
    calls = prompts_for(load_model(args.model, dtype="bfloat16", device="cpu"), Cell(batch, args.prompt))
    runners = [Runner(engine, CPU) for engine in engines]

    def steps(runner: Runner) -> int:
        return min(args.new, args.eager_new) if isinstance(runner.engine, EagerBaseline) else args.new

    prompts = [next(calls) for _ in range(batch)]
    for runner in runners:
        runner.warm_up(prompts, 2)
    for _ in range(args.repeats):
        short, long, before = [[next(calls) for _ in range(batch)] for _ in range(3)]
        for runner in runners:
            if not runner.failed:
                runner.measure(short, long, steps(runner), before)
    for runner in runners:
        name = runner.engine.name
        if runner.failed:
            results.speeds[name, batch] = Speed(name, batch, failed=runner.failed)
            continue
        first, rest = statistics.median(runner.first), statistics.median(runner.rest)
        results.speeds[name, batch] = Speed(name, batch, first * 1e3, batch * steps(runner) / rest)
        if isinstance(runner.engine, Peer):
            runner.engine.close()


def share_of_bandwidth(llm: graft.LLM, speed: Speed, prompt: int, new: int, read: float) -> float | None:
    if speed.tokens_per_s is None:
        return None
    return step_bytes(llm.model.module, 1, prompt + (new + 1) / 2) * speed.tokens_per_s / read


def run(args: argparse.Namespace, threads: int | None) -> tuple[list[Verdict], Results, dict[str, Any]]:
    results = Results()
    engines, eager = make_engines(args, results)
    own = load_model(args.model, dtype="float32", device="cpu")
    length = args.prompt + args.new + 1
    tasks = {batch: Task(own, length, batch, args.model, threads) for batch in (1, 8)}
    ours = [Named(name, llm) for name, llm in engines.items()]
    read, how = cpu_read()
    measure_cell(args, 1, [*ours, *eager, LlamaCpp(tasks[1]), OpenVino(tasks[1])], results)
    measure_cell(args, 8, [*ours, LlamaCpp(tasks[8])], results)
    read = (read + cpu_read()[0]) / 2  # before and after: other processes come and go
    bandwidth = left = None
    if "graft bf16" in engines:
        llm = engines["graft bf16"]
        bandwidth = share_of_bandwidth(llm, results.speeds["graft bf16", 1], args.prompt, args.new, read)
        left = hog_table(llm, False, args.prompt, args.new, args.repeats)[0].left
    return verdicts(results, bandwidth, left), results, {"read_gb_per_s": read / 1e9, "read_how": how}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--eager", default="float32,bfloat16", help="dtypes of Hugging Face")
    parser.add_argument("--eager-new", type=int, default=8, help="decode steps of Hugging Face")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    quiet_libraries()
    threads = checked_threads(args.threads, CPU)
    with use_threads(threads):
        found, results, machine = run(args, threads)
    if args.json:
        speeds = [asdict(speed) for speed in results.speeds.values()]
        print(json.dumps({"targets": [asdict(v) for v in found], "speeds": speeds, "threads": threads, **machine}))
        return
    print(
        f"{args.model}, prompt {args.prompt}, new {args.new}, threads: {threads}, {machine['read_gb_per_s']:.1f} GB/s"
    )
    for speed in results.speeds.values():
        numbers = speed.failed or f"{speed.first_ms:10.1f} ms {speed.tokens_per_s:10.1f} tok/s"
        print(f"{speed.engine:22} batch {speed.batch} {numbers}")
    print(f"\n{'ratio':58} {'target':>6} {'here':>8}")
    for verdict in found:
        print(verdict.line())


if __name__ == "__main__":
    main()
