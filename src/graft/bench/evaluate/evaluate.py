"""Two engines, or Hugging Face and an engine, on the same text and tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from graft.base.files import Progress
from graft.bench.evaluate.score import Encoder, Scorer, answers, text_qualities, windows
from graft.bench.evaluate.tasks import EvalTask


@dataclass(frozen=True)
class TaskResult:
    """before, after: the share of right answers. changed: how many answers are others; lost: of them those that were
    right."""

    task: str
    questions: int
    chance: float
    before: float
    after: float
    changed: int
    lost: int

    @property
    def error(self) -> float:
        """One standard error of an accuracy over so many questions."""
        return math.sqrt(self.after * (1 - self.after) / self.questions)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True)
class Evaluation:
    """before: Hugging Face, or the engine without the transforms. divergence: mean KL of its predictions from those
    after, in nats a token; agreement: the share of tokens with the same likeliest successor."""

    model: str
    setup: dict[str, Any]
    before: str
    after: str
    tokens: int
    tokens_are: str  # "tokens of the model's tokenizer", or "bytes"
    perplexity_before: float
    perplexity_after: float
    divergence: float
    agreement: float
    tasks: tuple[TaskResult, ...]
    notes: tuple[str, ...] = ()
    lm_eval: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.perplexity_after / self.perplexity_before

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity_ratio": self.ratio, "tasks": [one.to_dict() for one in self.tasks]}


@dataclass(frozen=True)
class EvalSides:
    """What is compared, and how each is called."""

    before: Scorer
    after: Scorer
    before_name: str
    after_name: str


def evaluate(
    sides: EvalSides,
    encode: Encoder,
    text: str,
    tokens: int,
    tasks: Sequence[EvalTask],
    *,
    model: str,
    setup: dict[str, Any],
    notes: Sequence[str] = (),
    lm_eval: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    parts = windows(encode(text)[:tokens])
    steps = 1 + len(tasks)
    if progress:
        progress("the text", 0, steps)
    before, after = text_qualities(sides.before, sides.after, parts)
    results = []
    for number, task in enumerate(tasks, 1):
        if progress:
            progress(task.name, number, steps)
        results.append(task_result(sides, encode, task))
    return Evaluation(
        model, setup, sides.before_name, sides.after_name, sum(map(len, parts)),
        "bytes" if encode.tokenizer is None else "tokens of the model's tokenizer", before.perplexity,
        after.perplexity, after.divergence, after.agreement, tuple(results), tuple(notes), lm_eval or {},
    )  # fmt: skip


def task_result(sides: EvalSides, encode: Encoder, task: EvalTask) -> TaskResult:
    first, second = (answers(side, encode, task) for side in (sides.before, sides.after))
    count = len(task.questions)
    pairs = list(zip(first, second, strict=True))
    return TaskResult(
        task.name, count, task.chance, first.count(0) / count, second.count(0) / count,
        sum(a != b for a, b in pairs), sum(a == 0 and b != 0 for a, b in pairs),
    )  # fmt: skip
