"""Logits → what a text costs and which answer is likeliest. A scorer gives float32 logits [tokens, vocabulary]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.base.errors import UsageError
from graft.bench.evaluate.tasks import EvalQuestion, EvalTask
from graft.bench.quality import Quality, engine_logits, quality
from graft.engine.llm import LLM

Scorer = Callable[[Sequence[int], int], Tensor]  # (ids, how many of them at the end come in decode steps)
WINDOW = 256  # tokens of the text that are predicted from one beginning
DECODED = 16  # of them at the end in decode steps, whose kernels are others than those of a prompt


def engine_scorer(llm: LLM) -> Scorer:
    return lambda ids, decoded: engine_logits(llm, ids, decoded=min(decoded, len(ids) - 1))


def module_scorer(module: Any) -> Scorer:
    """Hugging Face's own forward."""

    @torch.no_grad()
    def score(ids: Sequence[int], _decoded: int) -> Tensor:
        return module(torch.tensor([ids], device=module.device)).logits[0].float()

    return score


@dataclass(frozen=True)
class Encoder:
    """Text → token ids. Without a tokenizer its bytes are the ids: that says nothing of the model, but before and
    after can be compared."""

    tokenizer: Any
    vocabulary: int

    def __call__(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return [byte % self.vocabulary for byte in text.encode()]
        return self.tokenizer(text)["input_ids"]


def cut(encode: Encoder, context: str, ending: str) -> tuple[list[int], list[int]]:
    """Tokens of the whole text, cut where those of the context end: spaces belong to what follows, as lm-eval has it.
    Behind nothing, the first token is the context."""
    whole = encode(context + ending)
    start = len(encode(context.rstrip())) or 1
    return whole[:start], whole[start:]


def windows(ids: Sequence[int], size: int = WINDOW) -> list[list[int]]:
    found = [list(ids[at : at + size]) for at in range(0, len(ids), size)]
    found = [one for one in found if len(one) > 1]
    if not found:
        raise UsageError(f"a text of {len(ids)} tokens is too short: its second token is the first that is predicted")
    return found


@torch.no_grad()
def text_qualities(before: Scorer, after: Scorer, parts: Sequence[Sequence[int]]) -> tuple[Quality, Quality]:
    """Both over all windows, the second compared with the first."""
    first, second = [], []
    for ids in parts:
        original = before(ids, DECODED)
        first.append(quality(original, ids))
        second.append(quality(after(ids, DECODED), ids, original))
    weights = [len(ids) - 1 for ids in parts]
    return over_all(first, weights), over_all(second, weights)


def over_all(rows: Sequence[Quality], weights: Sequence[int]) -> Quality:
    def mean(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)

    perplexity = math.exp(mean(math.log(row.perplexity) for row in rows))
    return Quality(perplexity, mean(row.divergence for row in rows), mean(row.agreement for row in rows))


def likelihood(score: Scorer, context: Sequence[int], ending: Sequence[int]) -> tuple[float, bool]:
    """The log probability of `ending` behind `context`, and whether greedy decoding would write it."""
    logits = score([*context, *ending], 0)[len(context) - 1 : -1]
    wanted = torch.tensor(list(ending), device=logits.device)
    found = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum()
    return float(found), bool((logits.argmax(-1) == wanted).all())


def likelihoods(score: Scorer, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """Of each ending; one pass over the context where all are one token behind the same."""
    context = pairs[0][0]
    if any(start != context or len(ending) != 1 for start, ending in pairs):
        return [likelihood(score, start, ending)[0] for start, ending in pairs]
    found = score(context, 0)[-1].log_softmax(-1)
    return [float(found[ending[0]]) for _, ending in pairs]


def answer(score: Scorer, encode: Encoder, question: EvalQuestion) -> int | None:
    """Which choice is likeliest; None where that cannot be told, since two are alike or one is no number."""
    scores = likelihoods(score, [cut(encode, question.prompt, f" {choice}") for choice in question.choices])
    best = max(scores, key=lambda value: -math.inf if math.isnan(value) else value)
    alone = scores.count(best) == 1 and not any(map(math.isnan, scores))
    return scores.index(best) if alone else None


def answers(score: Scorer, encode: Encoder, task: EvalTask) -> list[int | None]:
    return [answer(score, encode, question) for question in task.questions]
