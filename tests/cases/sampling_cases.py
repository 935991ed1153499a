"""Sampling in plain Python, written on its own: the exact probability of each token."""

from __future__ import annotations

import math
from types import SimpleNamespace

from graft.engine.params import SamplingParams
from graft.engine.sampling.sampling import make_generator

INF = math.inf
ORDER = ("temperature", "min_p", "top_k", "top_p")
LOGITS = [1.0, 0.5, -0.25, 2.0, 0.0, -1.0, 1.5, 0.75, -0.5, 1.25, 0.25, -2.0]
PROMPT, NEW = [3, 1, 4, 8, 2], [6, 9, 6, 6, 0]
HOT = SamplingParams(temperature=1.0, max_tokens=64)


def request(params: SamplingParams, prompt=(), new=(), seed=0):
    return SimpleNamespace(params=params, prompt=list(prompt), new_tokens=list(new), generator=make_generator(seed))


def penalised(logits, params, prompt=(), new=(), ends=()) -> list[float]:
    """Logits after penalties and barred end tokens."""
    x = list(logits)
    for t in {*prompt, *new}:
        x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
    for t in set(new):
        x[t] -= params.presence_penalty + params.frequency_penalty * list(new).count(t)
    if len(new) < params.min_tokens:
        for t in {*ends, *params.stop_token_ids}:
            x[t] = -INF
    return x


def normal(p: list[float]) -> list[float]:
    total = math.fsum(p)
    return [value / total for value in p]


def heaviest(p: list[float], top_p: float) -> float:
    """The weight of the last of the fewest heaviest tokens that reach top_p together."""
    total = 0.0
    for value in sorted(p, reverse=True):
        total += value
        if total >= top_p:
            return value
    return 0.0


def exact(x: list[float], params: SamplingParams, order=ORDER) -> list[float]:
    """The probability of each token, step by step in the given order."""
    largest = max(x)
    p = normal([math.exp(value - largest) for value in x])
    for step in order:
        if step == "temperature":
            p = normal([value ** (1 / params.temperature) for value in p])
        elif step == "min_p":
            last = params.min_p * max(p)
            p = normal([value if value >= last else 0.0 for value in p])
        elif step == "top_k" and params.top_k > 0:
            last = sorted(p, reverse=True)[min(params.top_k, len(p)) - 1]
            p = normal([value if value >= last else 0.0 for value in p])
        elif step == "top_p" and params.top_p < 1:
            last = heaviest(p, params.top_p)
            p = normal([value if value >= last else 0.0 for value in p])
    return p
