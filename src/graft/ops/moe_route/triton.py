"""Routing, one program a token: scores, the best groups, then the largest k times over."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def first_of(values, best, indices, BEYOND: tl.constexpr, last):
    """The first index that has the value `best`; NaN equals nothing, so it stays in range."""
    return tl.minimum(tl.min(tl.where(values == best, indices, BEYOND), axis=0), last)


@triton.jit
def keep_best_groups(
    choice, experts, e, size, E: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """`choice` with -inf for experts outside of the groups with the largest sum of their one or two largest. What is
    beyond the experts is -inf already."""
    group = experts // size
    groups = tl.arange(0, GROUPS_PAD)
    sums = tl.full([GROUPS_PAD], -float("inf"), tl.float32)
    for index in tl.static_range(GROUPS):
        own = tl.where(group == index, choice, -float("inf"))
        best = tl.max(own, axis=0)
        total = best
        if GROUP_BEST == 2:
            taken = first_of(own, best, experts, E, e - 1)
            total += tl.max(tl.where(experts == taken, -float("inf"), own), axis=0)
        sums = tl.where(groups == index, total, sums)
    inside = experts < 0  # none
    for _ in tl.static_range(TOP_GROUPS):
        chosen = first_of(sums, tl.max(sums, axis=0), groups, GROUPS_PAD, GROUPS - 1)
        inside = inside | (group == chosen)
        sums = tl.where(groups == chosen, -float("inf"), sums)
    return tl.where(inside, choice, -float("inf"))


@triton.jit
def moe_route_kernel(
    logits, bias, weights, ids, stride_row, e, eps, scale,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, NORMALIZE: tl.constexpr, SELECT_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
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
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + experts, mask=experts < e, other=0.0).to(tl.float32)
    choice = tl.where(experts < e, choice, -float("inf"))
    if TOP_GROUPS < GROUPS:
        choice = keep_best_groups(choice, experts, e, e // GROUPS, E, GROUPS, GROUPS_PAD, TOP_GROUPS, GROUP_BEST)
    chosen = tl.full([K_PAD], -float("inf"), tl.float32)
    expert_ids = tl.zeros([K_PAD], tl.int32)
    for position in tl.static_range(K):
        best = tl.max(choice, axis=0)
        expert = first_of(choice, best, experts, E, e - 1)  # of equal ones the first, as CUDA's topk
        counts = tl.sum(tl.where(experts == expert, scores, 0.0), axis=0) if HAS_BIAS else best
        chosen = tl.where(positions == position, counts, chosen)
        expert_ids = tl.where(positions == position, expert, expert_ids)
        choice = tl.where(experts == expert, -float("inf"), choice)
    if SELECT_FIRST:
        chosen = 1.0 / (1.0 + tl.exp(-chosen)) if SIGMOID else tl.exp(chosen - tl.max(chosen, axis=0))
    if NORMALIZE or (SELECT_FIRST and not SIGMOID):
        chosen = chosen / (tl.sum(tl.where(positions < K, chosen, 0.0), axis=0) + eps)
    tl.store(weights + row * K + positions, (chosen * scale).to(weights.dtype.element_ty), mask=positions < K)
    tl.store(ids + row * K + positions, expert_ids.to(tl.int64), mask=positions < K)


def moe_route_triton(
    logits: Tensor, top_k: int, normalize: bool, dtype: torch.dtype, select_first: bool = False,
    scoring: str = "softmax", bias: Tensor | None = None, groups: int = 1, top_groups: int = 1, group_best: int = 1,
    eps: float = 0.0, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, e = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    weights = torch.empty((n, top_k), dtype=dtype, device=logits.device)
    ids = torch.empty((n, top_k), dtype=torch.int64, device=logits.device)
    moe_route_kernel[(n,)](
        logits, logits if bias is None else bias.contiguous(), weights, ids, logits.stride(0), e, eps, scale,
        K=top_k, K_PAD=triton.next_power_of_2(top_k), E=triton.next_power_of_2(e),
        NORMALIZE=normalize, SELECT_FIRST=select_first, SIGMOID=scoring == "sigmoid", HAS_BIAS=bias is not None,
        GROUPS=groups, GROUPS_PAD=triton.next_power_of_2(groups), TOP_GROUPS=top_groups, GROUP_BEST=group_best,
        num_warps=1,
    )  # fmt: skip
    return weights, ids
