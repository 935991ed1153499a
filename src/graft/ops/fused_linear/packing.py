"""How quantized weights lie in memory, and what they stand for.

    dtype of the weight   shape              scale                  a weight is
    that of x             [n, k]             none                   itself
    int8                  [n, k]             [n]                    q * scale
    float8_e4m3fn         [n, k]             [n]                    q * scale
    int16                 [n, words]         [n, groups]            (nibble - 8) * scale of its group of 128

Of 4-bit weights four lie in one word, each from a group of its own: nibble i of word j in a span of 128 words is the
weight j of group i of that span. So one shift unpacks 128 neighbours of one group, x is read in order, and a register
of two words becomes one of two bfloat16 values. Rows are padded to whole spans of 512 with weights of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128  # weights that share a scale
NIBBLES = 4  # 4-bit weights in a word
SPAN = GROUP * NIBBLES
MIDDLE = 8  # the nibble that stands for 0
PACKED = torch.int16


def pack_int4(q: Tensor) -> Tensor:
    """q: [n, k], whole numbers in [-8, 7] → int16 [n, ceil(k / 512) * 128]."""
    n, k = q.shape
    padded = torch.nn.functional.pad(q.to(torch.int32), (0, -k % SPAN)) + MIDDLE
    spans = padded.view(n, -1, NIBBLES, GROUP)  # [n, span, nibble, word]
    return (spans << shifts(q.device)).sum(2, dtype=torch.int32).to(PACKED).view(n, -1)


def unpack_int4(words: Tensor, k: int) -> Tensor:
    """int16 [n, words] → whole numbers in [-8, 7], int8 [n, k]."""
    wide = words.to(torch.int32).view(words.shape[0], -1, 1, GROUP)
    spans = (wide >> shifts(words.device)) & 0xF  # [n, span, nibble, word]
    return (spans.reshape(words.shape[0], -1)[:, :k] - MIDDLE).to(torch.int8)


def shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 4 * NIBBLES, 4, device=device, dtype=torch.int32)[:, None]


def dequantize(weight: Tensor, scale: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """What the weights stand for, [n, k], in `dtype`."""
    if weight.dtype is not PACKED:
        return weight.to(dtype) * scale[:, None].to(dtype)
    groups = scale.to(dtype).repeat_interleave(GROUP, dim=1)[:, :k]  # [n, k]
    return unpack_int4(weight, k).to(dtype) * groups
