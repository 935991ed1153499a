"""Choosing tokens on the device, with sizes that do not depend on the data, so that it can be captured.

The tokens are those of engine/sampling/sampling.py for the same uniform numbers. A nucleus wider than HEAD tokens
cannot be sampled here: the row's token is WIDE, and the host has it computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from graft.engine.core import Request
from graft.engine.params import SamplingParams
from graft.engine.sampling.distribution import HEAD, invert, rows_at_once
from graft.ops.argmax_rows.op import argmax_into

# greedy: the largest logit. sampled: temperature and min_p. cut: top_k and top_p too, which need the heaviest tokens
# in order. logits: nothing is chosen on the device.
Kind = Literal["greedy", "sampled", "cut", "logits"]
LARGEST_K = 1 << 40  # any larger top_k keeps as much, and more than 64 bits do not fit
WIDE = -2  # as a token; -1 is a row without a finite largest value


@dataclass(frozen=True)
class SamplingRows:
    """One a row, [B, 1] each. A greedy row has temperature 0."""

    temperature: Tensor  # float64
    min_p: Tensor  # float64
    top_p: Tensor  # float64
    top_k: Tensor  # int64; 0 or less is off
    uniform: Tensor  # float64, in [0, 1)

    def part(self, first: int, last: int) -> SamplingRows:
        return SamplingRows(
            *(t[first:last] for t in (self.temperature, self.min_p, self.top_p, self.top_k, self.uniform))
        )


def uniform_numbers(requests: Sequence[Request]) -> list[float]:
    """What their tokens are sampled with, from the generator of each; a greedy one needs none."""
    return [
        0.0 if r.params.greedy else torch.rand((), dtype=torch.float64, generator=r.generator).item()
        for r in requests
    ]


def settings_of(requests: Sequence[Request], device: torch.device) -> SamplingRows:
    """With fresh numbers."""
    each = [r.params for r in requests]
    numbers = np.array(
        [[p.temperature for p in each], [p.min_p for p in each], [p.top_p for p in each], uniform_numbers(requests)],
        dtype=np.float64,  # a whole number above 2^63 would make it an array of objects
    )
    temperature, min_p, top_p, uniform = sent(numbers, device)
    (top_k,) = sent(np.array([[min(p.top_k, LARGEST_K) for p in each]]), device)
    return SamplingRows(temperature, min_p, top_p, top_k, uniform)


def sent(values: np.ndarray, device: torch.device) -> tuple[Tensor, ...]:
    """[n, 1] on the device for each line of values [lines, n], in one copy that nobody waits for."""
    found = torch.from_numpy(values)[..., None]
    return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True).unbind()


def host_reason(params: SamplingParams, new_tokens: int) -> str | None:
    """Why the host chooses the next token of a request that has so many, from the logits of a captured step."""
    if params.logprobs is not None:
        return "log probabilities"
    if params.penalised:
        return "penalties"
    if params.grammar is not None:
        return "a grammar"
    if params.allowed_token_ids is not None:
        return "allowed_token_ids"
    if params.bad_words:
        return "bad_words"
    if params.logit_bias:
        return "a logit bias"
    if new_tokens < params.min_tokens:
        return "min_tokens"
    if not params.greedy and params.top_k > HEAD:
        return f"top_k above {HEAD}"
    return None


def kind_of(params: SamplingParams, new_tokens: int) -> Kind:
    """What the next token of a request needs that has so many."""
    if host_reason(params, new_tokens) is not None:
        return "logits"
    if params.greedy:
        return "greedy"
    return "cut" if params.top_k > 0 or params.top_p < 1 else "sampled"


def choose(kind: Kind, tokens: Tensor, logits: Tensor, settings: SamplingRows | None) -> None:
    """Writes the tokens [B] of logits [B, vocab]. A greedy kind needs no settings."""
    argmax_into(tokens, logits)
    if kind == "greedy" or settings is None:
        return
    rows = rows_at_once(logits.shape[-1])
    for first in range(0, len(tokens), rows):
        some, last = settings.part(first, first + rows), first + rows
        sampled = sample_fixed(logits[first:last], some, cut=kind == "cut")
        greedy, largest = some.temperature[:, 0] == 0, tokens[first:last]
        largest.copy_(torch.where(greedy | (largest < 0), largest, sampled))


def sample_fixed(logits: Tensor, settings: SamplingRows, *, cut: bool) -> Tensor:
    """engine/sampling/distribution.py, the same arithmetic for every row at once. [n]."""
    exact = logits.double()
    temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0)
    kept = ((exact - exact.amax(-1, keepdim=True)) / temperature).exp()
    kept.masked_fill_(kept < settings.min_p, 0)
    if not cut:
        return invert(kept, settings.uniform)
    vocab = kept.shape[-1]
    width = min(HEAD, vocab)
    head = kept.topk(width).values  # [n, width], heaviest first
    limited = (settings.top_k > 0) & (settings.top_k < vocab)
    last = torch.where(limited, head.gather(-1, (settings.top_k - 1).clamp(0, width - 1)), 0.0)
    kept.masked_fill_(kept < last, 0)
    head.masked_fill_(head < last, 0)
    nuclear = settings.top_p < 1
    below = head.cumsum(-1) < settings.top_p * kept.cumsum(-1)[:, -1:]
    last = torch.where(nuclear, head.gather(-1, below.sum(-1, keepdim=True).clamp(max=width - 1)), 0.0)
    kept.masked_fill_(kept < last, 0)
    sampled = invert(kept, settings.uniform)
    return torch.where(nuclear[:, 0] & below[:, -1], WIDE, sampled) if width < vocab else sampled
