"""Gated MLPs of real models, with 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn
from graft.ops.fused_linear.cases import LinearCase, make_weight


@dataclass(frozen=True)
class MlpCase:
    """`rows` tokens of `k` values, `n` values between the layers."""

    rows: int
    n: int
    k: int
    activation: str = "silu"
    norm: str = ""  # or plain, cast_last, normed
    bias: bool = False
    residual: bool = True
    fp8_from: int = 0


def make(case: MlpCase, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    gate_up, gate_up_scale = make_weight(LinearCase(1, 2 * case.n, case.k, "fp8"), device, dtype, generator)
    down, down_scale = make_weight(LinearCase(1, case.k, case.n, "fp8"), device, dtype, generator)
    x, residual = (randn((1, case.rows, case.k), device, dtype, generator) for _ in range(2))
    biases = [randn((size,), device, dtype, generator) if case.bias else None for size in (2 * case.n, case.k)]
    norm = randn((case.k,), device, dtype, generator) if case.norm in ("plain", "cast_last") else None
    last = case.norm == "cast_last"
    return (
        x, gate_up, gate_up_scale, down, down_scale, case.activation, *biases, norm, 1e-5 if case.norm else 0.0,
        1.0 if last else 0.0, last, False, residual if case.residual else None, case.norm == "normed", case.fp8_from,
    )  # fmt: skip


def case(name: str, *args: Any, **options: Any) -> Case:
    shape = MlpCase(*args, **options)
    return Case(name, partial(make, shape), shape.n)


CASES = [
    case("llama, normed, 18 tokens", 18, 96, 576, norm="normed"),
    case("llama, norm, 3 tokens", 3, 64, 256, norm="plain"),
    case("gemma, 5 tokens", 5, 80, 320, activation="gelu_tanh", norm="cast_last", residual=False),
    case("biases, no norm, 2 tokens", 2, 64, 200, activation="gelu", bias=True),
    case("one token", 1, 64, 256, norm="normed"),
]
