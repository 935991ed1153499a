"""The convolution of packed sequences and what each keeps, in one launch for any step.

    program (sequence, channels, part)   tiles part, part + parts, … of the sequence's tokens
    part 0                               has the first tile, the only one that reads what the sequence held,
                                         and writes what it holds then, when it has read it

So nobody reads what another program writes, and no size comes from the host: a CUDA graph can have it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.causal_conv.reference import NONE, SILU
from graft.ops.causal_conv.triton import CHANNELS, TOKENS, convolved, split_count
from graft.ops.launch import pdl_supported

ALONE = 128  # channels of a program where sequences bring a token each


@triton.jit(do_not_specialize=["s_out"])
def stateful_causal_conv_kernel(
    x, weight, bias, state, out, state_slots, cu_seqlens, seq_lens, c, s_channel, s_token, s_state, s_out,
    TAPS: tl.constexpr, KEPT: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0), tl.program_id(2)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    first = tl.load(cu_seqlens + row)
    last = tl.load(cu_seqlens + row + 1)
    known = tl.load(seq_lens + row) > last - first
    held = state + tl.load(state_slots + row) * s_state
    if PDL:
        tl.extra.cuda.gdc_wait()
    for at in range(first + part * TOKENS, last, TOKENS * tl.num_programs(2)):
        token = at + tl.arange(0, TOKENS)
        made = convolved(
            x, weight, bias, held, channel, token, first, last, known, c, s_channel, s_token, TAPS, BIASED, SILU,
            True,
        )  # fmt: skip
        place = out + channel[:, None] * s_out + token[None, :]
        tl.store(place, made.to(out.dtype.element_ty), mask=(channel < c)[:, None] & (token < last)[None, :])
    if part == 0:
        kept = tl.arange(0, KEPT)
        source = last - (TAPS - 1) + kept
        inside = (channel < c)[:, None] & (kept < TAPS - 1)[None, :]
        fed = (source >= first)[None, :]
        new = tl.load(x + channel[:, None] * s_channel + source[None, :] * s_token, mask=inside & fed, other=0.0)
        older = held + channel[:, None] * (TAPS - 1) + (source - first + TAPS - 1)[None, :]
        old = tl.load(older, mask=inside & (source < first)[None, :] & known, other=0.0)
        tl.debug_barrier()  # every thread has read what another writes
        place = held + channel[:, None] * (TAPS - 1) + kept[None, :]
        tl.store(place, tl.where(fed, new.to(state.dtype.element_ty), old), mask=inside)


def stateful_causal_conv_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, state_slots: Tensor, token_to_seq: Tensor,  # noqa: ARG001
    cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, activation: str = NONE,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    _, c, tokens = x.shape
    taps, sequences = weight.shape[1], state_slots.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weight = weight.contiguous()
    # as many tokens as sequences: one each, but for some with none and others with more
    each, some = (ALONE, 1) if tokens == sequences else (CHANNELS, max(TOKENS, triton.next_power_of_2(taps)))
    groups, parts = triton.cdiv(c, each), 1
    if some > 1:
        parts = split_count(sequences * groups, triton.cdiv(tokens, some), x.device)
    pdl = pdl_supported(x.device)
    stateful_causal_conv_kernel[(sequences, groups, parts)](
        x, weight, weight if bias is None else bias, state, out, state_slots, cu_seqlens, seq_lens, c, x.stride(1),
        x.stride(2), state.stride(0), out.stride(1),
        TAPS=taps, KEPT=triton.next_power_of_2(taps - 1), BIASED=bias is not None, SILU=activation == SILU,
        CHANNELS=each, TOKENS=some, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
