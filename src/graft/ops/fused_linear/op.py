"""graft::fused_linear: a linear layer with the norm before it and the activation or residual sum after it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.fused_linear.choice import picks
from graft.ops.fused_linear.kinds import (
    MOST_INT4_GEMM_TOKENS,
    MOST_MATVEC_TOKENS,
    BalancedGemm,
    Gemm,
    Int4Gemm,
    IntegerGemm,
    LinearShape,
    Matvec,
    how_problem,
)
from graft.ops.fused_linear.reference import fused_linear, rounds
from graft.ops.launch import gluon_missing
from graft.ops.spec import Kernel, OpSpec, Pick, define, native, needs_triton, vector_problem
from graft.weights.packing import PACKED
from graft.weights.tiles import tiles_problem

QUANTIZED = (torch.int8, torch.float8_e4m3fn, PACKED)
NOT_ROUNDED = "rows of x are not to be rounded to float8"
SCALED = Pick("scaled_mm")
MATVEC, INT4_GEMM, BALANCED_GEMM = Matvec(2, 4), Int4Gemm(), BalancedGemm()  # their sizes where they are named


def fake(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, offset: float = 0.0, cast_last: bool = False, activation: str = "none", upcast: bool = False,
    residual: Tensor | None = None, normed: bool = False, fp8_from: int = 0, glu: bool = True, alpha: float = 1.0,
    norm_bias: Tensor | None = None, center: bool = False,
) -> Tensor:  # fmt: skip
    n = weight.shape[0] if scale is None else scale.shape[0]
    return x.new_empty((*x.shape[:-1], n // 2 if activation != "none" and glu else n))


def gpu_problem(call: Call) -> str | None:
    """Why no kernel of ours can run such calls, or None."""
    x, weight, residual = call.x, call.weight, call.residual
    problem = needs_triton(x, weight, call.bias, call.scale, call.norm, call.norm_bias, residual)
    if problem is not None:
        return problem
    kinds = {t.dtype for t in (x, call.bias, call.norm, call.norm_bias, residual) if t is not None}
    if len(kinds) > 1 or x.dtype is torch.float64:
        return f"dtypes differ or are float64: {', '.join(sorted(map(str, kinds)))}"
    if weight.dtype not in ((x.dtype,) if call.scale is None else QUANTIZED):
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if not weight.is_contiguous():
        return "the weight does not lie row by row"
    rows = weight.shape[0] if call.scale is None else call.scale.shape[0]
    if not x.shape[-1] or not rows:
        return "there is nothing to multiply"
    problem = vector_problem(rows, call.bias) or vector_problem(x.shape[-1], call.norm, call.norm_bias)
    if problem is not None:
        return problem
    if residual is not None and residual.shape[:-1] != x.shape[:-1]:
        return "the residual is broadcast"
    return None


def exact_problem(call: Call) -> str | None:
    """For kernels that multiply with x as it is."""
    if call.fp8_from and rounds(call.x, call.fp8_from):
        return f"rows of x are to be rounded to float8 from {call.fp8_from} tokens on"
    return None


def scaled_problem(call: Call) -> str | None:
    problem = gpu_problem(call)
    if problem is not None:
        return problem
    if not call.fp8_from:
        return NOT_ROUNDED
    if call.weight.dtype is not torch.float8_e4m3fn:
        return f"it multiplies with float8 weights, not {call.weight.dtype}"
    return None


def scaled_call_problem(call: Call) -> str | None:
    return None if rounds(call.x, call.fp8_from) else NOT_ROUNDED


def matvec_problem(call: Call) -> str | None:
    k = call.x.shape[-1]
    if k % 8 and call.scale is None:
        return f"rows of {k} values: it takes a multiple of 8"
    return gpu_problem(call)


def matvec_call_problem(call: Call) -> str | None:
    tokens = tokens_of(call)
    if tokens > MOST_MATVEC_TOKENS:
        return f"{tokens} tokens: it takes up to {MOST_MATVEC_TOKENS}"
    return exact_problem(call)


def int4_gemm_problem(call: Call) -> str | None:
    x, weight = call.x, call.weight
    if weight.dtype is not PACKED or x.dtype is not torch.bfloat16:
        return f"it multiplies bfloat16 with 4-bit weights, not {x.dtype} with {weight.dtype}"
    if call.offset and call.cast_last:
        return "it takes no norm's weight of 1 + w"
    shape = LinearShape(weight.shape[0], x.shape[-1], "int4", gated=False, norm=False)
    return how_problem(Int4Gemm(), shape, 1) or gpu_problem(call)


def int4_gemm_call_problem(call: Call) -> str | None:
    tokens, x = tokens_of(call), call.x
    if tokens > MOST_INT4_GEMM_TOKENS:
        return f"{tokens} tokens: it takes up to {MOST_INT4_GEMM_TOKENS}"
    rows = x.stride(-1) != 1 or (x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1]))
    others = (t for t in (call.weight, call.scale, call.norm) if t is not None)
    if not rows or not all(t.data_ptr() % 16 == 0 and t.stride(-1) == 1 for t in others):
        return "it reads 16 bytes at a time, which x, weight, scale and norm must be aligned for"
    return exact_problem(call)


def integer_gemm_problem(call: Call) -> str | None:
    if call.weight.dtype not in (torch.int8, PACKED):
        return f"it multiplies with int8 and int4 weights, not {call.weight.dtype}"
    if call.x.dtype not in (torch.bfloat16, torch.float16):
        return f"of x it keeps 15 bits, and {call.x.dtype} has more"
    return gpu_problem(call)


def mixed_gemm_problem(call: Call) -> str | None:
    x, weight = call.x, call.weight
    if weight.dtype not in (torch.int8, PACKED) or x.dtype is not torch.bfloat16:
        return f"it multiplies bfloat16 with int8 and int4 weights, not {x.dtype} with {weight.dtype}"
    if weight.shape[0] % 8 or x.shape[-1] % 8:
        return f"its copies are of 8 values, of which {weight.shape[0]} rows of {x.shape[-1]} values are no multiple"
    return gluon_missing(x.device) or gpu_problem(call)


def mixed_gemm_call_problem(call: Call) -> str | None:
    x, residual = call.x, call.residual
    if not tokens_of(call):
        return "there are no tokens"
    rows = x.stride(-1) != 1 or (x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1]))
    others = (t for t in (call.weight, residual) if t is not None)
    if not rows or any(t.data_ptr() % 16 for t in others):
        return "it copies 16 bytes at a time, which x, weight and residual must be aligned for"
    return exact_problem(call)


def balanced_gemm_problem(call: Call) -> str | None:
    return gpu_problem(call) if call.scale is None else "it takes plain weights"


def native_problem(call: Call) -> str | None:
    if call.fp8_from:
        return "rows of x are rounded to float8"
    if call.center:
        return "its norm is a LayerNorm"
    return None if call.scale is None else tiles_problem(call.weight)


def tokens_of(call: Call) -> int:
    return call.x.shape[:-1].numel()


def measured(call: Call) -> Iterable[Pick]:
    """The kernel that was fastest for the call's shape and tokens, and where it does not fit the tensor-core kernel
    with sizes that fit every call. Rows that are rounded to float8 have one kernel, and nothing to look up."""
    if call.fp8_from and rounds(call.x, call.fp8_from):
        return (SCALED,)
    x, weight, norm = call.x, call.weight, call.normed or call.norm is not None
    rows, k = weight.shape[0], x.shape[-1]
    if not rows or not k:
        return ()
    gated = call.activation != "none" and call.glu
    return picks(rows, k, weight.dtype, gated, norm, x.shape[:-1].numel(), x.device)


@cache
def launches() -> Any:
    """The module that launches the kernels, which needs Triton. Asked at every call, where an import is slower."""
    return importlib.import_module("graft.ops.fused_linear.triton")


def run_matvec(*args: Any, how: Matvec = MATVEC) -> Tensor:
    ours = launches()
    return ours.with_rows(lambda call: ours.launch_matvec(call, how), *args)


def run_int4_gemm(*args: Any, how: Int4Gemm = INT4_GEMM) -> Tensor:
    ours = launches()
    return ours.with_rows(lambda call: ours.launch_int4_gemm(call, how), *args)


def run_integer_gemm(*args: Any, how: IntegerGemm | None = None) -> Tensor:
    ours = launches()
    return ours.with_rows(lambda call: ours.launch_integer_gemm(call, how or ours.default_integer_gemm(call)), *args)


def run_mixed_gemm(*args: Any) -> Tensor:
    return launches().with_rows(launches().launch_mixed_gemm, *args)


def run_balanced_gemm(*args: Any, how: BalancedGemm = BALANCED_GEMM) -> Tensor:
    ours = launches()
    return ours.with_rows(lambda call: ours.launch_balanced_gemm(call, how), *args)


def run_gemm(*args: Any, how: Gemm | None = None) -> Tensor:
    ours = launches()
    return ours.with_rows(lambda call: ours.launch_gemm(call, how or ours.default_gemm(call)), *args)


def run_library(*args: Any) -> Tensor:
    return launches().with_rows(launches().library, *args)


def run_scaled(*args: Any) -> Tensor:
    from graft.ops.fused_linear.scaled import launch_scaled

    return launches().with_rows(launch_scaled, *args)


define(
    OpSpec(
        name="fused_linear",
        schema="(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None, Tensor? norm=None, float eps=0.0,"
        ' float offset=0.0, bool cast_last=False, str activation="none", bool upcast=False, Tensor? residual=None,'
        " bool normed=False, int fp8_from=0, bool glu=True, float alpha=1.0,"
        " Tensor? norm_bias=None, bool center=False) -> Tensor",
        reference=fused_linear,
        fake=fake,
        kernels=(
            Kernel("scaled_mm", "existing", scaled_problem, run_scaled, varies=scaled_call_problem),
            Kernel("matvec", "triton", matvec_problem, run_matvec, varies=matvec_call_problem),
            Kernel("int4_gemm", "triton", int4_gemm_problem, run_int4_gemm, varies=int4_gemm_call_problem),
            Kernel("mixed_gemm", "triton", mixed_gemm_problem, run_mixed_gemm, varies=mixed_gemm_call_problem),
            Kernel("integer_gemm", "triton", integer_gemm_problem, run_integer_gemm, varies=exact_problem),
            Kernel("balanced_gemm", "triton", balanced_gemm_problem, run_balanced_gemm, varies=exact_problem),
            Kernel("gemm", "triton", gpu_problem, run_gemm, varies=exact_problem),
            Kernel("library", "existing", gpu_problem, run_library, varies=exact_problem),
            native(native_problem),
        ),
        measured=measured,
    )
)
