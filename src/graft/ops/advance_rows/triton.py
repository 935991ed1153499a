"""One token further in one kernel; 128 rows a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.advance_rows.reference import LEAVE, NOTHING
from graft.ops.launch import pdl_supported


@triton.jit(do_not_specialize=["stride_table", "stride_out", "count", "padding"])  # one kernel for all batch sizes
def advance_rows_kernel(
    tokens, seq_lens, live, entries, blocks, block_tables, out, stride_table, stride_out, count, padding,
    SIZE: tl.constexpr, NOTHING: tl.constexpr, LEAVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    table = block_tables + row.to(tl.int64) * stride_table
    entry = tl.load(entries + row, mask=mask, other=NOTHING)
    told = tl.load(blocks + row, mask=mask, other=0)
    leaving = entry == LEAVE
    lives = tl.where(leaving, 0, tl.load(live + row, mask=mask, other=0))
    length = tl.where(lives == 0, 1, tl.load(seq_lens + row, mask=mask, other=0) + 1)
    position = length - 1
    index = position // SIZE
    changed = tl.where(leaving, 0, entry)
    block = tl.where(leaving, padding, told)
    # the block just told comes from a register: who loads and who stores need not be the same thread
    there = tl.load(table + index, mask=mask & (index != changed), other=0)
    there = tl.where(index == changed, block, there)
    tl.store(table + changed, block, mask=mask & (changed >= 0))
    tl.store(seq_lens + row, length, mask=mask)
    tl.store(live + row, lives, mask=mask)
    tl.store(entries + row, tl.full([BLOCK], NOTHING, tl.int64), mask=mask)
    tl.store(out + row, tl.maximum(tl.load(tokens + row, mask=mask, other=0), 0), mask=mask)
    tl.store(out + stride_out + row, position, mask=mask)
    tl.store(out + 2 * stride_out + row, there * SIZE + position % SIZE, mask=mask)


def advance_rows_triton(
    tokens: Tensor, seq_lens: Tensor, live: Tensor, entries: Tensor, blocks: Tensor, block_tables: Tensor,
    padding: int, block_size: int, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    count, block = tokens.shape[0], 128
    if out is None:
        out = torch.empty(3, count, dtype=torch.int64, device=tokens.device)
    pdl = pdl_supported(tokens.device)
    advance_rows_kernel[(triton.cdiv(count, block),)](
        tokens, seq_lens, live, entries, blocks, block_tables, out, block_tables.stride(0), out.stride(0), count,
        padding, SIZE=block_size, NOTHING=NOTHING, LEAVE=LEAVE, BLOCK=block, PDL=pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
