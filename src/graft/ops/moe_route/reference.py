"""Which experts a token goes to and how much each counts, operation for operation what Hugging Face computes."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_route(
    logits: Tensor, top_k: int, normalize: bool, dtype: torch.dtype, select_first: bool = False,
    scoring: str = "softmax", bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_best: int = 1,
    eps: float = 0.0, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits: [n, e]. Gives weights [n, k] in `dtype` and expert ids [n, k], the best choice first.

    Softmax over all experts in float32, the k largest, divided by their sum where `normalize` (Mixtral, Qwen3-MoE).
    select_first (GraniteMoe): the k largest logits, and the softmax over those alone. scoring "sigmoid" (Llama 4)
    has the sigmoid of each logit where "softmax" has the softmax. bias [e] (DeepSeek-V3) counts in the choice and not
    in the weights. groups: experts lie in so many groups, of which the top_groups with the largest sum of their
    group_best largest are chosen from. eps is added to the sum that weights are divided by; scale multiplies them.
    """
    logits = logits.to(torch.float32)
    if select_first:
        values, ids = torch.topk(logits, top_k, dim=-1)
        weights = torch.sigmoid(values) if scoring == "sigmoid" else torch.softmax(values, dim=-1)
    else:
        scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)
        choice = scores if bias is None else scores + bias
        weights, ids = torch.topk(of_best_groups(choice, groups, top_groups, group_best), top_k, dim=-1)
        weights = weights if bias is None else scores.gather(-1, ids)
    if normalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + eps if eps else total)
    return (weights * scale if scale != 1 else weights).to(dtype), ids


def of_best_groups(choice: Tensor, groups: int, top_groups: int, group_best: int) -> Tensor:
    """[n, e] with -inf for experts outside of the best groups."""
    if top_groups >= groups:
        return choice
    by_group = choice.unflatten(-1, (groups, -1))  # [n, groups, e / groups]
    sums = by_group.topk(group_best, dim=-1).values.sum(-1)
    best = sums.topk(top_groups, dim=-1).indices
    outside = torch.ones_like(sums, dtype=torch.bool).scatter(-1, best, False)
    return by_group.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
