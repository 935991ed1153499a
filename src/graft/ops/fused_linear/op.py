"""graft::fused_linear: a linear layer with the norm before it and the activation or residual sum after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.errors import KernelUnavailable
from graft.ops.fused_linear.kinds import MOST_MATVEC_TOKENS, Narrow, Shape, how_problem
from graft.ops.fused_linear.packing import PACKED
from graft.ops.fused_linear.reference import fused_linear, rounds
from graft.ops.spec import Kernel, OpSpec, define, needs_triton

MOST_REST = 11  # arguments behind the weight, of which the last says from how many tokens on x is rounded
QUANTIZED = (torch.int8, torch.float8_e4m3fn, PACKED)


def fake(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, offset: float = 0.0, cast_last: bool = False, activation: str = "none", upcast: bool = False,
    residual: Tensor | None = None, normed: bool = False, fp8_from: int = 0,
) -> Tensor:  # fmt: skip
    n = weight.shape[0] if scale is None else scale.shape[0]
    return x.new_empty((*x.shape[:-1], n if activation == "none" else n // 2))


def gpu_problem(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, offset: float = 0.0, cast_last: bool = False, activation: str = "none", upcast: bool = False,
    residual: Tensor | None = None, normed: bool = False, fp8_from: int = 0,
) -> str | None:  # fmt: skip
    """Why no kernel of ours can run a call, or None."""
    kinds = {t.dtype for t in (x, bias, norm, residual) if t is not None}
    if len(kinds) > 1 or x.dtype is torch.float64:
        return f"dtypes differ or are float64: {', '.join(sorted(map(str, kinds)))}"
    if weight.dtype not in ((x.dtype,) if scale is None else QUANTIZED):
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if not weight.is_contiguous():
        return "the weight does not lie row by row"
    if residual is not None and residual.dim() != x.dim():
        return "the residual is broadcast"
    return needs_triton(x, weight, bias, scale, norm, residual)


def exact_problem(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    """For kernels that multiply with x as it is."""
    if len(rest) == MOST_REST and rounds(x, rest[-1]):
        return f"rows of x are to be rounded to float8 from {rest[-1]} tokens on"
    return gpu_problem(x, weight, *rest)


def scaled_problem(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    problem = gpu_problem(x, weight, *rest)
    if problem is not None:
        return problem
    if len(rest) < MOST_REST or not rounds(x, rest[-1]):
        return "rows of x are not to be rounded to float8"
    return None if weight.dtype is torch.float8_e4m3fn else f"it multiplies with float8 weights, not {weight.dtype}"


def matvec_problem(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    problem = exact_problem(x, weight, *rest)
    if problem is not None:
        return problem
    tokens, k = x.numel() // x.shape[-1], x.shape[-1]
    if tokens > MOST_MATVEC_TOKENS or (k % 8 and weight.dtype not in QUANTIZED):
        return f"{tokens} tokens of {k} values: it takes up to {MOST_MATVEC_TOKENS}, of a multiple of 8"
    return None


def narrow_call_problem(x: Tensor, weight: Tensor, *rest: Any) -> str | None:
    problem = exact_problem(x, weight, *rest)
    if problem is not None:
        return problem
    if weight.dtype is not PACKED or x.dtype is not torch.bfloat16:
        return f"it multiplies bfloat16 with 4-bit weights, not {x.dtype} with {weight.dtype}"
    tokens, k = x.numel() // x.shape[-1], x.shape[-1]
    return how_problem(Narrow(), Shape(weight.shape[0], k, "int4", gated=False, norm=False), tokens)


def run_tuned(*args: Any) -> Tensor:
    from graft.ops.fused_linear.triton import fused_linear_triton

    return fused_linear_triton(*args)


def run_matvec(*args: Any) -> Tensor:
    from graft.ops.fused_linear.triton import Matvec, launch_matvec, with_rows

    return with_rows(lambda call: launch_matvec(call, Matvec(2, 4)), *args)


def run_narrow(*args: Any) -> Tensor:
    from graft.ops.fused_linear.triton import Call, launch_narrow, narrow_fits, with_rows

    def run(call: Call) -> Tensor:
        if not narrow_fits(call, Narrow()):
            raise KernelUnavailable(
                "kernel 'narrow' of graft::fused_linear cannot run this call: it reads 16 bytes at a time, which x,"
                " weight, scale and norm must be aligned for, and takes no norm's weight of 1 + w; name 'tuned'"
            )
        return launch_narrow(call, Narrow())

    return with_rows(run, *args)


def run_gemm(*args: Any) -> Tensor:
    from graft.ops.fused_linear.triton import default_gemm, launch_gemm, with_rows

    return with_rows(lambda call: launch_gemm(call, default_gemm(call)), *args)


def run_library(*args: Any) -> Tensor:
    from graft.ops.fused_linear.triton import library, with_rows

    return with_rows(library, *args)


def run_scaled(*args: Any) -> Tensor:
    from graft.ops.fused_linear.scaled import launch_scaled
    from graft.ops.fused_linear.triton import with_rows

    return with_rows(launch_scaled, *args)


define(
    OpSpec(
        name="fused_linear",
        schema="(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None, Tensor? norm=None, float eps=0.0,"
        ' float offset=0.0, bool cast_last=False, str activation="none", bool upcast=False, Tensor? residual=None,'
        " bool normed=False, int fp8_from=0) -> Tensor",
        reference=fused_linear,
        fake=fake,
        kernels=(
            Kernel("tuned", "triton", run_tuned, gpu_problem),  # one of the next, as measured: see choice.py
            Kernel("matvec", "triton", run_matvec, matvec_problem),
            Kernel("narrow", "triton", run_narrow, narrow_call_problem),
            Kernel("gemm", "triton", run_gemm, exact_problem),
            Kernel("library", "existing_kernel", run_library, exact_problem),
            Kernel("scaled_mm", "existing_kernel", run_scaled, scaled_problem),
        ),
    )
)
