"""One launch for the exchange, the residual and the norm: each program puts its row where the others read it, sums
what all have put there in the order of the ranks, and norms the sum while it has it.

On every rank the same numbers are added in the same order, so that all get equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.launch import dense_rows
from graft.ops.peers import LANES, PeerMemory, flags_at, peer_memory
from graft.ops.triton_peers import part_of, tell_all, wait_for_all

LOOKS = 2**29  # of a microsecond each: nine minutes; another rank may compile its kernels meanwhile


@triton.jit(debug=True)
def all_reduce_add_norm_kernel(
    x, residual, weight, out, total, bases, epochs, rank, rows, stride_x, stride_r, d, eps, offset, most,
    WORLD: tl.constexpr, WIDTH: tl.constexpr, FLAGS: tl.constexpr, CAST_LAST: tl.constexpr, WIDE: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < d
    w = tl.load(weight + cols, mask=mask, other=0.0)
    epoch = tl.load(epochs + lane)
    row = lane
    while row < rows:  # Triton's interpreter has no ranges of computed numbers with a new NumPy
        epoch += 1
        own = tl.load(x + row * stride_x + cols, mask=mask, other=0.0)
        tl.store(part_of(bases, rank, epoch, lane, x, WIDTH, LANES) + cols, own, mask=mask)
        tell_all(bases, FLAGS, rank, lane, epoch, WORLD, LANES)
        b = tl.load(residual + row * stride_r + cols, mask=mask, other=0.0)  # on its way while the others write
        wait_for_all(bases, FLAGS, rank, lane, epoch, most, WORLD, LANES)
        parts = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):
            part = part_of(bases, peer, epoch, lane, x, WIDTH, LANES)
            parts += tl.load(part + cols, mask=mask, other=0.0, volatile=True).to(tl.float32)
        h = parts.to(out.dtype.element_ty).to(tl.float32) + b.to(tl.float32)  # rounded as a sum by itself would be
        s = h.to(out.dtype.element_ty)
        tl.store(total + row * d + cols, s, mask=mask)
        if not WIDE:
            h = s.to(tl.float32)
        h = h * tl.rsqrt(tl.sum(h * h, axis=0) / d + eps)
        if CAST_LAST:
            y = h * (w.to(tl.float32) + offset)
        else:
            y = w.to(tl.float32) * h.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * d + cols, y.to(out.dtype.element_ty), mask=mask)
        row += tl.num_programs(0)
    tl.store(epochs + lane, epoch)


def all_reduce_add_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, world: int, eps: float, offset: float = 0.0, cast_last: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_over(peer_memory(x, world), x, residual, weight, eps, offset, cast_last, wide)


def run_over(
    memory: PeerMemory, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_last: bool,
    wide: bool, most: int = LOOKS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    d = x.shape[-1]
    rows, others = dense_rows(x), dense_rows(residual)  # [n, d]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    block = triton.next_power_of_2(d)
    all_reduce_add_norm_kernel[(min(rows.shape[0], LANES),)](
        rows, others, weight, out, total, memory.bases, memory.epochs, memory.rank, rows.shape[0], rows.stride(0),
        others.stride(0), d, eps, offset, most, WORLD=memory.world, WIDTH=memory.width, FLAGS=flags_at(memory.width),
        CAST_LAST=cast_last, WIDE=wide, LANES=LANES, BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out, total
