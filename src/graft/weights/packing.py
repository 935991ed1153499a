"""How quantized weights lie in memory, and what they stand for.

    dtype of the weight   shape              scale                  a weight is
    that of x             [n, k]             none                   itself
    int8                  [n, bytes]         [n]                    (byte - 128) * scale, the byte without sign
    float8_e4m3fn         [n, bytes]         [n]                    q * scale
    int16                 [n, words]         [n, groups]            (nibble - 8) * scale of its group of 128
    uint8                 [tiles, bytes]     [n, 0]                 in tiles of the native backend: see tiles.py

Quantized weights are read as 16-bit words whose parts belong to different runs: of 8-bit weights byte i of word j
in a span of 32 words is the weight j of run i of that span; of 4-bit weights nibble i of word j in a span of 128 is
the weight j of group i. So a thread that reads 8 words, 16 bytes, meets 8 neighbours of x with each part of them.
Rows are padded with zeros to whole spans, of 64 and of 512 weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.weights.tiles import TILES, unpack_tiles

GROUP = 128  # weights that share a scale
NIBBLES = 4  # 4-bit weights in a word
SPAN = GROUP * NIBBLES
RUN = 32  # 8-bit weights in order; the next run shares their words
SIGN = 0x80
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


def pack_bytes(q: Tensor) -> Tensor:
    """q: [n, k], int8 or float8_e4m3fn → in the order of words, of int8 with the sign bit turned over:
    [n, ceil(k / 64) * 64]."""
    n, k = q.shape
    padded = torch.nn.functional.pad(q.view(torch.uint8), (0, -k % (2 * RUN)))
    if q.dtype is torch.int8:
        padded ^= SIGN
    return padded.view(n, -1, 2, RUN).transpose(2, 3).reshape(n, -1).view(q.dtype)


def unpack_bytes(words: Tensor, k: int) -> Tensor:
    """[n, bytes], as pack_bytes wrote them → [n, k]."""
    runs = words.view(words.shape[0], -1, RUN, 2).transpose(2, 3)
    q = runs.reshape(words.shape[0], -1)[:, :k]
    return (q.contiguous().view(torch.uint8) ^ SIGN).view(torch.int8) if words.dtype is torch.int8 else q


def dequantize(weight: Tensor, scale: Tensor, k: int, dtype: torch.dtype, gated: bool = False) -> Tensor:
    """What the weights stand for, [n, k], in `dtype`. gated: of tiles, gate and up take turns."""
    if weight.dtype is TILES:
        return unpack_tiles(weight, scale, k, gated).to(dtype)
    if weight.dtype is not PACKED:
        return unpack_bytes(weight, k).to(dtype) * scale[:, None].to(dtype)
    groups = scale.to(dtype).repeat_interleave(GROUP, dim=1)[:, :k]  # [n, k]
    return unpack_int4(weight, k).to(dtype) * groups
