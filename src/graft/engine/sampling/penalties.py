"""What changes logits before a token is chosen: penalties for tokens seen, biases, end tokens that come too early,
and masks (grammars, allowed_token_ids, bad_words)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from graft.engine.core import Request


def edit_logits(logits: Tensor, requests: Sequence[Request], end_tokens: frozenset[int]) -> Tensor:
    """Penalties, biases, barred end tokens, masks. logits: [n, vocab], a copy where something changes."""
    seen = [seen_tokens(request) if request.params.penalised else {} for request in requests]
    barred = [
        (row, token)
        for row, request in enumerate(requests)
        if request.params.min_tokens and len(request.new_tokens) < request.params.min_tokens
        for token in end_tokens.union(request.params.stop_token_ids or ())
        if token < logits.shape[-1]
    ]
    biased = [(row, *pair) for row, request in enumerate(requests) for pair in request.params.biases]
    masks = [(row, r.mask) for row, r in enumerate(requests) if r.params.masked and r.mask is not None]
    if not any(seen) and not barred and not biased and not masks:
        return logits
    edited = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if any(seen):
        penalise(edited, seen, requests)
    if biased:
        bias(edited, biased)
    if barred:
        rows, tokens = torch.tensor(barred, device=edited.device).unbind(-1)
        edited[rows, tokens] = -math.inf
    for row, mask in masks:
        allowed = torch.from_numpy(mask.allowed()).to(edited.device)
        edited[row, : len(allowed)].masked_fill_(~allowed, -math.inf)
        edited[row, len(allowed) :] = -math.inf
    return edited


def bias(logits: Tensor, entries: Sequence[tuple[int, int, float]]) -> None:
    """Adds to logits [n, vocab], in place. entries: row, token, how much; no token of a row twice."""
    rows, tokens = torch.tensor([entry[:2] for entry in entries], device=logits.device).unbind(-1)
    logits[rows, tokens] += torch.tensor([entry[2] for entry in entries], dtype=logits.dtype, device=logits.device)


def seen_tokens(request: Request) -> dict[int, int]:
    """The tokens that have a penalty, and how often each is among the new ones."""
    times = dict.fromkeys(request.prompt, 0) if request.params.repetition_penalty != 1 else {}
    for token in request.new_tokens:
        times[token] = times.get(token, 0) + 1
    return times


def penalise(logits: Tensor, seen: Sequence[dict[int, int]], requests: Sequence[Request]) -> None:
    """Penalties for the tokens seen by each row, in place. logits: [n, vocab].

    Repetition divides positive logits and multiplies negative ones; then a token that is among the new ones loses
    `presence_penalty` once and `frequency_penalty` for each time.
    """
    entries = np.stack(  # by numpy: torch.tensor takes three times as long for lists of thousands
        [
            np.repeat(np.arange(len(seen)), [len(times) for times in seen]),
            np.fromiter(chain.from_iterable(seen), np.int64),
            np.fromiter(chain.from_iterable(times.values() for times in seen), np.int64),
        ]
    )
    rows, tokens, times = torch.from_numpy(entries).to(logits.device)  # [entries] each; no token of a row twice
    each = [(r.params.repetition_penalty, r.params.presence_penalty, r.params.frequency_penalty) for r in requests]
    strengths = torch.tensor(each, dtype=logits.dtype, device=logits.device)[rows]
    repetition, presence, frequency = strengths.unbind(-1)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - presence * (times > 0) - frequency * times
