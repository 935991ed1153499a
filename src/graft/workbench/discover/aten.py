"""Kernels of ATen, each as a function of tensors and numbers that can be tried on a piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.workbench.discover.known import Known
from graft.workbench.discover.lookup import torch_file


def addmm(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return torch.addmm(added.reshape(-1, added.shape[-1]), rows, weight.t()).reshape(*x.shape[:-1], -1)


def addmm_bias(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return torch.addmm(bias, rows, weight.t()).reshape(*x.shape[:-1], -1)


def addmm_activation(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """What `_addmm_activation` computes; the op itself has no float64 on a CPU in every version."""
    return lambda x, weight, bias: activation(F.linear(x, weight, bias))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x, x.shape[-1:], weight, eps)


def plain_rms_norm(x: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x, x.shape[-1:], None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def plain_layer_norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], None, None, eps)


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def inverse_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=1 / scale)


def masked_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


UNARY = (
    *("silu", "gelu", "mish", "hardswish", "hardsigmoid", "softplus", "elu"),
    *("selu", "softsign", "tanhshrink", "logsigmoid", "relu6", "glu"),
)
# symbol, call, tensors, numbers, note
TABLE: tuple[tuple[str, Callable[..., Any], int, int, str], ...] = (
    *((name, getattr(F, name), 1, 0, "") for name in UNARY),
    ("gelu", gelu_tanh, 1, 0, 'approximate="tanh"'),
    ("softmax", lambda x: F.softmax(x, -1), 1, 0, ""),
    ("log_softmax", lambda x: F.log_softmax(x, -1), 1, 0, ""),
    ("logsumexp", lambda x: torch.logsumexp(x, -1, keepdim=True), 1, 0, ""),
    ("hardtanh", lambda x, high: F.hardtanh(x, -high, high), 1, 1, ""),
    ("leaky_relu", F.leaky_relu, 1, 1, ""),
    ("rms_norm", rms_norm, 2, 1, "it rounds elsewhere than most models do, except in float32"),
    ("rms_norm", plain_rms_norm, 1, 1, "it rounds elsewhere than most models do, except in float32"),
    ("native_layer_norm", layer_norm, 3, 1, ""),
    ("native_layer_norm", plain_layer_norm, 1, 1, ""),
    ("addcmul", torch.addcmul, 3, 0, "the product is not rounded before the sum"),
    ("addcmul", lambda x, a, b, c: torch.addcmul(x, a, b, value=c), 3, 1, "one rounding instead of three"),
    ("addcdiv", torch.addcdiv, 3, 0, "the quotient is not rounded before the sum"),
    ("add", lambda x, y, c: torch.add(x, y, alpha=c), 2, 1, "alpha; the product is not rounded before the sum"),
    ("lerp", torch.lerp, 3, 0, ""),
    ("addmm", addmm, 3, 0, "beta=1: the sum goes into the GEMM"),
    ("addmm", addmm_bias, 3, 0, "the bias goes into the GEMM"),
    ("_addmm_activation", addmm_activation(F.relu), 3, 0, "relu as the epilogue of the GEMM"),
    ("_addmm_activation", addmm_activation(gelu_tanh), 3, 0, "gelu by tanh as the epilogue of the GEMM"),
    ("scaled_dot_product_attention", sdpa, 3, 1, ""),
    ("scaled_dot_product_attention", inverse_sdpa, 3, 1, ""),
    ("scaled_dot_product_attention", F.scaled_dot_product_attention, 3, 0, ""),
    ("scaled_dot_product_attention", masked_sdpa, 4, 1, ""),
    ("scaled_dot_product_attention", F.scaled_dot_product_attention, 4, 0, ""),
)


@cache
def aten_kernels() -> tuple[Known, ...]:
    """Those that the installed torch has, with the header that declares them."""
    found = []
    for symbol, call, tensors, numbers, note in TABLE:
        file = torch_file(f"include/ATen/ops/{symbol}.h")
        if file is not None and hasattr(torch.ops.aten, symbol):
            heads = symbol == "scaled_dot_product_attention"
            found.append(Known("aten", f"aten::{symbol}", file, call, tensors, numbers, note, heads))
    return tuple(found)
