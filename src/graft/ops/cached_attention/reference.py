"""Attention over a paged key-value cache, in plain torch.

Tokens of all sequences are packed into one row of T. Sequence i brings lens_cpu[i, 0] of them, in order, has
lens_cpu[i, 1] tokens in all (the new ones included), and its block j lies at block_tables[i, j] of the cache.
`lens_cpu` is on the CPU, so that nobody waits for a device to know a size; `cu_seqlens` and `seq_lens` say the same
to kernels on it (ops/layout.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.attention.reference import attention, attention_sdpa, sdpa
from graft.ops.paged_cache import block_of, read
from graft.weights.quantize import FP8


def cached_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor,  # noqa: ARG001
    seq_lens: Tensor, lens_cpu: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q: [1, h, T, d]; caches (ops/paged_cache.py) hold the new keys and values too → [1, T, h, d]."""
    return attend(q, k_cache, v_cache, block_tables, seq_lens, lens_cpu, scale, window, softcap, sinks)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, lens_cpu: Tensor,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """fresh: the new keys and values [1, kv, T, d] where the caller has them: whole prompts need no cache, unless it
    rounds. There a token sees the same keys and values whether its prompt comes in one piece or in several."""
    fresh = None if k_cache.dtype is FP8 else fresh
    plain = softcap is None and sinks is None
    sizes: list[tuple[int, int]] = lens_cpu.tolist()
    outputs = []
    row = first = 0
    while row < len(sizes):
        new, total = sizes[row]
        end, last = row + 1, first + new
        if plain and new == 1:
            while end < len(sizes) and sizes[end][0] == 1:
                end += 1  # sequences that decode, side by side: one call for all of them
            last = first + end - row
            longest = max(length for _, length in sizes[row:end])
            table, seen = block_tables[row:end], seq_lens[row:end]
            outputs.append(attend_decode(q[:, :, first:last], k_cache, v_cache, table, seen, longest, scale, window))
        else:
            if fresh is not None and total == new:
                keys, values = (t[:, :, first:last] for t in fresh)
            else:
                keys, values = (gather(c, block_tables[row], total, q.dtype) for c in (k_cache, v_cache))
            one = attention_sdpa if plain else attention
            outputs.append(one(q[:, :, first:last], keys, values, None, scale, True, window, softcap, sinks))
        row, first = end, last
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def gather(cache: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` tokens of one sequence: [1, kv, length, d]."""
    used = table[: -(-length // block_of(cache))]
    tokens = read(cache, used, dtype).flatten(0, 1)[:length]  # [length, kv, d]
    return tokens.transpose(0, 1)[None]


def attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """One new token a sequence: one call for the whole batch."""
    batch = block_tables.shape[0]
    grouped = q.shape[1] != k_cache.shape[2]
    if batch == 1:
        keys, values = (gather(c, block_tables[0], longest, q.dtype) for c in (k_cache, v_cache))
        if window is not None and longest > window:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        out = sdpa(q, keys, values, None, scale, grouped=grouped)
        return out.transpose(1, 2).contiguous()  # [1, 1, h, d]
    queries = q[0].transpose(0, 1).unsqueeze(2)  # [batch, h, 1, d]
    used = -(-longest // block_of(k_cache))  # the table may be wider, for sequences that are not here
    keys, values = (gather_all(c, block_tables[:, :used], q.dtype) for c in (k_cache, v_cache))
    position = torch.arange(keys.shape[2], device=q.device)
    seen = position < seq_lens[:, None]  # [batch, t]
    if window is not None:
        seen = seen & (position >= seq_lens[:, None] - window)
    out = sdpa(queries, keys, values, seen[:, None, None], scale, grouped=grouped)
    return out.squeeze(2).contiguous()[None]  # [batch, h, 1, d] → [1, batch, h, d]


def gather_all(cache: Tensor, block_tables: Tensor, dtype: torch.dtype) -> Tensor:
    """Every block of every sequence: [batch, kv, blocks * block, d]."""
    batch = block_tables.shape[0]
    tokens = read(cache, block_tables.reshape(-1), dtype).view(batch, -1, *cache.shape[2:])
    return tokens.transpose(1, 2)
