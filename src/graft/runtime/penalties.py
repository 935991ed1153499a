"""What changes logits before a token is chosen: penalties for tokens seen, and end tokens that come too early."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from graft.runtime.core import Request


def edit(logits: Tensor, requests: Sequence[Request], end_tokens: frozenset[int]) -> Tensor:
    """Penalties, then barred end tokens. logits: [n, vocab], returned as it is where nothing changes, else a copy."""
    seen = [entry for row, request in enumerate(requests) for entry in seen_tokens(row, request)]
    barred = [
        (row, token)
        for row, request in enumerate(requests)
        if request.params.min_tokens and len(request.new_tokens) < request.params.min_tokens
        for token in end_tokens.union(request.params.stop_token_ids or ())
        if token < logits.shape[-1]
    ]
    if not seen and not barred:
        return logits
    edited = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if seen:
        penalise(edited, seen, requests)
    if barred:
        rows, tokens = torch.tensor(barred, device=edited.device).unbind(-1)
        edited[rows, tokens] = -math.inf
    return edited


def seen_tokens(row: int, request: Request) -> Iterator[tuple[int, int, int]]:
    """(row, token, how often it is among the new tokens) for each token that has a penalty."""
    if request.params.penalised:
        counts = Counter(request.new_tokens)
        if request.params.repetition_penalty != 1:
            counts.update(dict.fromkeys(request.prompt, 0))
        for token, times in counts.items():
            yield row, token, times


def penalise(logits: Tensor, seen: list[tuple[int, int, int]], requests: Sequence[Request]) -> None:
    """Penalties for the tokens seen, in place. logits: [n, vocab].

    Repetition divides positive logits and multiplies negative ones; then a token that is among the new ones loses
    `presence_penalty` once and `frequency_penalty` for each time.
    """
    rows, tokens, times = torch.tensor(seen, device=logits.device).unbind(
        -1
    )  # [entries] each, no token of a row twice
    each = [(r.params.repetition_penalty, r.params.presence_penalty, r.params.frequency_penalty) for r in requests]
    strengths = torch.tensor(each, dtype=logits.dtype, device=logits.device)[rows]
    repetition, presence, frequency = strengths.unbind(-1)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - presence * (times > 0) - frequency * times
