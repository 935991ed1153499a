"""Linear layers of real models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn


def make(
    rows: tuple[int, ...], n: int, k: int, bias: bool, transposed: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """`transposed`: the weight lies as [k, n] in memory, as GPT-2's do."""
    w = randn((k, n) if transposed else (n, k), device, torch.float32, generator) * k**-0.5
    w = w.to(dtype)
    b = randn((n,), device, dtype, generator) if bias else None
    return randn((*rows, k), device, dtype, generator), w.t() if transposed else w, b


CASES = [
    Case("smollm2-135m qkv, decode", partial(make, (1, 1), 960, 576, False, False), 576),
    Case("smollm2-135m down, decode 3", partial(make, (1, 3), 576, 1536, False, False), 1536),
    Case("qwen2-0.5b qkv, bias", partial(make, (1, 2), 1152, 896, True, False), 896),
    Case("one token, bias", partial(make, (1, 1), 96, 80, True, False), 80),
    Case("gpt-2, [k, n] in memory", partial(make, (3,), 288, 96, True, True), 96),
    Case("a vector", partial(make, (), 40, 24, False, False), 24),
    Case("weight in two pieces", partial(make, (2,), 130, 2**15, False, False), 2**15),
]
