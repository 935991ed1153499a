"""Latency and throughput over batch sizes and prompts, beside Hugging Face on the same work in the same run.

Every call has prompts of its own, so that nothing is found in a prefix cache; all engines get the same ones, in
turns. Baselines are made for one cell and let go after it: compiled code, its caches and its memory pools.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from graft.base.errors import UsageError
from graft.base.files import Progress
from graft.bench.baselines.baseline import BenchEngine, Peer, Task
from graft.bench.baselines.hf import BASELINES
from graft.bench.limits.machine import facts
from graft.bench.limits.roofline import Roofline
from graft.bench.limits.traffic import cache_bytes_per_token, prompt_flops, step_bytes, weight_bytes
from graft.bench.plan import BenchPlan, Cell
from graft.bench.ranks import devices_of, kept_bytes, quantized_bytes, rank_facts
from graft.bench.rows import Bench, Row
from graft.bench.runner import CellWork, Graft, Runner
from graft.engine.llm import LLM
from graft.models.loaded import LoadedModel
from graft.weights.quantize import FP8

WARM_UP = 4  # new tokens of the call that compiles; recompilation for a second step is in it


@dataclass
class BenchRun:
    """What the cells of one benchmark share."""

    llm: LLM
    plan: BenchPlan
    build_seconds: float
    roofline: Roofline | None
    tell: Callable[[str], None]
    source: str = ""  # what the model was loaded from
    began: float = field(default_factory=lambda: time.perf_counter())
    longest: dict[str, float] = field(default_factory=dict)  # the first calls of each baseline so far

    def out_of_time(self, name: str) -> str:
        """Why a baseline is not begun, or nothing."""
        limit, gone = self.plan.time_limit, time.perf_counter() - self.began
        before = self.longest.get(name, 0.0)
        if limit is None or gone + before < limit:
            return ""
        took = f", and its first calls took {before:.0f} s before" if before else ""
        return f"not begun: {gone:.0f} of {limit:.0f} s have passed{took}; raise --time-limit"


def bench(
    llm: LLM,
    plan: BenchPlan,
    build_seconds: float = 0.0,
    progress: Progress | None = None,
    roofline: Roofline | None = None,
    notes: Mapping[str, Any] | None = None,
    source: str | None = None,
) -> Bench:
    """Measures graft and its baselines in every cell. Ctrl-C ends it with the cells that are through.

    `notes` go into the setup, beside what is known here. `source`: what the model was loaded from, its name if left
    out; an engine with formats of its own reads that.
    """
    plan.check_context(llm.model.context)
    most = llm.engine.scheduler.max_num_seqs
    if max(plan.batches) > most:
        raise UsageError(
            f"a batch of {max(plan.batches)} is more than max_num_seqs, {most}: it would not run at once"
        )
    cells, done = list(plan.cells()), 0
    tell = progress or (lambda *_: None)
    named = source or llm.model.name
    run = BenchRun(llm, plan, build_seconds, roofline, lambda what: tell(what, done, len(cells)), named)
    result = Bench(setup_of(run, notes or {}))
    try:
        for done, cell in enumerate(cells):  # noqa: B007 (read by the progress)
            result = replace(result, rows=(*result.rows, *bench_cell(run, cell)))
    except KeyboardInterrupt:
        return replace(result, interrupted=True, setup={**result.setup, **rank_facts(llm)})
    return replace(result, setup={**result.setup, **rank_facts(llm)})


def bench_cell(run: BenchRun, cell: Cell) -> list[Row]:
    try:
        return measure_cell(run, cell)
    finally:
        forget()


def measure_cell(run: BenchRun, cell: Cell) -> list[Row]:
    plan, model = run.plan, run.llm.model
    device = run.llm.device
    task = Task(model, plan.length(cell), cell.batch, run.source, plan.threads)
    runners = [Runner(Graft(run.llm), device, run.build_seconds)]
    runners += [Runner(make_baseline(name, task), device) for name in plan.against]
    try:
        measure(run, cell, runners)
        rows = []
        for runner in runners:
            work = work_of(run, cell, runner.engine, runner is runners[0])
            rows.append(runner.row(plan, cell, work, run.roofline, runners[0].tokens))
        return rows
    finally:
        for runner in runners:
            if isinstance(runner.engine, Peer):
                runner.engine.close()


def measure(run: BenchRun, cell: Cell, runners: list[Runner]) -> None:
    """First calls one after the other, then the repeats in turns. The first runner is graft's and always begun."""
    plan, calls = run.plan, prompts_for(run.llm.model, cell)
    where = f"batch {cell.batch}, prompt {cell.prompt}"
    prompts = [next(calls) for _ in range(cell.batch)]
    for runner in runners:
        name = runner.engine.name
        runner.failed = run.out_of_time(name) if runner is not runners[0] else ""
        if not runner.failed:
            run.tell(f"{where}: {name}, first calls")
            runner.warm_up(prompts, min(1 + plan.new, WARM_UP))
            run.longest[name] = max(run.longest.get(name, 0.0), runner.setup_seconds)
    for repeat in range(plan.repeats):
        short, long, before = ([next(calls) for _ in range(cell.batch)] for _ in range(3))
        for runner in runners:
            if not runner.failed:
                run.tell(f"{where}: {runner.engine.name}, repeat {repeat + 1} of {plan.repeats}")
                runner.measure(short, long, plan.new, before)


