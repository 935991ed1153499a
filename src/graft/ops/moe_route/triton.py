"""Routing, one program a token: softmax, then the largest k times over."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def moe_route_kernel(
    logits, weights, ids, stride_row, e,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, NORMALIZE: tl.constexpr, SELECT_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, E)
    positions = tl.arange(0, K_PAD)
    scores = tl.load(logits + row * stride_row + experts, mask=experts < e, other=-float("inf")).to(tl.float32)
    if not SELECT_FIRST:
        if SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-scores))
        else:
            scores = tl.exp(scores - tl.max(scores, axis=0))
            scores = scores / tl.sum(scores, axis=0)
        scores = tl.where(experts < e, scores, -float("inf"))
    chosen = tl.full([K_PAD], -float("inf"), tl.float32)
    expert_ids = tl.zeros([K_PAD], tl.int32)
    for position in tl.static_range(K):
        best = tl.max(scores, axis=0)
        # of equal scores the first, which is the set that CUDA's topk keeps; NaN equals nothing, so stay in range
        expert = tl.minimum(tl.min(tl.where(scores == best, experts, E), axis=0), e - 1)
        chosen = tl.where(positions == position, best, chosen)
        expert_ids = tl.where(positions == position, expert, expert_ids)
        scores = tl.where(experts == expert, -float("inf"), scores)
    if SELECT_FIRST:
        chosen = 1.0 / (1.0 + tl.exp(-chosen)) if SIGMOID else tl.exp(chosen - tl.max(chosen, axis=0))
    if NORMALIZE or (SELECT_FIRST and not SIGMOID):
        chosen = chosen / tl.sum(tl.where(positions < K, chosen, 0.0), axis=0)
    tl.store(weights + row * K + positions, chosen.to(weights.dtype.element_ty), mask=positions < K)
    tl.store(ids + row * K + positions, expert_ids.to(tl.int64), mask=positions < K)


def moe_route_triton(
    logits: Tensor, top_k: int, normalize: bool, dtype: torch.dtype, select_first: bool = False,
    scoring: str = "softmax",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, e = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    weights = torch.empty((n, top_k), dtype=dtype, device=logits.device)
    ids = torch.empty((n, top_k), dtype=torch.int64, device=logits.device)
    moe_route_kernel[(n,)](
        logits, weights, ids, logits.stride(0), e,
        K=top_k, K_PAD=triton.next_power_of_2(top_k), E=triton.next_power_of_2(e),
        NORMALIZE=normalize, SELECT_FIRST=select_first, SIGMOID=scoring == "sigmoid", num_warps=1,
    )  # fmt: skip
    return weights, ids
