"""From logits to tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.base.errors import LogitsError
from graft.engine.core import Request
from graft.engine.logprobs import Logprob, logprobs
from graft.engine.sampling.distribution import sample_tokens
from graft.engine.sampling.penalties import edit_logits


@dataclass(frozen=True)
class SampledToken:
    """A token, and how likely the model held it and others, where that was asked for; or why there is none (-1)."""

    token: int
    logprobs: dict[int, Logprob] | None = None
    error: LogitsError | None = None


def sample(
    logits: Tensor, requests: Sequence[Request], end_tokens: frozenset[int] = frozenset()
) -> list[SampledToken]:
    """One token a request. logits: [n, vocab].

    Penalties, biases, end tokens barred before min_tokens, masks, temperature, min_p, top_k, top_p, sampling, in this
    order. Greedy rows take the largest logit after these edits. A row from which nothing can be chosen has an
    error, the others do not. Of a request, `params`, `prompt`, `new_tokens`, `generator` and `mask` are read.
    """
    edited = edit_logits(logits, requests, end_tokens)
    largest, tokens = edited.max(dim=-1)  # [n]; for greedy batches this and one copy to the host are all
    sampled = [row for row, request in enumerate(requests) if not request.params.greedy]
    if sampled:
        uniform = [torch.rand((), dtype=torch.float64, generator=requests[row].generator).item() for row in sampled]
        tokens[sampled] = sample_tokens(edited[sampled], [requests[row].params for row in sampled], uniform)
    chosen = torch.where(largest.abs() < math.inf, tokens, -1).tolist()
    choices = [SampledToken(token) if token >= 0 else SampledToken(token, error=LogitsError()) for token in chosen]
    wanted = [(row, request.params.logprobs) for row, request in enumerate(requests)]
    asked = [(row, count) for row, count in wanted if count is not None and chosen[row] >= 0]
    if asked:
        rows, counts = zip(*asked, strict=True)
        found = logprobs(logits[list(rows)], [chosen[row] for row in rows], counts)
        for row, each in zip(rows, found, strict=True):
            choices[row] = SampledToken(chosen[row], each)
    return choices


def make_generator(seed: int | None) -> torch.Generator:
    """A generator of its own for a request, so that its text does not depend on the batch around it."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed % 2**64)  # the seeds of siblings, seed + i, may run past 64 bits
    return generator
