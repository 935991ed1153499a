"""Keys and values of whole sequences, out of the paged cache and one after the other, in the queries' dtype.

A kernel that reads them many times then needs neither tables nor scales, and can have tiles of them brought by the
copy engine. Every sequence begins at a multiple of ALIGN rows, with zeros behind its end: what a tile reads beyond it
is nobody else's, where a NaN would not be hidden by a mask. Of 8,192 tokens of Llama-3.1-8B that is 50 to 67 MB a
layer, some 15 us on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.cached_attention.tiles.triton import UNALIGNED, blocks_of, load_scales
from graft.ops.paged_cache import block_of

ALIGN = 128
ROWS = 32  # of a program; ALIGN is a multiple
CHUNK = 1024


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["seq_lens"])
def starts_kernel(seq_lens, starts, n, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    """starts [n + 1]: the first row of each sequence, then all rows."""
    total = tl.zeros([], tl.int64)
    tl.store(starts, total)
    for first in range(0, n, CHUNK):
        index = first + tl.arange(0, CHUNK)
        lengths = tl.load(seq_lens + index, mask=index < n, other=0)
        padded = (lengths + (ALIGN - 1)) // ALIGN * ALIGN
        tl.store(starts + 1 + index, total + tl.cumsum(padded), mask=index < n)
        total += tl.sum(padded)


@triton.jit(
    do_not_specialize=["n", "s_table"], do_not_specialize_on_alignment=[*UNALIGNED],
)  # fmt: skip
def gather_kernel(
    k_cache, v_cache, keys, values, block_tables, starts, seq_lens, s_block, s_token, s_head, s_table, n,
    d: tl.constexpr, D: tl.constexpr, KV: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    kv = tl.program_id(1)
    low, high = tl.program_id(0) * 0, n  # the last sequence that begins at or before this row
    while high - low > 1:
        middle = (low + high) // 2
        begun = tl.load(starts + middle) <= first
        low, high = tl.where(begun, middle, low), tl.where(begun, high, middle)
    rows = first + tl.arange(0, ROWS)
    position = rows - tl.load(starts + low)
    length = tl.load(seq_lens + low)
    seen = position < length
    block = blocks_of(block_tables + low.to(tl.int64) * s_table, position, length, BLOCK, True)
    inside = position % BLOCK
    dims = tl.arange(0, D)
    source = (block * s_block + inside * s_token + kv * s_head)[:, None] + dims[None, :]
    target = (rows * KV + kv)[:, None] * d + dims[None, :]
    k_scales, v_scales = load_scales(k_cache, v_cache, block, inside, seen, kv, s_block, s_token, BLOCK)
    mask = seen[:, None] & (dims[None, :] < d)
    some_keys = tl.load(k_cache + source, mask=mask, other=0.0)
    some_values = tl.load(v_cache + source, mask=mask, other=0.0)
    if k_cache.dtype.element_ty == tl.float8e4nv:
        some_keys = some_keys.to(tl.float32) * k_scales[:, None]
        some_values = some_values.to(tl.float32) * v_scales[:, None]
    tl.store(keys + target, some_keys.to(keys.dtype.element_ty), mask=dims[None, :] < d)
    tl.store(values + target, some_values.to(values.dtype.element_ty), mask=dims[None, :] < d)


def gather(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [rows, kv, d], and the first row of each sequence [n + 1]. rows: as rows_for says."""
    n, device = seq_lens.shape[0], k_cache.device
    kv, d = k_cache.shape[2:]
    starts = torch.empty(n + 1, dtype=torch.int64, device=device)
    keys, values = (torch.empty((rows, kv, d), dtype=dtype, device=device) for _ in range(2))
    starts_kernel[(1,)](seq_lens, starts, n, ALIGN=ALIGN, CHUNK=CHUNK, num_warps=4)
    gather_kernel[(rows // ROWS, kv)](
        k_cache, v_cache, keys, values, block_tables, starts, seq_lens, *k_cache.stride()[:3], block_tables.stride(0),
        n, d=d, D=triton.next_power_of_2(d), KV=kv, BLOCK=block_of(k_cache), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return keys, values, starts


def rows_for(lengths: Tensor) -> int:
    """Of sequences of these lengths, on the host."""
    return int(((lengths + (ALIGN - 1)) // ALIGN * ALIGN).sum())
