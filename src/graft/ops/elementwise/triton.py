"""Launches generated Triton kernels, and the functions that their source calls.

The source is kept in `linecache` under a name of its own: Triton, tracebacks and debuggers read it there, and no
file is left behind or missing. `triton_source` in codegen.py shows it.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.ops.elementwise.codegen import Kinds, Pattern, triton_source
from graft.ops.elementwise.layout import loop_of
from graft.ops.elementwise.reference import kinds_of, returned_dtypes

BLOCK = 1024


@triton.jit
def tanh(x):
    # near 0 the quotient cancels, so the polynomial of Cephes takes over; both are good to 2 units in the last place
    z = x * x
    small = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    small = x + x * z * (small - 3.33332819422e-1)
    magnitude = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.abs(x)) + 1.0)
    large = tl.where(x < 0, -magnitude, magnitude)
    return tl.where(tl.abs(x) < 0.625, small, large)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + tanh(inner))


@triton.jit
def softplus(x):
    # log1p(e^x) as log(u) · e^x / (u - 1) with u = 1 + e^x, which takes back the rounding of u
    e = tl.exp(x)
    u = 1.0 + e
    tail = tl.where(u == 1.0, e, tl.log(u) * tl.div_rn(e, tl.where(u == 1.0, u, u - 1.0)))
    return tl.where(x > 20.0, x, tail)


@triton.jit
def minimum(a, b):
    return tl.where((a < b) | (a != a), a, b)  # a NaN on either side stays


@triton.jit
def maximum(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def clamp(x, low, high):
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


HELPERS = (tanh, sigmoid, silu, gelu, gelu_tanh, softplus, minimum, maximum, clamp)


@lru_cache(maxsize=1024)
def compiled(program: str, kinds: Kinds, pattern: Pattern) -> triton.JITFunction:
    source = triton_source(program, kinds, pattern)
    name = f"<graft elementwise {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = {"__name__": __name__, "triton": triton, "tl": tl, **{helper.__name__: helper for helper in HELPERS}}
    exec(compile(source, name, "exec"), scope)
    return scope["elementwise_kernel"]


def elementwise_triton(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    loop = loop_of(inputs)
    outputs = [torch.empty(loop.shape, dtype=d, device=inputs[0].device) for d in returned_dtypes(program, inputs)]
    count = loop.shape.numel()
    if count == 0:
        return outputs
    kernel = compiled(program, kinds_of(inputs), loop.pattern)
    strides = [stride for walk in loop.strides for stride in walk if stride != 0]
    # without fused multiply-add: eager rounds the product before the sum
    kernel[(triton.cdiv(count, BLOCK),)](
        *inputs, *outputs, count, *loop.sizes[1:], *strides,
        WIDE=loop.reach >= 2**31 - BLOCK, BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return outputs
