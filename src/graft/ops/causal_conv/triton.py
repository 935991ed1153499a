"""Causal depthwise convolutions in one kernel: a program takes some channels of some tokens of a sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.causal_conv.reference import NONE, SILU
from graft.ops.launch import processors
from graft.ops.triton_math import silu

TOKENS = 32  # of a program at once, where there are so many
CHANNELS = 64
PROGRAMS_PER_SM = 4


@triton.jit
def convolved(
    x, weight, bias, held, channel, token, first, last, known, c, s_channel, s_token,
    TAPS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """[channels, tokens] in the weight's dtype. The sequence is tokens first…last-1 of x; `held` [c, TAPS - 1], what
    it saw before them, counts where it is HELD and known, and as zeros elsewhere."""
    dtype = weight.dtype.element_ty
    inside = (channel < c)[:, None] & (token < last)[None, :]
    sums = tl.zeros([channel.shape[0], token.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1 - tap)
        fed = (source >= first)[None, :]
        seen = tl.load(x + channel[:, None] * s_channel + source[None, :] * s_token, mask=inside & fed, other=0.0).to(
            tl.float32
        )
        if HELD:
            place = held + channel[:, None] * (TAPS - 1) + (source - first + TAPS - 1)[None, :]
            older = tl.load(place, mask=inside & (source < first)[None, :] & known, other=0.0)
            seen = tl.where(fed, seen, older.to(x.dtype.element_ty).to(tl.float32))
        tap_weight = tl.load(weight + channel * TAPS + tap, mask=channel < c, other=0.0).to(tl.float32)
        sums += seen * tap_weight[:, None]
    if BIASED:
        sums += tl.load(bias + channel, mask=channel < c, other=0.0).to(tl.float32)[:, None]
    made = sums.to(dtype)
    if SILU:
        made = silu(made.to(tl.float32)).to(dtype)
    return made


@triton.jit(do_not_specialize=["s_batch", "s_out", "s_out_batch", "tokens"])
def causal_conv_kernel(
    x, weight, bias, out, c, tokens, s_batch, s_channel, s_token, s_out_batch, s_out,
    TAPS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    made = convolved(
        x + row * s_batch, weight, bias, x, channel, token, 0, tokens, False, c, s_channel, s_token, TAPS, BIASED,
        SILU, False,
    )  # fmt: skip
    place = out + row * s_out_batch + channel[:, None] * s_out + token[None, :]
    tl.store(place, made.to(out.dtype.element_ty), mask=(channel < c)[:, None] & (token < tokens)[None, :])


def causal_conv_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = NONE) -> Tensor:
    rows, c, tokens = x.shape
    out = torch.empty((rows, c, tokens), dtype=x.dtype, device=x.device)
    weight = weight.contiguous()
    causal_conv_kernel[(rows, triton.cdiv(c, CHANNELS), triton.cdiv(tokens, TOKENS))](
        x, weight, weight if bias is None else bias, out, c, tokens, *x.stride(), out.stride(0), out.stride(1),
        TAPS=weight.shape[1], BIASED=bias is not None, SILU=activation == SILU, CHANNELS=CHANNELS, TOKENS=TOKENS,
        num_warps=4,
    )  # fmt: skip
    return out


def split_count(programs: int, tiles: int, device: torch.device) -> int:
    """Programs that share the tokens of a sequence, from shapes alone."""
    return max(1, min(tiles, PROGRAMS_PER_SM * processors(device) // max(programs, 1)))
