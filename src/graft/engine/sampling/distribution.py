"""Sampling a token: temperature, min_p, top_k, top_p, and one uniform number a token.

Each row goes its own way through these steps, whatever the rows beside it ask for. Ties: top_k and top_p keep every
token that is as likely as the last one they keep, so that the choice never hangs on the order of a sort.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.engine.params import SamplingParams

AT_ONCE = 1 << 24  # float64 values of one piece of the batch: 128 MB for each of a few copies
HEAD = 1024  # most nuclei are smaller; a full sort of the vocabulary takes ten times as long


def sample_tokens(logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> Tensor:
    """One token a row, [n]. logits: [n, vocab]; uniform: a number in [0, 1) for each row."""
    rows = rows_at_once(logits.shape[-1])
    shares = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None]
    pieces = [
        invert(weights(logits[i : i + rows], params[i : i + rows]), shares[i : i + rows])
        for i in range(0, len(params), rows)
    ]
    return torch.cat(pieces)


def rows_at_once(vocab: int) -> int:
    return max(1, AT_ONCE // vocab)


def weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What each token weighs in sampling, [n, vocab] float64: the most likely one 1, those left out 0."""
    settings = torch.tensor([[p.temperature, p.min_p, p.top_p] for p in params], dtype=torch.float64)
    temperature, min_p, top_p = settings.to(logits.device).split(1, dim=-1)  # [n, 1] each
    exact = logits.double()
    kept = ((exact - exact.amax(-1, keepdim=True)) / temperature).exp()  # the largest is exp(0): no overflow
    if any(p.min_p > 0 for p in params):
        kept.masked_fill_(kept < min_p, 0)
    limited = [row for row, p in enumerate(params) if 0 < p.top_k < kept.shape[-1]]
    if limited:
        kept[limited] = top_k(kept[limited], [params[row].top_k for row in limited])
    nuclear = [row for row, p in enumerate(params) if p.top_p < 1]
    if nuclear:
        kept[nuclear] = nucleus(kept[nuclear], top_p[nuclear])
    return kept


def top_k(kept: Tensor, counts: Sequence[int]) -> Tensor:
    """The `counts[i]` heaviest tokens of each row, and those that weigh as much as the last of them."""
    heaviest = kept.topk(max(counts)).values
    last = heaviest.gather(-1, torch.tensor(counts, device=kept.device)[:, None] - 1)
    return kept.masked_fill(kept < last, 0)


def nucleus(kept: Tensor, top_p: Tensor, width: int = HEAD) -> Tensor:
    """The fewest heaviest tokens that weigh top_p [n, 1] of their row together, and those as heavy as the last."""
    width = min(width, kept.shape[-1])
    goal = top_p * kept.cumsum(-1)[:, -1:]
    heaviest = kept.topk(width).values
    below = heaviest.cumsum(-1) < goal  # [n, width]
    last = heaviest.gather(-1, below.sum(-1, keepdim=True).clamp(max=width - 1))
    result = kept.masked_fill(kept < last, 0)
    if width < kept.shape[-1]:
        wide = below[:, -1].nonzero()[:, 0]  # rows whose nucleus is larger than the head
        if len(wide):
            result[wide] = nucleus(kept[wide], top_p[wide], 16 * width)
    return result


def invert(kept: Tensor, uniform: Tensor) -> Tensor:
    """The first token, in vocabulary order, at which the cumulative weight exceeds `uniform` of the total. [n].

    uniform: [n, 1]. A token without weight stands at 0 in the sums: it exceeds nothing, not even a share of 0. The
    share is below the largest sum, since uniform < 1, so there is always a token that exceeds it, however a device
    rounds its sums.
    """
    sums = kept.cumsum(-1).masked_fill_(kept == 0, 0)
    return (sums > uniform * sums.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)
