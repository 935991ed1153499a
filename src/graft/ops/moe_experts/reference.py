"""The experts of a mixture in plain torch: what Hugging Face's `grouped_mm` form computes, without its masks.

Each token is taken once for each of its k experts; these n·k rows are sorted by expert, so that an expert's rows lie
together. The sum over a token's experts runs in the order of `ids`, in the wider of the dtypes of x and weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.ops.narrow import matmul
from graft.ops.swiglu.reference import swiglu

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def moe_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu"
) -> Tensor:
    """x: [n, d]; weights, ids: [n, k]; gate_up: [e, 2f, d], gate first; down: [e, d, f]. Gives [n, d]."""
    return sorted_experts(x, weights, ids, gate_up, down, activation, grouped_product)


def sorted_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, activation: str, product: Product
) -> Tensor:
    """Over rows sorted by expert; `product(rows, weight, ends)` multiplies each expert's rows by its matrix."""
    k, f = ids.shape[1], down.shape[2]
    by_expert, order = torch.sort(ids.reshape(-1))  # [n·k]
    ends = group_ends(by_expert, gate_up.shape[0])
    hidden = product(x[order // k], gate_up.transpose(-2, -1), ends)  # [n·k, 2f]
    hidden = swiglu(hidden[:, :f], hidden[:, f:], activation)
    result = product(hidden, down.transpose(-2, -1), ends)  # [n·k, d]
    return weighted_sum(torch.empty_like(result).index_copy_(0, order, result), weights, x.dtype)


def weighted_sum(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """rows: [n·k, d] in the order of `weights` [n, k]. Gives [n, d]."""
    return (rows.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(dtype)


def group_ends(by_expert: Tensor, experts: int) -> Tensor:
    """Where each expert's rows end among the sorted ones, [e]; on the device, without asking it."""
    return torch.searchsorted(by_expert, torch.arange(experts, device=by_expert.device), right=True)


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows: [n·k, i] sorted by expert, weight: [e, i, o], ends: [e]. Gives [n·k, o]."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = matmul(rows[start:end], weight[expert])
        start = end
    return out
