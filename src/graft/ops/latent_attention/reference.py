"""Attention whose keys and values are one projection of a latent row, which all heads share, in plain torch.

A head's key is [W_UK · latent, rope] and its value W_UV · latent, where `weight` has the rows of W_UK and W_UV, head
after head: [heads * (nope + v), rank]. Two ways to the same numbers:

expanded    keys and values of every head are computed, as the model's code does
absorbed    q · (W_UK · latent) = (W_UK^T · q) · latent: queries go into the latent space, where all heads share one
            key (the row) and one value (its first `rank` numbers), and W_UV is applied to what comes out
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.attention.reference import attention_sdpa
from graft.ops.half_precision import matmul


class LatentSizes(NamedTuple):
    """Numbers of a head's key without and with the rotated part, of its value, and of the latent row."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


def sizes_of(q: Tensor, rope: Tensor, weight: Tensor) -> LatentSizes:
    heads, rotated = int(q.shape[1]), int(rope.shape[3])
    nope = int(q.shape[3]) - rotated
    return LatentSizes(heads, nope, rotated, int(weight.shape[0]) // heads - nope, int(weight.shape[1]))


def latent_attention(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, scale: float) -> Tensor:
    """q: [b, h, s, nope + rope]; latent: [b, 1, s, rank]; rope: [b, 1, s, rope] → [b, s, h, v]; causal."""
    keys, values = expand(latent, rope, weight, sizes_of(q, rope, weight))
    return attention_sdpa(q, keys, values, None, scale)


def expand(latent: Tensor, rope: Tensor, weight: Tensor, sizes: LatentSizes) -> tuple[Tensor, Tensor]:
    """Keys [b, h, t, nope + rope] and values [b, h, t, v] of rows [b, 1, t, ·]."""
    b, _, t, _ = latent.shape
    made = F.linear(latent, weight).view(b, t, sizes.heads, sizes.nope + sizes.value).transpose(1, 2)
    rotated = rope.expand(b, sizes.heads, t, sizes.rope)
    return torch.cat((made[..., : sizes.nope], rotated), dim=-1), made[..., sizes.nope :]


def absorb(q: Tensor, weight: Tensor, sizes: LatentSizes) -> Tensor:
    """Queries [n, h, nope + rope] in the latent space: [n, h, rank + rope]."""
    up = weight.view(sizes.heads, sizes.nope + sizes.value, sizes.rank)[:, : sizes.nope]
    inside = matmul(q[..., : sizes.nope].transpose(0, 1), up).transpose(0, 1)
    return torch.cat((inside, q[..., sizes.nope :]), dim=-1)


def leave(mixed: Tensor, weight: Tensor, sizes: LatentSizes) -> Tensor:
    """What heads mixed of latent rows, [n, h, rank], as their values: [n, h, v]."""
    up = weight.view(sizes.heads, sizes.nope + sizes.value, sizes.rank)[:, sizes.nope :]
    return matmul(mixed.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)
