"""The new keys and values into the paged cache, then cached_attention's kernels over it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graft.ops.cached_attention.op import SPEC
from graft.ops.launch import pdl_supported
from graft.ops.paged_attention.reference import write_cache
from graft.ops.paged_cache import block_of
from graft.ops.selection import choose

HEADS = 8  # of a token, at most, a program


@triton.jit
def kv_write_kernel(
    k, v, k_cache, v_cache, slot_mapping, kv, sk_h, sk_t, sv_h, sv_t, s_block, s_token, s_head,
    d: tl.constexpr, D: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SOME heads of one token, in one kernel for keys and values: copies by index are two, of 2.4 us each (H200)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if PDL:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1) * SOME + tl.arange(0, SOME)[:, None]
    cols = tl.arange(0, D)[None, :]
    mask = (head < kv) & (cols < d)
    to = slot // BLOCK * s_block + slot % BLOCK * s_token + head * s_head + cols
    tl.store(k_cache + to, tl.load(k + token * sk_t + head * sk_h + cols, mask=mask), mask=mask)
    tl.store(v_cache + to, tl.load(v + token * sv_t + head * sv_h + cols, mask=mask), mask=mask)


def write_new(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v: [1, kv, T, d]."""
    even = k.dtype == k_cache.dtype and k_cache.stride() == v_cache.stride()
    if not even or k.stride(-1) != 1 or v.stride(-1) != 1 or k_cache.stride(-1) != 1:
        write_cache(k, v, k_cache, v_cache, slot_mapping)  # float8, which needs scales, and layouts of no model
        return
    _, kv, tokens, d = k.shape
    some, pdl = min(HEADS, triton.next_power_of_2(kv)), pdl_supported(k.device)
    kv_write_kernel[(tokens, triton.cdiv(kv, some))](
        k, v, k_cache, v_cache, slot_mapping, kv, k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        *k_cache.stride()[:3], d=d, D=triton.next_power_of_2(d), SOME=some, BLOCK=block_of(k_cache), PDL=pdl,
        num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


def paged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    lens_cpu: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    write_new(k, v, k_cache, v_cache, slot_mapping)
    batch = (token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    given = (q, k_cache, v_cache, *batch, scale, window, softcap, sinks)
    return choose(SPEC, SPEC.call(*given)).run(*given)
