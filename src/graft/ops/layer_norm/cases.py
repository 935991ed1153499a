"""Shapes of LayerNorm in real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    shape: tuple[int, ...], affine: str, eps: float, form: str, upcast: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    x, weight, bias = (randn(size, device, dtype, generator) for size in (shape, shape[-1:], shape[-1:]))
    return x, weight if "w" in affine else None, bias if "b" in affine else None, eps, form, upcast


CASES = [
    Case("gpt2 decode", partial(make, (1, 1, 768), "wb", 1e-5, "fused", False), 768),
    Case("gpt2 prefill 32", partial(make, (1, 32, 768), "wb", 1e-5, "fused", False), 768),
    Case("olmo without weight", partial(make, (1, 3, 2048), "", 1e-5, "fused", False), 2048),
    Case("cohere spelled out", partial(make, (2, 5, 4096), "w", 1e-5, "mean_rsqrt", True), 4096),
    Case("odd width, var and sqrt", partial(make, (3, 37), "wb", 1e-6, "var_sqrt", True), 37),
]
