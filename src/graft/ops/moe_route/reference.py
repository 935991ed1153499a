"""Which experts a token goes to and how much each counts, operation for operation what Hugging Face computes."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_route(
    logits: Tensor, top_k: int, normalize: bool, dtype: torch.dtype, select_first: bool = False,
    scoring: str = "softmax",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits: [n, e]. Gives weights [n, k] in `dtype` and expert ids [n, k], the heaviest first.

    Softmax over all experts in float32, the k largest, divided by their sum where `normalize` (Mixtral, Qwen3-MoE).
    select_first (GraniteMoe): the k largest logits, and the softmax over those alone. scoring "sigmoid" (Llama 4)
    has the sigmoid of each logit where "softmax" has the softmax.
    """
    logits = logits.to(torch.float32)
    if select_first:
        values, ids = torch.topk(logits, top_k, dim=-1)
        weights = torch.sigmoid(values) if scoring == "sigmoid" else torch.softmax(values, dim=-1)
    else:
        scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)
        weights, ids = torch.topk(scores, top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(dtype), ids
