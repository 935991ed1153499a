"""Attention over a paged key-value cache, in plain torch.

Tokens of all sequences are packed into one row of T. Sequence i owns the tokens starts[i]:starts[i+1] of it, has
lengths[i] tokens in all (the new ones included), and its block j lies at block_tables[i, j] of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.attention.reference import attention, attention_sdpa, sdpa


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, rows: Tensor, block_tables: Tensor, starts: Tensor, lengths: Tensor,  # noqa: ARG001
    scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q: [1, h, T, d]; k, v: [1, kv, T, d]; caches: [blocks, block, kv, d], written at `slots` → [1, T, h, d]."""
    clear_new_blocks(k_cache, v_cache, slots)
    write_cache(k, v, k_cache, v_cache, slots)
    bounds, totals = starts.tolist(), lengths.tolist()
    plain = softcap is None and sinks is None
    outputs = []
    row = 0
    while row < len(totals):
        first, last = bounds[row], bounds[row + 1]
        end = row + 1
        while plain and last - first == 1 and end < len(totals) and bounds[end + 1] - bounds[end] == 1:
            end += 1  # sequences that decode, side by side: one call for all of them
        if plain and last - first == 1:
            table, seen = block_tables[row:end], lengths[row:end]
            outputs.append(attend_decode(q[:, :, first : bounds[end]], k_cache, v_cache, table, seen, scale, window))
        else:
            if totals[row] == last - first:
                keys, values = k[:, :, first:last], v[:, :, first:last]
            else:
                keys, values = (gather(c, block_tables[row], totals[row]) for c in (k_cache, v_cache))
            attend = attention_sdpa if plain else attention
            outputs.append(attend(q[:, :, first:last], keys, values, None, scale, True, window, softcap, sinks))
        row = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def clear_new_blocks(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """A block whose first place is written is new. What others left in it may be NaN, which a mask does not hide."""
    size = k_cache.shape[1]
    new = [slot // size for slot in slots.tolist() if slot % size == 0]
    if new:
        blocks = torch.tensor(new, device=slots.device)
        for cache in (k_cache, v_cache):
            cache.index_fill_(0, blocks, 0)


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Stores the new keys and values at their slots (slot = block * block_size + place in the block)."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new[0].transpose(0, 1))  # [T, kv, d]


def gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one sequence: [1, kv, length, d]."""
    block = cache.shape[1]
    used = table[: -(-length // block)]
    tokens = cache.index_select(0, used).view(-1, *cache.shape[2:])[:length]  # [length, kv, d]
    return tokens.transpose(0, 1)[None]


def attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """One new token a sequence: one call for the whole batch."""
    batch = block_tables.shape[0]
    grouped = q.shape[1] != k_cache.shape[2]
    if batch == 1:
        length = int(lengths[0])
        keys, values = (gather(c, block_tables[0], length) for c in (k_cache, v_cache))
        if window is not None and length > window:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        out = sdpa(q, keys, values, None, scale, grouped=grouped)
        return out.transpose(1, 2).contiguous()  # [1, 1, h, d]
    queries = q[0].transpose(0, 1).unsqueeze(2)  # [batch, h, 1, d]
    used = -(-int(lengths.max()) // k_cache.shape[1])  # the table may be wider, for sequences that are not here
    keys, values = (gather_all(c, block_tables[:, :used]) for c in (k_cache, v_cache))
    place = torch.arange(keys.shape[2], device=q.device)
    seen = place < lengths[:, None]  # [batch, t]
    if window is not None:
        seen = seen & (place >= lengths[:, None] - window)
    out = sdpa(queries, keys, values, seen[:, None, None], scale, grouped=grouped)
    return out.squeeze(2).contiguous()[None]  # [batch, h, 1, d] → [1, batch, h, d]


def gather_all(cache: Tensor, block_tables: Tensor) -> Tensor:
    """Every block of every sequence: [batch, kv, blocks * block, d]."""
    batch = block_tables.shape[0]
    tokens = cache.index_select(0, block_tables.reshape(-1)).view(batch, -1, *cache.shape[2:])
    return tokens.transpose(1, 2)
