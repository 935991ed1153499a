"""The experts of a mixture in plain torch: what Hugging Face's `grouped_mm` form computes, without its masks.

Each token is taken once for each of its k experts; these n·k rows are sorted by expert, so that an expert's rows lie
together. The sum over a token's experts runs in the order of `ids`, in the wider of the dtypes of x and weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.ops.half_precision import matmul
from graft.ops.swiglu.reference import swiglu

Matmul = Callable[[Tensor, Tensor, Tensor], Tensor]
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


def moe_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu",
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleaved: bool = False,
    weigh_input: bool = False,
) -> Tensor:  # fmt: skip
    """x: [n, d]; weights, ids: [n, k]; gate_up: [e, 2f, d], gate first; down: [e, d, f]. Gives [n, d].

    gate_up_bias: [e, 2f]; down_bias: [e, d]. interleaved: the rows of gate and up take turns (gpt-oss).
    weigh_input: the weights multiply what goes into the experts (Llama 4), not what comes out.
    """
    more = (gate_up_bias, down_bias, interleaved, weigh_input)
    return sorted_experts(x, weights, ids, gate_up, down, activation, *more, grouped_matmul)


def sorted_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, interleaved: bool, weigh_input: bool, matmul: Matmul,
) -> Tensor:  # fmt: skip
    """Over rows sorted by expert; `matmul(rows, weight, ends)` multiplies each expert's rows by its matrix."""
    k = ids.shape[1]
    by_expert, order = torch.sort(ids.reshape(-1))  # [n·k]
    ends = group_ends(by_expert, gate_up.shape[0])
    rows = x[order // k]
    if weigh_input:
        rows = (rows * weights.reshape(-1)[order].unsqueeze(-1)).to(x.dtype)
        weights = torch.ones_like(weights)
    hidden = matmul(rows, gate_up.transpose(-2, -1), ends)  # [n·k, 2f]
    if gate_up_bias is not None:
        hidden = hidden + gate_up_bias[by_expert]
    hidden = gated(hidden, activation, interleaved)
    result = matmul(hidden, down.transpose(-2, -1), ends)  # [n·k, d]
    if down_bias is not None:
        result = result + down_bias[by_expert]
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


def grouped_matmul(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows: [n·k, i] sorted by expert, weight: [e, i, o], ends: [e]. Gives [n·k, o]."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = matmul(rows[start:end], weight[expert])
        start = end
    return out