def work_of(run: BenchRun, cell: Cell, engine: BenchEngine, ours: bool) -> CellWork:
    """What the cell asks of an engine: they differ where one reads weights in another format."""
    module = run.llm.model.module
    # step i of `new` reads the prompt, the first token and the i - 1 tokens after it
    tokens = cell.prompt + (run.plan.new + 1) / 2
    flops = prompt_flops(module, cell.batch, cell.prompt)
    if isinstance(engine, Peer):
        return CellWork(engine.step_bytes(cell.batch, tokens), flops)
    if not ours:
        return CellWork(step_bytes(module, cell.batch, tokens), flops)
    weights = quantized_bytes(run.llm, cell.batch) or weight_bytes(module, cell.batch)
    devices = devices_of(run.llm)
    return CellWork((weights + cell.batch * kept_bytes(run.llm, tokens)) / devices, flops / devices)


def make_baseline(name: str, task: Task) -> BenchEngine:
    return BASELINES[name](task)


def forget() -> None:
    """Lets go of what baselines compiled. Without it a few batch sizes would also reach Dynamo's limit of
    recompilations of one function, after which it runs eagerly."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cache_need(model: LoadedModel, plan: BenchPlan, kv_cache_dtype: str = "auto") -> int:
    """Bytes for what is measured, and no more: by default a cache takes all memory that is free on a GPU. Before the
    graph is made, so that latent rows count as keys and values."""
    cache = FP8 if kv_cache_dtype == "fp8" else None
    return model.layers * cache_bytes_per_token(model.module, cache) * plan.cache_tokens()


def prompts_for(model: LoadedModel, cell: Cell) -> Iterator[list[int]]:
    """Random tokens, the same in every run; no two prompts alike, in other cells neither."""
    source = random.Random(f"{cell.batch} {cell.prompt}")
    vocabulary = model.module.config.vocab_size
    while True:
        yield [source.randrange(vocabulary) for _ in range(cell.prompt)]


def setup_of(run: BenchRun, notes: Mapping[str, Any]) -> dict[str, Any]:
    llm = run.llm
    device = llm.device
    return {
        "model": llm.model.name,
        "dtype": str(llm.model.module.dtype).removeprefix("torch."),
        **facts(device),
        "backend": llm.backend,
        "quantize": llm.quantized.format if llm.quantized else None,
        "graft_build_seconds": round(run.build_seconds, 2),
        "roofline": None if run.roofline is None else asdict(run.roofline),
        **notes,
        **asdict(run.plan),
    }
