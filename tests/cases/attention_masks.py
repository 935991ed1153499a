"""Scores and masks that the tests of fuse_attention share."""

from __future__ import annotations

import torch

from attention_cases import (
    SCALE,
)


def scores(q, k):
    return q @ k.transpose(2, 3) * SCALE


def positional(kind, s, t, device="cpu"):
    i, j = torch.arange(t - s, t, device=device)[:, None], torch.arange(t, device=device)[None, :]
    return {
        "causal": j <= i,
        "window": (j <= i) & (j > i - 5),
        "window, off by one": (j <= i) & (j >= i - 5),
        "look ahead by one": j <= i + 1,
        "strictly before": j < i,
        "blocks": j // 2 <= i // 2,
        "from the first key": torch.ones(s, t, dtype=torch.bool).tril(),
        "prefix": (j <= i) | (j < 2),
    }[kind]
