"""How quantized weights lie in memory, and what they stand for.

    dtype of the weight   shape              scale                  a weight is
    that of x             [n, k]             none                   itself
    int8                  [n, k]             [n]                    q * scale
    float8_e4m3fn         [n, k]             [n]                    q * scale
    int32                 [n, words]         [n, groups]            (nibble - 8) * scale of its group of 128

Of 4-bit weights eight lie in one word, each from a group of its own: nibble i of word j in a span of 128 words is the
weight j of group i of that span. So one shift unpacks 128 neighbours of one group, and x is read in order. Rows are
padded to whole spans of 1024 with weights of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128  # weights that share a scale
NIBBLES = 8  # 4-bit weights in a word
SPAN = GROUP * NIBBLES
MIDDLE = 8  # the nibble that stands for 0


def pack_int4(q: Tensor) -> Tensor:
    """q: [n, k], whole numbers in [-8, 7] → int32 [n, ceil(k / 1024) * 128]."""
    n, k = q.shape
    padded = torch.nn.functional.pad(q.to(torch.int32), (0, -k % SPAN)) + MIDDLE
    spans = padded.view(n, -1, NIBBLES, GROUP)  # [n, span, nibble, word]
    shifts = torch.arange(0, 32, 4, device=q.device, dtype=torch.int32)[:, None]
    return (spans << shifts).sum(2, dtype=torch.int64).to(torch.int32).view(n, -1)


def unpack_int4(words: Tensor, k: int) -> Tensor:
    """int32 [n, words] → whole numbers in [-8, 7], int8 [n, k]."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)[:, None]
    spans = (words.view(words.shape[0], -1, 1, GROUP) >> shifts) & 0xF  # [n, span, nibble, word]
    return (spans.reshape(words.shape[0], -1)[:, :k] - MIDDLE).to(torch.int8)


def dequantize(weight: Tensor, scale: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """What the weights stand for, [n, k], in `dtype`."""
    if weight.dtype is not torch.int32:
        return weight.to(dtype) * scale[:, None].to(dtype)
    groups = scale.to(dtype).repeat_interleave(GROUP, dim=1)[:, :k]  # [n, k]
    return unpack_int4(weight, k).to(dtype) * groups
