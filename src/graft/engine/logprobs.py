"""How likely the model itself held tokens: before penalties, temperature and everything after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.engine.params import MOST_LOGPROBS


@dataclass(frozen=True)
class Logprob:
    """The natural logarithm of a token's probability, and how many tokens are more likely, plus one."""

    logprob: float
    rank: int


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """For each row the counts[i] most likely tokens, likeliest first, and the chosen one. logits: [n, vocab]."""
    values = logits.float().log_softmax(-1)
    own = values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])  # [n, 1]
    ranks = ((values > own).sum(-1) + 1).tolist()
    # as many for every row: which of equally likely tokens come first may hang on their number
    top = values.topk(min(MOST_LOGPROBS, values.shape[-1]))
    rows = zip(tokens, own[:, 0].tolist(), ranks, counts, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        {t: Logprob(v, best.index(v) + 1) for t, v in zip(ids[:count], best[:count], strict=True)}
        | {token: Logprob(value, rank)}
        for token, value, rank, count, ids, best in rows
    ]
