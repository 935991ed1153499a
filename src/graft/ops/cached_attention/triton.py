"""Which of graft's own kernels takes which part of a batch: sequences that decode, side by side, and the others.

Beside prompts, a few sequences that decode go through the prefill kernel too: one launch, and one kernel whatever
their number, where split_kv has a variant for each number of parts, compiled for a second or two when first met. Many
have a single part or even shares, and with them one variant or two: split_kv then takes them, since a row of one
token fills the prefill kernel's tile of 128 / GROUP tokens (8B, 950 rows of 192 tokens beside prompts: 27 against
5 ms a step, RESULTS.md). It also takes few with long contexts, in one number of parts (8B, 20,000 tokens each: two
variants compiled on the way were 1.4 s of a load).

A captured step is replayed with others: how many decode is counted on the device, and even shares take them all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.cached_attention.balanced.triton import FEW_ROWS, MOST_ROWS, balanced
from graft.ops.cached_attention.decode.triton import (
    EVEN_CONTEXT,
    EVEN_PROGRAMS,
    MANY_PROGRAMS,
    MOST_PROGRAMS,
    is_even,
    split_count,
    split_kv,
)
from graft.ops.cached_attention.gather.triton import gather, rows_for
from graft.ops.cached_attention.prefill.triton import prefill
from graft.ops.launch import counted_on_device
from graft.ops.paged_cache import block_of

LONG_CONTEXT = 8192  # tokens: one program reads them in about 150 us, which a step with prompts in it hides
LONG_SPLITS = 16  # parts of such a context: 128 programs for one sequence with 8 key-value heads


def cached_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor,  # noqa: ARG001
    seq_lens: Tensor, lens_cpu: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _, h, tokens, d = q.shape
    options = (scale, window, softcap, sinks)
    if tokens == seq_lens.shape[0]:
        return split_kv(q, k_cache, v_cache, block_tables, seq_lens, *options)
    out = torch.empty((1, tokens, h, d), dtype=q.dtype, device=q.device)
    if counted_on_device(q, lens_cpu):
        n = min(seq_lens.shape[0], tokens, MOST_ROWS)
        rows = (q[:, :, :n], k_cache, v_cache, block_tables[:n], seq_lens[:n])
        balanced(*rows, *options, out=out[:, :n], cu_seqlens=cu_seqlens)
        prefill(q, k_cache, v_cache, block_tables, cu_seqlens, seq_lens, *options, out, decoded=n)
        return out
    n = decoding(lens_cpu)
    if n and not decode_beside(q, k_cache, v_cache, block_tables, seq_lens, lens_cpu, options, out, n):
        n = 0
    prefill(q, k_cache, v_cache, block_tables[n:], cu_seqlens[n:], seq_lens[n:], *options, out)
    return out


def cached_attention_flash(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor,  # noqa: ARG001
    seq_lens: Tensor, lens_cpu: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Prompts over keys and values that are gathered first; a few sequences that decode by the prefill kernel."""
    from graft.ops.cached_attention.flash.gluon import flash

    _, h, tokens, d = q.shape
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty((1, tokens, h, d), dtype=q.dtype, device=q.device)
    options, n = (scale, window, softcap, sinks), decoding(lens_cpu)
    if n and not decode_beside(q, k_cache, v_cache, block_tables, seq_lens, lens_cpu, options, out, n):
        prefill(q[:, :, :n], k_cache, v_cache, block_tables[:n], cu_seqlens[: n + 1], seq_lens[:n], *options, out)
    rows = rows_for(lens_cpu[n:, 1])
    keys, values, starts = gather(k_cache, v_cache, block_tables[n:], seq_lens[n:], rows, q.dtype)
    flash(q, keys, values, starts, cu_seqlens[n:], seq_lens[n:], scale, window, out)
    return out


def decode_beside(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, lens_cpu: Tensor,
    options: tuple[float, int | None, float | None, Tensor | None], out: Tensor, n: int,
) -> bool:  # fmt: skip
    """Writes the rows of the first n sequences, which decode beside prompts, by split_kv. Whether it did."""
    even = is_even(n, k_cache.shape[2], block_tables.shape[1] * block_of(k_cache))
    few_variants = even or one_part(n, k_cache)
    if not few_variants and not has_long_context(n, lens_cpu):
        return False
    splits = None if few_variants else LONG_SPLITS
    rows = (q[:, :, :n], k_cache, v_cache, block_tables[:n], seq_lens[:n])
    split_kv(*rows, *options, out=out[:, :n], splits=splits, early=False, even=even)
    return True


def has_long_context(n: int, lens_cpu: Tensor) -> bool:
    """Whether one of the first n sequences has."""
    return int(lens_cpu[:n, 1].max()) > LONG_CONTEXT


def decoding_cases(kv: int, room: int) -> tuple[tuple[int, int, int], ...]:
    """Numbers of sequences that decode beside prompts, tokens that the tables of the step have room for, and tokens
    of the longest: a case for each kernel that may take them. Tables are as wide as the longest context of a step
    needs, up to `room`."""
    short = min(room, EVEN_CONTEXT)
    cases = [(count, short, 1) for count in (1, MANY_PROGRAMS // kv + 1, -(-MOST_PROGRAMS // kv))]
    if room > EVEN_CONTEXT:
        cases += [(-(-EVEN_PROGRAMS // kv), room, 1), (FEW_ROWS + 1, room, 1)]
    if room > LONG_CONTEXT and kv < EVEN_PROGRAMS:
        cases.append((1, room, LONG_CONTEXT + 1))
    return tuple(cases)


def one_part(n: int, cache: Tensor) -> bool:
    """Whether split_kv reads the contexts of n sequences whole, with the kernel that it has for many."""
    kv = cache.shape[2]
    return n * kv > MANY_PROGRAMS and split_count(n, kv, cache.device) == 1


def decoding(lens_cpu: Tensor) -> int:
    """How many sequences at the front bring one token each. Asked in every layer, where a list takes longer."""
    others = (lens_cpu[:, 0] != 1).nonzero()
    return int(others[0]) if len(others) else len(lens_cpu)
