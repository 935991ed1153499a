"""The gated delta rule of packed sequences, token by token, in one launch.

A program has some columns of a head's matrix in registers, feeds it the tokens of its sequence one after the other,
and writes it back. Columns do not depend on each other, so nobody reads what another program writes. For single
tokens that is one read and one write of the states; a long prompt is quicker in chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.gated_delta_rule.reference import EPS
from graft.ops.launch import pdl_supported

COLUMNS = 32  # of a program: 128 bytes of a row of the state


@triton.jit
def stateful_delta_rule_kernel(
    q, k, v, g, beta, state, out, state_slots, cu_seqlens, seq_lens, heads, s_q, s_q_head, s_k, s_k_head, s_v,
    s_v_head, s_g, s_g_head, s_beta, s_beta_head, s_state, scale, eps,
    d_k: tl.constexpr, d_v: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, L2_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    key_at = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(cu_seqlens + row)
    last = tl.load(cu_seqlens + row + 1)
    known = tl.load(seq_lens + row) > last - first
    place = state + tl.load(state_slots + row) * s_state + head * (d_k * d_v)
    place = place + key_at[:, None] * d_v + column[None, :]
    inside = (key_at < d_k)[:, None] & (column < d_v)[None, :]
    mixed = tl.load(place, mask=inside & known, other=0.0)  # [d_k, columns]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for token in range(first, last):
        query = tl.load(q + token * s_q + head * s_q_head + key_at, mask=key_at < d_k, other=0.0).to(tl.float32)
        key = tl.load(k + token * s_k + head * s_k_head + key_at, mask=key_at < d_k, other=0.0).to(tl.float32)
        value = tl.load(v + token * s_v + head * s_v_head + column, mask=column < d_v, other=0.0).to(tl.float32)
        fade = tl.exp(tl.load(g + token * s_g + head * s_g_head).to(tl.float32))
        share = tl.load(beta + token * s_beta + head * s_beta_head).to(tl.float32)
        if L2_NORM:
            query = query * tl.rsqrt(tl.sum(query * query, axis=0) + eps)
            key = key * tl.rsqrt(tl.sum(key * key, axis=0) + eps)
        mixed = mixed * fade
        delta = (value - tl.sum(mixed * key[:, None], axis=0)) * share
        mixed = mixed + key[:, None] * delta[None, :]
        made = tl.sum(mixed * (query * scale)[:, None], axis=0)
        tl.store(out + (token * heads + head) * d_v + column, made.to(out.dtype.element_ty), mask=column < d_v)
    tl.store(place, mixed, mask=inside)


def stateful_delta_rule_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, lens_cpu: Tensor, l2_norm: bool = False,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    heads, d_k, d_v = state.shape[1:]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    columns = min(COLUMNS, triton.next_power_of_2(d_v))
    pdl = pdl_supported(q.device)
    stateful_delta_rule_kernel[(state_slots.shape[0], heads, triton.cdiv(d_v, columns))](
        q, k, v, g, beta, state, out, state_slots, cu_seqlens, seq_lens, heads, q.stride(1), q.stride(2), k.stride(1),
        k.stride(2), v.stride(1), v.stride(2), g.stride(1), g.stride(2), beta.stride(1), beta.stride(2),
        state.stride(0), d_k**-0.5, EPS,
        d_k=d_k, d_v=d_v, KEYS=triton.next_power_of_2(d_k), COLUMNS=columns, L2_NORM=l2_norm, PDL=pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
