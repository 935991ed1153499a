"""Linear layers of a decode step in real models, with what is fused into them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn
from graft.weights.packing import GROUP, pack_bytes, pack_int4


@dataclass(frozen=True)
class LinearCase:
    """`rows` tokens of `k` values, `n` rows of the weight."""

    rows: int
    n: int
    k: int
    weight: str = "plain"  # or int8, int4, fp8
    bias: bool = False
    norm: str = ""  # or plain, cast_last, layer, layer_bias
    activation: str = "none"
    residual: bool = False
    normed: bool = False
    glu: bool = True
    alpha: float = 1.0


def make(shape: LinearCase, device: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    n, k = shape.n, shape.k
    width = n // 2 if shape.activation != "none" and shape.glu else n
    x = randn((1, shape.rows, k), device, dtype, generator)
    weight, scale = make_weight(shape, device, dtype, generator)
    bias = randn((n,), device, dtype, generator) if shape.bias else None
    norm = randn((k,), device, dtype, generator) if shape.norm else None
    residual = randn((1, shape.rows, width), device, dtype, generator) if shape.residual else None
    last, center = shape.norm == "cast_last", shape.norm.startswith("layer")
    norm_bias = randn((k,), device, dtype, generator) if shape.norm == "layer_bias" else None
    return (
        x, weight, bias, scale, norm, 1e-5 if norm is not None or shape.normed else 0.0, 1.0 if last else 0.0, last,
        shape.activation, False, residual, shape.normed, 0, shape.glu, shape.alpha,
        norm_bias, center,
    )  # fmt: skip


def make_weight(
    shape: LinearCase, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random weights of about k^-1/2, and their scales."""
    n, k = shape.n, shape.k
    small = k**-0.5
    w = randn((n, k), device, torch.float32, generator)
    jitter = 1 + 0.1 * randn((n, -(-k // GROUP)), device, torch.float32, generator)  # no two scales alike
    if shape.weight == "int8":
        return pack_bytes((w * 40).clamp(-127, 127).round().to(torch.int8)), jitter[:, 0] * small / 40
    if shape.weight == "fp8":
        return pack_bytes((w * 32).to(torch.float8_e4m3fn)), jitter[:, 0] * small / 32
    if shape.weight == "int4":
        return pack_int4((w * 3).clamp(-8, 7).round()), (jitter * small / 3).to(dtype)
    return (w * small).to(dtype), None


def case(name: str, *args: Any, **options: Any) -> Case:
    shape = LinearCase(*args, **options)
    return Case(name, partial(make, shape), shape.k)


CASES = [
    case("llama-3.2-1b qkv, norm", 1, 96, 2048, norm="plain"),
    case("llama-3.2-1b o, residual", 1, 64, 2048, residual=True),
    case("llama-3.2-1b gate-up, norm", 1, 128, 2048, norm="plain", activation="silu"),
    case("smollm2-135m down, residual, 3 tokens", 3, 64, 1536, residual=True),
    case("qwen2-0.5b qkv, norm and bias, 2 tokens", 2, 72, 896, norm="plain", bias=True),
    case("gemma-2-2b gate-up, 5 tokens", 5, 96, 2304, norm="cast_last", activation="gelu_tanh"),
    case("phi-3 gate-up, 17 tokens", 17, 64, 3072, norm="plain", activation="silu"),
    case("o, residual, 64 tokens", 64, 48, 512, residual=True),
    case("bias and residual, 9 tokens", 9, 40, 576, bias=True, residual=True),
    case("plain, 33 tokens", 33, 80, 576),
    case("starcoder2 up, bias, no gate", 1, 96, 3072, bias=True, activation="gelu_tanh", glu=False),
    case("minitron up, 3 tokens, no gate", 3, 80, 768, activation="relu_squared", glu=False),
    case("opt up, 18 tokens, no gate", 18, 72, 768, bias=True, activation="relu", glu=False),
    case("bert up, norm, 2 tokens, no gate", 2, 72, 768, norm="plain", activation="gelu", glu=False),
    case("stablelm gate-up, LayerNorm", 1, 96, 2048, norm="layer_bias", activation="silu"),
    case(
        "starcoder2 up, LayerNorm, bias, no gate",
        1,
        72,
        3072,
        norm="layer_bias",
        bias=True,
        activation="gelu_tanh",
        glu=False,
    ),
    case("cohere qkv, LayerNorm without bias, 3 tokens", 3, 80, 1024, norm="layer"),
    case("minitron up, LayerNorm, 18 tokens", 18, 64, 768, norm="layer_bias", activation="relu_squared", glu=False),
    case("int8 qkv, LayerNorm", 1, 64, 576, weight="int8", norm="layer_bias"),
    case("int4 qkv, LayerNorm, 2 tokens", 2, 64, 1024, weight="int4", norm="layer_bias"),
    case("granite down, scaled residual", 1, 64, 2048, residual=True, alpha=0.22),
    case("granite o, scaled residual, 20 tokens", 20, 48, 512, bias=True, residual=True, alpha=0.22),
    case("int8 up, no gate, 2 tokens", 2, 64, 576, weight="int8", bias=True, activation="gelu_tanh", glu=False),
    case(
        "fp8 up, no gate, scaled residual",
        18,
        64,
        576,
        weight="fp8",
        activation="relu_squared",
        residual=True,
        glu=False,
        alpha=0.5,
    ),
    case(
        "int4 up, no gate, 3 tokens",
        3,
        64,
        1024,
        weight="int4",
        activation="silu",
        residual=True,
        glu=False,
        alpha=-2.0,
    ),
    case("int8 qkv, norm", 1, 64, 2048, weight="int8", norm="plain"),
    case("int8 gate-up, normed", 1, 64, 576, weight="int8", normed=True, activation="silu"),
    case("int4 qkv, normed, 2 tokens", 2, 64, 2048, weight="int4", normed=True),
    case("fp8 gate-up, normed, 18 tokens", 18, 64, 576, weight="fp8", normed=True, activation="silu"),
    case("int8 gate-up, 3 tokens", 3, 64, 576, weight="int8", norm="plain", activation="silu"),
    case("int8 down, residual, 20 tokens", 20, 48, 1536, weight="int8", residual=True),
    case("fp8 qkv, norm", 1, 64, 2048, weight="fp8", norm="plain"),
    case("fp8 gate-up, 3 tokens", 3, 64, 576, weight="fp8", norm="plain", activation="silu"),
    case("fp8 down, residual, 20 tokens", 20, 48, 1536, weight="fp8", residual=True),
    case("int4 qkv, norm", 1, 64, 2048, weight="int4", norm="plain"),
    case("int4 gate-up, 3 tokens", 3, 64, 576, weight="int4", norm="plain", activation="silu"),
    case("int8, bias, k of no whole run, 2 tokens", 2, 24, 200, weight="int8", bias=True),
    case("fp8, k of no whole run, 7 tokens", 7, 24, 200, weight="fp8"),
    case("int4, k of no whole group, 2 tokens", 2, 24, 200, weight="int4"),
    case("int4 down, residual, 20 tokens", 20, 48, 1536, weight="int4", residual=True),
]
