"""Latency and throughput of a model over batch sizes, beside Hugging Face on the same work in the same run.

Everything is measured from outside, with a clock around whole calls of `generate`: one with a single new token gives
the time to the first token, and one with `new` more, less the former, that of the decode steps. Every call has
prompts of its own, so that nothing is found in a prefix cache; all contestants get the same ones, in turns.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from graft.errors import OutOfCache, PromptTooLong, UsageError, near
from graft.files import Progress
from graft.models.load import LoadedModel
from graft.models.registry import entries
from graft.runtime.llm import LLM
from graft.runtime.params import SamplingParams
from graft.workbench.compare import CompiledRival, EagerRival
from graft.workbench.traffic import step_bytes

RIVALS = ("eager", "compile")
WARM_UP = 4  # new tokens of the call that compiles; recompilation for a second step is in it


@dataclass(frozen=True)
class Plan:
    """What is measured. `new` counts the tokens after the first."""

    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 128
    new: int = 32
    repeats: int = 3
    against: tuple[str, ...] = RIVALS

    def __post_init__(self) -> None:
        for name, value in (("batch", min(self.batches, default=0)), ("prompt", self.prompt), ("new", self.new)):
            if value < 1:
                raise UsageError(f"--{name} must be at least 1, but is {value if self.batches else 'empty'}")
        if self.repeats < 1:
            raise UsageError(f"--repeats must be at least 1, but is {self.repeats}")
        unknown = next((name for name in self.against if name not in RIVALS), None)
        if unknown is not None:
            raise UsageError(f"--against: unknown rival {unknown!r}{near(unknown, (*RIVALS, 'none'))}")

    def check_context(self, context: int | None) -> None:
        if context is not None and self.prompt + 1 + self.new > context:
            raise PromptTooLong(self.prompt, 1 + self.new, context)


@dataclass(frozen=True)
class Row:
    """One contestant at one batch size: medians over the repeats. A failure says why and leaves the rest empty.

    setup_seconds: what it took until the first calls were through, compilation included; in none of the others.
    same_tokens: the share of the warm-up's tokens that are graft's.
    """

    engine: str
    batch: int
    setup_seconds: float = 0.0
    first_token_ms: float | None = None  # until every prompt of the batch has its first token
    prefill_tokens_per_s: float | None = None
    token_ms: float | None = None  # a decode step: one more token for each
    decode_tokens_per_s: float | None = None
    gb_per_s: float | None = None
    same_tokens: float | None = None
    failed: str = ""


@dataclass(frozen=True)
class Bench:
    setup: dict[str, Any]
    rows: tuple[Row, ...] = ()
    interrupted: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def ratio(self, row: Row) -> float | None:
        """How many times as fast as this row graft decodes."""
        ours = next((r for r in self.rows if r.engine == "graft" and r.batch == row.batch), None)
        if ours is None or not ours.decode_tokens_per_s or not row.decode_tokens_per_s:
            return None
        return ours.decode_tokens_per_s / row.decode_tokens_per_s


class Contestant(Protocol):
    name: str

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]: ...


class Graft:
    name = "graft"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        # bytes that a step need not read, as the weights are quantized; rivals read the module's own
        self.spared = llm.quantized.bytes if llm.quantized else 0

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        outputs = self.llm.generate([list(p) for p in prompts], params)
        failed = next((output.error for output in outputs if output.error), None)
        if failed is not None:
            raise failed
        if self.llm.stats.preemptions:
            raise OutOfCache("the batch does not fit into the key-value cache at once; raise --kv-cache-memory")
        return [output.token_ids for output in outputs]


@dataclass
class Runner:
    """A contestant at one batch size, its times, and what it died of."""

    contestant: Contestant
    setup_seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    failed: str = ""

    def attempt(self, work: Callable[[], Any]) -> float:
        """Seconds of `work`; whatever it raises ends this contestant, not the run."""
        started = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001  a rival may die of anything, and that is its result
            lines = str(error).strip().splitlines()
            self.failed = f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
        return time.perf_counter() - started

    def warm_up(self, prompts: Sequence[Sequence[int]], new: int) -> None:
        def work() -> None:
            self.tokens = self.contestant.generate(prompts, new)

        self.setup_seconds = self.attempt(work)

    def measure(self, short: Sequence[Sequence[int]], long: Sequence[Sequence[int]], new: int) -> None:
        first = self.attempt(lambda: self.contestant.generate(short, 1))
        whole = 0.0 if self.failed else self.attempt(lambda: self.contestant.generate(long, 1 + new))
        self.first.append(first)
        self.rest.append(whole - first)

    def row(self, plan: Plan, batch: int, read: float, ours: list[list[int]]) -> Row:
        row = Row(self.contestant.name, batch, round(self.setup_seconds, 2), failed=self.failed)
        if self.failed:
            return row
        first, rest = statistics.median(self.first), statistics.median(self.rest)
        row = replace(
            row,
            first_token_ms=first * 1e3,
            prefill_tokens_per_s=batch * plan.prompt / first,
            same_tokens=agreement(self.tokens, ours),
        )
        if rest <= 0:  # on tiny models noise can be larger than the steps
            return replace(row, failed="the decode steps were too short to tell from noise; raise --new")
        step = rest / plan.new
        return replace(row, token_ms=step * 1e3, decode_tokens_per_s=batch / step, gb_per_s=read / step / 1e9)


def bench(llm: LLM, plan: Plan, build_seconds: float = 0.0, progress: Progress | None = None) -> Bench:
    """Measures graft and its rivals at every batch size. Ctrl-C ends it with the batches that are through."""
    plan.check_context(llm.model.context)
    most = llm.engine.scheduler.max_num_seqs
    if max(plan.batches) > most:
        raise UsageError(
            f"a batch of {max(plan.batches)} is more than max_num_seqs, {most}: it would not run at once"
        )
    tell = progress or (lambda *_: None)
    result = Bench(setup_of(llm, plan, build_seconds))
    contestants: list[Contestant] = [Graft(llm)]
    if "eager" in plan.against:
        contestants.append(EagerRival(llm.model))
    if "compile" in plan.against:
        contestants.append(CompiledRival(llm.model, plan.prompt + 1 + plan.new))
    calls = prompts_for(llm.model, plan.prompt)
    try:
        for index, batch in enumerate(plan.batches):
            done, total = index * (plan.repeats + 1), len(plan.batches) * (plan.repeats + 1)
            rows = bench_batch(contestants, plan, batch, calls, llm.model, lambda w, d: tell(w, done + d, total))  # noqa: B023
            result = replace(result, rows=(*result.rows, *rows))
    except KeyboardInterrupt:
        return replace(result, interrupted=True)
    return result


def bench_batch(
    contestants: Sequence[Contestant],
    plan: Plan,
    batch: int,
    calls: Iterator[list[int]],
    model: LoadedModel,
    tell: Callable[[str, int], None],
) -> list[Row]:
    runners = [Runner(contestant) for contestant in contestants]
    prompts = [next(calls) for _ in range(batch)]
    for runner in runners:
        tell(f"batch {batch}: {runner.contestant.name}, first calls", 0)
        runner.warm_up(prompts, min(1 + plan.new, WARM_UP))
    for repeat in range(plan.repeats):
        short, long = ([next(calls) for _ in range(batch)] for _ in range(2))
        for runner in runners:
            if not runner.failed:
                tell(f"batch {batch}: {runner.contestant.name}, repeat {repeat + 1} of {plan.repeats}", repeat + 1)
                runner.measure(short, long, plan.new)
    # step i of `new` reads the prompt, the first token and the i - 1 tokens after it
    read = step_bytes(model.module, batch, plan.prompt + (plan.new + 1) / 2)
    return [
        runner.row(plan, batch, read - getattr(runner.contestant, "spared", 0), runners[0].tokens)
        for runner in runners
    ]


def prompts_for(model: LoadedModel, length: int) -> Iterator[list[int]]:
    """Random tokens, the same in every run; no two prompts alike."""
    source = random.Random(0)
    vocabulary = model.module.config.vocab_size
    while True:
        yield [source.randrange(vocabulary) for _ in range(length)]


def agreement(tokens: list[list[int]], ours: list[list[int]]) -> float | None:
    """The share of equal tokens; None where graft has none to compare with."""
    pairs = [(a, b) for left, right in zip(tokens, ours, strict=False) for a, b in zip(left, right, strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def setup_of(llm: LLM, plan: Plan, build_seconds: float) -> dict[str, Any]:
    device = next(llm.model.module.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {
        "model": llm.model.name,
        "dtype": str(llm.model.module.dtype).removeprefix("torch."),
        "device": str(device),
        "device_name": name,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "backend": llm.backend,
        "quantize": llm.quantized.format if llm.quantized else None,
        "graft_build_seconds": round(build_seconds, 2),
        **asdict(plan),
    }


def known_context(model: str) -> int | None:
    """The context of a model as far as it can be told without loading it."""
    settings: Any = {}
    if model in entries():
        settings = entries()[model].settings
    elif (file := Path(model) / "config.json").is_file():
        try:
            settings = json.loads(file.read_text())
        except ValueError:
            return None  # loading the model says what is wrong with the file
    if not isinstance(settings, Mapping):
        return None
    return settings.get("max_position_embeddings") or settings.get("n_positions")
