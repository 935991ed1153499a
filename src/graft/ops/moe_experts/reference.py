"""The experts of a mixture in plain torch: what Hugging Face's `grouped_mm` form computes, without its masks.

Each token is taken once for each of its k experts; these n·k rows are sorted by expert, so that an expert's rows lie
together. The sum over a token's experts runs in the order of `ids`, in the wider of the dtypes of x and weights.

Packed experts (weights/stacked.py) come with scales; those that a token was sent to are dequantized, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.half_precision import matmul
from graft.ops.swiglu.reference import swiglu
from graft.weights.stacked import unpack_expert

Multiply = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert, where each expert's end
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


def moe_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False, gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x: [n, d]; weights, ids: [n, k]; gate_up: [e, 2f, d], gate first; down: [e, d, f]. Gives [n, d].

    gate_up_bias: [e, 2f]; down_bias: [e, d]. interleaved: the rows of gate and up take turns (gpt-oss).
    weigh_input: the weights multiply what goes into the experts (Llama 4), not what comes out.
    gate_up_scale, down_scale: [e, rows, …] of experts that are packed.
    """
    if gate_up_scale is None or down_scale is None:
        up, back = (partial(grouped_matmul, weight=w.transpose(-2, -1)) for w in (gate_up, down))
    else:
        up = partial(grouped_packed, weight=gate_up, scale=gate_up_scale, gated=not interleaved)
        back = partial(grouped_packed, weight=down, scale=down_scale, gated=False)
    more = (gate_up_bias, down_bias, interleaved, weigh_input)
    return sorted_experts(x, weights, ids, gate_up.shape[0], activation, *more, up, back)


def sorted_experts(
    x: Tensor, weights: Tensor, ids: Tensor, experts: int, activation: str, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, interleaved: bool, weigh_input: bool, up: Multiply, down: Multiply,
) -> Tensor:  # fmt: skip
    """Over rows sorted by expert; `up(rows, ends)` and `down` multiply each expert's rows by its matrix."""
    k = ids.shape[1]
    chosen, order = torch.sort(ids.reshape(-1))  # [n·k]
    ends = group_ends(chosen, experts)
    rows = x[order // k]
    if weigh_input:
        rows = (rows * weights.reshape(-1)[order].unsqueeze(-1)).to(x.dtype)
        weights = torch.ones_like(weights)
    hidden = up(rows, ends)  # [n·k, 2f]
    if gate_up_bias is not None:
        hidden = hidden + gate_up_bias[chosen]
    hidden = gated(hidden, activation, interleaved)
    result = down(hidden, ends)  # [n·k, d]
    if down_bias is not None:
        result = result + down_bias[chosen]
    return weighted_sum(torch.empty_like(result).index_copy_(0, order, result), weights, x.dtype)


def gated(hidden: Tensor, activation: str, interleaved: bool = False) -> Tensor:
    """hidden: [..., 2f], gate and up side by side or taking turns. Gives [..., f]."""
    f = hidden.shape[-1] // 2
    halves = (hidden[..., ::2], hidden[..., 1::2]) if interleaved else (hidden[..., :f], hidden[..., f:])
    return clamped_swiglu(*halves) if activation == "clamped_swiglu" else swiglu(*halves, activation)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: both are bounded, and up counts from 1."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def weighted_sum(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """rows: [n·k, d] in the order of `weights` [n, k]. Gives [n, d]."""
    return (rows.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(dtype)


def group_ends(by_expert: Tensor, experts: int) -> Tensor:
    """Where each expert's rows end among the sorted ones, [e]; on the device, without asking it."""
    return torch.searchsorted(by_expert, torch.arange(experts, device=by_expert.device), right=True)


def grouped_matmul(rows: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    """rows: [n·k, i] sorted by expert, weight: [e, i, o], ends: [e]. Gives [n·k, o]."""
    return by_expert(rows, ends, weight.shape[2], lambda own, expert: matmul(own, weight[expert]))


def grouped_packed(rows: Tensor, ends: Tensor, weight: Tensor, scale: Tensor, gated: bool) -> Tensor:
    """The same with packed experts, in float32: what they stand for are no 16-bit numbers."""
    wide = torch.promote_types(rows.dtype, torch.float32)

    def multiply(own: Tensor, expert: int) -> Tensor:
        full = unpack_expert(weight, scale, expert, rows.shape[1], wide, gated)
        return F.linear(own.to(wide), full).to(rows.dtype)

    return by_expert(rows, ends, scale.shape[1], multiply)


def by_expert(rows: Tensor, ends: Tensor, columns: int, multiply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """What `multiply` gives for the rows of each expert that has some."""
    out = rows.new_empty(rows.shape[0], columns)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = multiply(rows[start:end], expert)
        start = end
    return out
