"""Latent attention over a paged cache of latent rows, in plain torch: new rows are written, then all are read.

The cache has one head of rank + rope numbers a token: the latent row, whose first `rank` numbers stand for the values
of all heads, and the rotated part of their keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.attention.reference import attention_sdpa, sdpa
from graft.ops.cached_attention.reference import gather, gather_all
from graft.ops.latent_attention.reference import LatentSizes, absorb, expand, leave, sizes_of
from graft.ops.paged_attention.reference import clear_new_blocks
from graft.ops.paged_cache import block_of, write


def paged_latent_attention(
    q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, latent_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """q: [1, h, T, nope + rope]; latent, rope: [1, 1, T, ·]; the cache is written at its slots → [1, T, h, v]."""
    store(latent, rope, latent_cache, slot_mapping)
    sizes = sizes_of(q, rope, weight)
    lens: list[tuple[int, int]] = lens_cpu.tolist()
    outputs = []
    row = first = 0
    while row < len(lens):
        new, total = lens[row]
        end, last = row + 1, first + new
        own = q[:, :, first:last]
        if new == 1:
            while end < len(lens) and lens[end][0] == 1:
                end += 1  # sequences that decode, side by side: one call for all of them
            last = first + end - row
            queries, longest = q[0, :, first:last].transpose(0, 1), max(length for _, length in lens[row:end])
            outputs.append(
                decode(queries, weight, latent_cache, block_tables[row:end], seq_lens[row:end], longest, scale, sizes)
            )
        else:
            rows = gather(latent_cache, block_tables[row], total, q.dtype)  # [1, 1, total, rank + rope]
            attend = attend_absorbed if absorbs(new, total, sizes) else attend_expanded
            outputs.append(attend(own, rows, weight, scale, sizes))
        row, first = end, last
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def absorbs(new: int, total: int, sizes: LatentSizes) -> bool:
    """Whether queries of `new` tokens that see `total` go into the latent space: fewer multiplications than making
    keys and values of the whole context. A chunk of V2-Lite does up to about 170 tokens far into a context, and a
    whole prompt never."""
    per_row = sizes.rank * (sizes.nope + sizes.value)
    pairs = new * total
    absorbed = new * per_row + pairs * (2 * sizes.rank + sizes.rope)
    return absorbed <= total * per_row + pairs * (sizes.nope + sizes.rope + sizes.value)


def store(latent: Tensor, rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    clear_new_blocks((cache,), slot_mapping)
    write(cache, slot_mapping, torch.cat((latent, rope), dim=-1)[0].transpose(0, 1))  # [T, 1, rank + rope]


def attend_expanded(q: Tensor, rows: Tensor, weight: Tensor, scale: float, sizes: LatentSizes) -> Tensor:
    keys, values = expand(rows[..., : sizes.rank], rows[..., sizes.rank :], weight, sizes)
    return attention_sdpa(q, keys, values, None, scale)


def attend_absorbed(q: Tensor, rows: Tensor, weight: Tensor, scale: float, sizes: LatentSizes) -> Tensor:
    inside = absorb(q[0].transpose(0, 1), weight, sizes).transpose(0, 1)[None]  # [1, h, n, rank + rope]
    mixed = attention_sdpa(inside, rows, rows[..., : sizes.rank], None, scale)  # [1, n, h, rank]
    return leave(mixed[0], weight, sizes)[None]


def decode(
    q: Tensor, weight: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, longest: int, scale: float,
    sizes: LatentSizes,
) -> Tensor:  # fmt: skip
    """One new token a sequence, [n, h, nope + rope] → [1, n, h, v]. The heads of a sequence are the queries of its
    one key head, so that nothing is repeated for each of them."""
    inside = absorb(q, weight, sizes)[:, None]  # [n, 1, h, rank + rope]
    used = -(-longest // block_of(cache))  # the table may be wider, for sequences that are not here
    rows = gather_all(cache, block_tables[:, :used], q.dtype)  # [n, 1, t, rank + rope]
    seen = torch.arange(rows.shape[2], device=q.device) < seq_lens[:, None]  # [n, t]
    mixed = sdpa(inside, rows, rows[..., : sizes.rank], seen[:, None, None], scale)[:, 0]
    return leave(mixed, weight, sizes)[None]
