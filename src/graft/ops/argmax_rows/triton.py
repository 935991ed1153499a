"""The largest value of each row in two kernels: of pieces of the row, then of the pieces.

One program for a whole row of 128k would read it through one multiprocessor of 132.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import pdl_supported

BEYOND = tl.constexpr(2**31 - 1)  # no place is as large


@triton.jit(do_not_specialize=["pieces"])
def pieces_kernel(logits, values, positions, stride_row, vocab, pieces, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    cols = piece * BLOCK + tl.arange(0, BLOCK)
    read = tl.load(logits + row * stride_row + cols, mask=cols < vocab, other=-float("inf")).to(tl.float32)
    read = tl.where(read != read, float("inf"), read)  # NaN: the row has no finite largest value either way
    largest = tl.max(read, axis=0)
    first = tl.min(tl.where(read == largest, cols, BEYOND), axis=0)
    tl.store(values + row * pieces + piece, largest)
    tl.store(positions + row * pieces + piece, first)


@triton.jit(do_not_specialize=["pieces"])
def rows_kernel(values, positions, out, pieces, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK)
    inside = piece < pieces
    value = tl.load(values + row * pieces + piece, mask=inside, other=-float("inf"))
    position = tl.load(positions + row * pieces + piece, mask=inside, other=BEYOND)
    largest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == largest, position, BEYOND), axis=0).to(tl.int64)
    finite = tl.abs(largest) < float("inf")
    tl.store(out + row, tl.where(finite, first, -1))


def argmax_rows_triton(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """logits: [n, vocab], each row contiguous → [n]."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    # one row: 128 pieces of 1,024 fill the multiprocessors; many rows fill them with longer pieces
    block = 1024 if rows <= 8 else 4096
    pieces = triton.cdiv(vocab, block)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    positions = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    pdl = pdl_supported(logits.device)
    launch = {"launch_pdl": True} if pdl else {}
    pieces_kernel[(pieces, rows)](
        logits, values, positions, logits.stride(0), vocab, pieces, BLOCK=block, PDL=pdl, num_warps=4, **launch
    )
    width = max(triton.next_power_of_2(pieces), 2)
    rows_kernel[(rows,)](
        values, positions, out, pieces, BLOCK=width, PDL=pdl, num_warps=1 if width <= 256 else 4, **launch
    )
    return out
