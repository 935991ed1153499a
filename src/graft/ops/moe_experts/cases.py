"""Experts of real models at a fraction of their width, so that Triton's interpreter gets through them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn
from graft.ops.fused_linear.cases import LinearCase, make_weight

GPT_OSS = {"biases": True, "activation": "clamped_swiglu"}


def make(
    n: int, k: int, sizes: tuple[int, int, int], activation: str, cast: bool, choice: str,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """`choice`: "random"; "one" sends every token to the same k experts. `cast`: weights in the working dtype."""
    e, f, d = sizes
    orders = [torch.randperm(e, generator=generator)[:k] for _ in range(n)]
    ids = torch.stack(orders[:1] * n if choice == "one" else orders).to(device)
    weights = torch.softmax(randn((n, k), device, torch.float32, generator), -1).to(dtype if cast else torch.float32)
    gate_up = randn((e, 2 * f, d), device, torch.float32, generator) * d**-0.5
    down = randn((e, d, f), device, torch.float32, generator) * f**-0.5
    x = randn((n, d), device, dtype, generator)
    return x, weights, ids, gate_up.to(dtype), down.to(dtype), activation


def make_gpt_oss(
    n: int, k: int, sizes: tuple[int, int, int], device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """Weights that lie as [e, in, out], gate and up in turns, biases, the bounded activation."""
    e, f, d = sizes
    x, weights, ids, gate_up, down, _ = make(n, k, sizes, "", True, "random", device, dtype, generator)
    gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
    biases = (randn(shape, device, dtype, generator) for shape in ((e, 2 * f), (e, d)))
    return x, weights, ids, gate_up, down, "clamped_swiglu", *biases, True


def make_llama4(
    n: int, sizes: tuple[int, int, int], device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """One expert a token, whose weight multiplies what goes in."""
    return (*make(n, 1, sizes, "silu", True, "random", device, dtype, generator), None, None, False, True)


def make_packed(
    n: int, k: int, sizes: tuple[int, int, int], kind: str, options: dict[str, Any],
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    """Packed experts; no two scales alike. options: biases, clamped_swiglu, weigh_input."""
    e, f, d = sizes
    x, weights, ids, _, _, activation = make(n, k, sizes, "silu", True, "random", device, dtype, generator)
    packed = [
        packed_stack((e, rows, columns), kind, device, dtype, generator) for rows, columns in ((2 * f, d), (d, f))
    ]
    biases: tuple[Any, ...] = (None, None)
    if options.get("biases"):
        biases = tuple(randn(shape, device, dtype, generator) for shape in ((e, 2 * f), (e, d)))
    (gate_up, up_scale), (down, down_scale) = packed
    activation = options.get("activation", activation)
    more = (False, options.get("weigh_input", False), up_scale, down_scale)
    return x, weights, ids, gate_up, down, activation, *biases, *more


def packed_stack(
    shape: tuple[int, int, int], kind: str, device: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    e, rows, columns = shape
    both = [make_weight(LinearCase(1, rows, columns, weight=kind), device, dtype, generator) for _ in range(e)]
    return torch.stack([q for q, _ in both]), torch.stack([scale for _, scale in both if scale is not None])


CASES = [
    Case("mixtral/64 decode", partial(make, 1, 2, (8, 224, 64), "silu", False, "random"), 224),
    Case("mixtral/64 decode 6", partial(make, 6, 2, (8, 224, 64), "silu", False, "random"), 224),
    Case("qwen3-moe/32 decode 2", partial(make, 2, 8, (32, 24, 64), "silu", True, "random"), 64),
    Case("all tokens to one expert", partial(make, 70, 1, (2, 40, 72), "silu", True, "one"), 72),
    Case("gelu tanh, odd sizes", partial(make, 3, 2, (5, 33, 37), "gelu_tanh", True, "random"), 37),
    Case("every expert, gelu", partial(make, 3, 4, (4, 32, 64), "gelu", False, "random"), 64),
    Case("gpt-oss/40", partial(make_gpt_oss, 3, 4, (8, 72, 72)), 72),
    Case("llama-4/80", partial(make_llama4, 5, (16, 40, 64)), 64),
    Case("llama-4/80 decode", partial(make_llama4, 1, (16, 40, 64)), 64),
    Case("int8 decode", partial(make_packed, 1, 2, (4, 40, 72), "int8", {}), 72),
    Case("int4 decode 2, odd sizes", partial(make_packed, 2, 3, (5, 36, 200), "int4", {}), 200),
    Case("fp8, weighs what goes in", partial(make_packed, 3, 1, (4, 40, 64), "fp8", {"weigh_input": True}), 64),
    Case("int8 gpt-oss", partial(make_packed, 5, 2, (3, 40, 72), "int8", GPT_OSS), 72),
    Case("int4 gpt-oss", partial(make_packed, 3, 2, (3, 40, 136), "int4", GPT_OSS), 136),
]
