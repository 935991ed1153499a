"""What changes logits before a token is chosen: penalties for tokens seen, and end tokens that come too early."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from graft.runtime.core import Request


def edit(logits: Tensor, requests: Sequence[Request], end_tokens: frozenset[int]) -> Tensor:
    """Penalties, then barred end tokens. logits: [n, vocab], returned as it is where nothing changes, else a copy."""
    penalised = [row for row, request in enumerate(requests) if request.params.penalised]
    barred = [
        (row, token)
        for row, request in enumerate(requests)
        if request.params.min_tokens and len(request.new_tokens) < request.params.min_tokens
        for token in sorted(end_tokens.union(request.params.stop_token_ids or ()))
        if token < logits.shape[-1]
    ]
    if not penalised and not barred:
        return logits
    edited = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for row in penalised:
        penalise(edited[row], requests[row])
    if barred:
        rows, tokens = torch.tensor(barred, device=edited.device).unbind(-1)
        edited[rows, tokens] = -math.inf
    return edited


def penalise(logits: Tensor, request: Request) -> None:
    """Penalties of one request, in place. logits: [vocab].

    Repetition divides positive logits of seen tokens and multiplies negative ones; then a token that is among the new
    ones loses `presence_penalty` once and `frequency_penalty` for each time.
    """
    params, counts = request.params, Counter(request.new_tokens)
    if params.repetition_penalty != 1:
        seen = torch.tensor(list(counts.keys() | set(request.prompt)), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if counts and (params.presence_penalty or params.frequency_penalty):
        tokens = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * times
