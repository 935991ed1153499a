"""Routing of real models. Logits of a row are all different in every dtype, so that the choice is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case

EVEN = 1.0 / 1024  # a step of the bias, smaller than those of sigmoids of logits a quarter apart around 0


def grouped(
    shape: tuple[int, int], top_k: int, groups: int, top_groups: int, group_best: int, scoring: str, biased: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """Experts in groups, as DeepSeek has them; logits are so far apart that groups differ in any dtype."""
    n, e = shape
    ranks = torch.stack([torch.randperm(e, generator=generator) for _ in range(n)])
    logits = ((ranks - e // 2) / 8).to(device=device, dtype=dtype)
    bias = (torch.randperm(e, generator=generator) * EVEN).to(device=device, dtype=torch.float32) if biased else None
    tail = (bias, groups, top_groups, group_best, 1e-20, 2.5)
    return logits, top_k, scoring == "sigmoid", torch.float32, False, scoring, *tail


def make(
    shape: tuple[int, int], top_k: int, normalize: bool, cast: bool, select_first: bool, scoring: str,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    n, e = shape
    ranks = torch.stack([torch.randperm(e, generator=generator) for _ in range(n)])
    logits = ((ranks - e // 2) / 8).to(device=device, dtype=dtype)  # steps of 1/8 up to ±8: exact in bfloat16
    return logits, top_k, normalize, dtype if cast else torch.float32, select_first, scoring


CASES = [
    Case("mixtral decode", partial(make, (1, 8), 2, True, False, False, "softmax"), 8),
    Case("mixtral prefill 16", partial(make, (16, 8), 2, True, False, False, "softmax"), 8),
    Case("qwen3-moe decode 4", partial(make, (4, 128), 8, True, True, False, "softmax"), 128),
    Case("olmoe, not normalized", partial(make, (3, 64), 8, False, True, False, "softmax"), 64),
    Case("granite-moe, selects first", partial(make, (5, 40), 8, False, True, True, "softmax"), 40),
    Case("one expert, odd count", partial(make, (3, 5), 1, False, False, False, "softmax"), 5),
    Case("llama-4, sigmoid of one", partial(make, (4, 16), 1, False, True, True, "sigmoid"), 16),
    Case("sigmoid of all, normalized", partial(make, (4, 16), 8, True, False, False, "sigmoid"), 16),
    Case("deepseek-v3", partial(grouped, (5, 32), 4, 8, 4, 2, "sigmoid", True), 32),
    Case("moonlight, one group", partial(grouped, (3, 16), 6, 1, 1, 2, "sigmoid", True), 16),
    Case("deepseek-v2, groups by their best", partial(grouped, (4, 40), 6, 8, 3, 1, "softmax", False), 40),
    Case("all experts", partial(make, (3, 6), 6, True, True, False, "softmax"), 6),
]
