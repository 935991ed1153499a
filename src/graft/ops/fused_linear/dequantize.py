"""Quantized weights in the dtype of x, for torch's GEMM: in steps of many tokens that costs less than any kernel that
widens them on the way to its tensor cores, once for every block of tokens.

8B in 4 bits on an H200: a weight is 0.5 bytes read, 2 written and 2 read again; decode steps of 256 and 512 sequences
take 14.1 and 21.3 ms, and 16.7 and 32.0 where each program widens what it multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.fused_linear.gemm import narrow
from graft.ops.fused_linear.widen import PARTS, columns_of
from graft.weights.packing import GROUP

ROWS, WORDS = 8, 128  # of a program: 2 KiB read


@triton.jit
def dequantize_kernel(
    weight, scale, out, n, k, width, groups,
    KIND: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """width: 16-bit words of a row; WORDS of them, with 4-bit weights a span of four groups, are a program's."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    dtype: tl.constexpr = out.dtype.element_ty
    mask = (row < n)[:, None] & (word < width)[None, :]
    words = tl.load(weight + row.to(tl.int64)[:, None] * width + word[None, :], mask=mask, other=0)
    for part in tl.static_range(PARTS):
        if KIND == "int4":
            group = tl.program_id(1) * PARTS + part
            factor = tl.load(scale + row * groups + group, mask=(row < n) & (group < groups), other=0.0)
        else:
            factor = tl.load(scale + row, mask=row < n, other=0.0)
        values = narrow(words, part, dtype, KIND, FAST).to(tl.float32) * factor.to(tl.float32)[:, None]
        column = columns_of(tl.program_id(1) * WORDS, tl.arange(0, WORDS), part, KIND)
        at = out + row.to(tl.int64)[:, None] * k + column[None, :]
        tl.store(at, values.to(dtype), mask=mask & (column < k)[None, :])


def dequantize_triton(words: Tensor, scale: Tensor, kind: str, k: int, dtype: torch.dtype) -> Tensor:
    """[n, k]; words: of int8, int4 or fp8 weights, as packing.py lays them out, 16 bits each."""
    n, width = words.shape
    out = torch.empty((n, k), dtype=dtype, device=words.device)
    dequantize_kernel[(triton.cdiv(n, ROWS), triton.cdiv(width, WORDS))](
        words, scale, out, n, k, width, -(-k // GROUP), KIND=kind, PARTS=PARTS[kind],
        FAST=dtype is torch.bfloat16 and words.is_cuda, ROWS=ROWS, WORDS=WORDS,
    )  # fmt: skip
    return out
