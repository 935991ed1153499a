"""Launches of fused_linear's kernels, each with the sizes it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from graft.ops.fused_linear.balanced_gemm import balanced_gemm_kernel
from graft.ops.fused_linear.choice import FORMATS, Gemm, How, LinearShape, Matvec, shape_of
from graft.ops.fused_linear.dequantize import dequantize_triton
from graft.ops.fused_linear.gemm import gemm_kernel
from graft.ops.fused_linear.int4_gemm import int4_gemm_kernel
from graft.ops.fused_linear.integer_gemm import integer_gemm_kernel
from graft.ops.fused_linear.kinds import INTEGERS, MIXED, WIDENED_FROM, BalancedGemm, Int4Gemm, IntegerGemm
from graft.ops.fused_linear.matvec import matvec_kernel
from graft.ops.fused_linear.round_rows import round_rows
from graft.ops.fused_linear.widen import PARTS, TOO_MUCH
from graft.ops.launch import counters, dense_rows, gluon_missing, pdl_supported, processors
from graft.ops.layer_norm.triton import layer_norm_triton
from graft.ops.rms_norm.triton import rms_norm_triton
from graft.ops.swiglu.reference import ACTIVATIONS
from graft.ops.swiglu.triton import swiglu_triton
from graft.weights.packing import GROUP, PACKED


class LinearCall(NamedTuple):
    """The op's arguments, with the tokens as rows: x [tokens, k]. One is made at every call: a tuple costs least."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    cast_last: bool = False
    activation: str = "none"
    upcast: bool = False
    residual: Tensor | None = None
    normed: bool = False
    fp8_from: int = 0
    glu: bool = True
    alpha: float = 1.0
    norm_bias: Tensor | None = None
    center: bool = False

    @property
    def divided(self) -> bool:
        """Whether x is normed: a LayerNorm may have no weight."""
        return self.normed or self.norm is not None or self.center

    @property
    def gated(self) -> bool:
        return self.activation != "none" and self.glu

    @property
    def kind(self) -> str:
        """Of the weight: plain, int8, fp8 or int4."""
        return FORMATS.get(self.weight.dtype, "plain")

    @property
    def by_row(self) -> bool:
        """Whether a row of the weight has a scale; groups of 4-bit weights have their own."""
        return self.kind in ("int8", "fp8")

    @property
    def rows(self) -> int:
        """Of the result: with a gate, half the weight's."""
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]

    @property
    def shape(self) -> LinearShape:
        return shape_of(self.weight.shape[0], self.x.shape[1], self.weight.dtype, self.gated, self.divided)

    @property
    def shift(self) -> float:
        """What is added to the norm's weight (Gemma)."""
        return self.offset if self.cast_last else 0.0


def with_rows(run: Callable[[LinearCall], Tensor], x: Tensor, *rest: Any) -> Tensor:
    """Runs with all but the last dim of x and the residual as one."""
    call = LinearCall(dense_rows(x), *rest)
    if call.residual is not None:
        call = call._replace(residual=call.residual.reshape(-1, call.rows).contiguous())
    return run(call).view(*x.shape[:-1], call.rows)


def run_as(call: LinearCall, how: How) -> Tensor:
    """With one kernel and its sizes, which fit the call: for measurements."""
    if isinstance(how, Matvec):
        return launch_matvec(call, how)
    if isinstance(how, Int4Gemm):
        return launch_int4_gemm(call, how)
    if isinstance(how, BalancedGemm):
        return launch_balanced_gemm(call, how)
    if isinstance(how, IntegerGemm):
        return launch_integer_gemm(call, how)
    if how is None and call.scale is None:
        return library(call)
    if how is None and is_mixed(call):
        return launch_mixed_gemm(call)
    if how is None and call.x.shape[0] >= WIDENED_FROM.get(call.kind, call.x.shape[0] + 1):
        return library(call)
    if how is None and call.kind in INTEGERS:
        return launch_integer_gemm(call, default_integer_gemm(call))
    return launch_gemm(call, how or default_gemm(call))


def is_mixed(call: LinearCall) -> bool:
    """Whether a graph would have mixed_gemm for a call of this size, for which nothing was measured."""
    (tokens, k), rows = call.x.shape, call.weight.shape[0]
    fits = call.x.dtype is torch.bfloat16 and not k % 8 and not rows % 8
    return fits and tokens in MIXED.get(call.kind, ()) and gluon_missing(call.x.device) is None


MOST_EARLY = 16  # tiles of a row that a program holds in registers, 4 each


def launch_matvec(call: LinearCall, how: Matvec) -> Tensor:
    call = call if call.kind == "plain" else uncentred(call)
    tokens, k = call.x.shape
    n = call.rows
    out = room(call.x.device, call.x.dtype, tokens, n)
    pdl = pdl_supported(call.x.device)
    weight, fast = words_of(call.weight), call.x.is_cuda and call.x.element_size() == 2
    width, tile = weight.shape[1], 256 * how.warps  # 8 numbers or words a thread
    steps = triton.cdiv(width, tile)
    matvec_kernel[(triton.cdiv(n, how.rows),)](
        call.x, weight, or_x(call, call.bias), or_x(call, call.scale), or_x(call, call.norm),
        or_x(call, call.norm_bias), or_x(call, call.residual), out, n, k, width // 8, -(-k // GROUP),
        call.x.stride(0), call.eps, call.shift, call.alpha, TOKENS=tokens, BN=how.rows, BK=tile, STEPS=steps,
        EARLY=max(1, min(steps, MOST_EARLY // (how.rows * (1 + call.gated)))),
        EVEN=width % tile == 0 and width * PARTS[call.kind] == k, KIND=call.kind, PARTS=PARTS[call.kind], FAST=fast,
        TOO_MUCH=TOO_MUCH.get(call.kind, 0.0) if fast else 0.0,
        BIAS=call.bias is not None, SCALE=call.by_row, NORM=call.divided, WEIGHTED=call.norm is not None,
        CENTER=call.center, SHIFTED=call.norm_bias is not None, OFFSET=call.shift != 0,
        ACTIVATION=call.activation, GATED=call.gated, RESIDUAL=call.residual is not None, PDL=pdl,
        num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def launch_int4_gemm(call: LinearCall, how: Int4Gemm) -> Tensor:
    call = uncentred(call)
    assert call.scale is not None
    tokens, k = call.x.shape
    out = room(call.x.device, call.x.dtype, tokens, call.rows)
    pdl = pdl_supported(call.x.device)
    x, weight, scale = (t.view(torch.int32) for t in (call.x, call.weight, call.scale))
    warps = min(how.warps, max(8 // how.ahead, triton.next_power_of_2(-(-k // (128 * how.ahead)))))  # no idle ones
    step = 16 * warps * how.ahead  # words of a row
    blocks = triton.cdiv(call.rows, 8 if call.gated else 16)
    programs = min(blocks, how.each * processors(call.x.device)) if how.each else blocks
    int4_gemm_kernel[(programs,)](
        x, weight, or_x(call, call.bias), scale, x if call.norm is None else call.norm.view(torch.int32),
        or_x(call, call.residual), out, call.rows, k, weight.shape[1] // 4, -(-k // GROUP), tokens,
        triton.cdiv(weight.shape[1], step), blocks, call.x.stride(0), call.eps, call.alpha,
        ONE=tokens == 1, WARPS=warps, AHEAD=how.ahead, WALKS=how.each > 0, EVEN=weight.shape[1] % step == 0,
        BIAS=call.bias is not None, NORM=call.divided, WEIGHTED=call.norm is not None, ACTIVATION=call.activation,
        GATED=call.gated, RESIDUAL=call.residual is not None, FAST=call.x.is_cuda, PDL=pdl,
        num_warps=warps, launch_pdl=pdl, **({"maxnreg": how.registers} if how.registers else {}),
    )  # fmt: skip
    return out


def launch_gemm(call: LinearCall, how: Gemm) -> Tensor:
    # in float16 a row times the norm's weight may be beyond 65,504 before it is divided by its root mean square
    if call.divided and (call.center or not how.norm_inside or call.x.dtype is torch.float16):
        call = without_norm(call)
    how = fitting(call, how)
    tokens, k = call.x.shape
    n, weight = call.rows, words_of(call.weight)
    out = room(call.x.device, call.x.dtype, tokens, n)
    pdl = pdl_supported(call.x.device)
    blocks, groups = triton.cdiv(n, how.rows), triton.cdiv(tokens, how.tokens)
    parts, arrived = workspace(call.x.device, how, blocks * groups, call.gated)
    gemm_kernel[(blocks, how.splits, groups)](
        call.x, weight, or_x(call, call.bias), or_x(call, call.scale), or_x(call, call.norm),
        or_x(call, call.residual), out, parts, arrived,
        n, k, weight.shape[1], -(-k // GROUP), tokens, call.x.stride(0), call.eps, call.shift, call.alpha,
        BN=how.rows, BM=how.tokens, BK=GROUP if call.kind == "int4" else how.depth // PARTS[call.kind],
        SPLITS=how.splits, EARLY=how.early, KIND=call.kind, PARTS=PARTS[call.kind],
        FAST=call.x.dtype is torch.bfloat16 and call.x.is_cuda,
        BIAS=call.bias is not None, SCALE=call.by_row, NORM=call.divided, WEIGHTED=call.norm is not None,
        ACTIVATION=call.activation, GATED=call.gated, RESIDUAL=call.residual is not None, PDL=pdl,
        num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def launch_integer_gemm(call: LinearCall, how: IntegerGemm) -> Tensor:
    call = uncentred(call)
    assert call.scale is not None
    int4 = call.kind == "int4"
    tokens, width, n = call.x.shape[0], call.weight.shape[1], call.rows
    q, steps = round_rows(call, width * PARTS["int4"] if int4 else width)
    out = room(call.x.device, call.x.dtype, tokens, n)
    pdl = pdl_supported(call.x.device)
    depth = GROUP if int4 else how.depth
    blocks, groups = triton.cdiv(n, how.rows), triton.cdiv(tokens, how.tokens)
    parts, arrived = workspace(call.x.device, how, blocks * groups, call.gated)
    integer_gemm_kernel[(blocks * groups, how.splits)](
        q, steps, call.weight, or_x(call, call.bias), call.scale, or_x(call, call.residual), out, parts, arrived,
        n, width, tokens, triton.cdiv(width, depth), call.scale.shape[-1] if int4 else 0, groups, call.alpha,
        BN=how.rows, BM=how.tokens, BK=depth, SPLITS=how.splits, EARLY=how.early if fetchable(call) else 0,
        EVEN=width % depth == 0, KIND=call.kind, FAST=call.x.is_cuda, BIAS=call.bias is not None,
        ACTIVATION=call.activation, GATED=call.gated, RESIDUAL=call.residual is not None, PDL=pdl,
        num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def launch_mixed_gemm(call: LinearCall) -> Tensor:
    from graft.ops.fused_linear.mixed_gemm import mixed_gemm

    call = without_norm(call) if call.divided else call
    if call.activation == "none":
        return mixed_gemm(call)
    return finished(call, mixed_gemm(call._replace(residual=None)))


def launch_balanced_gemm(call: LinearCall, how: BalancedGemm) -> Tensor:
    call = without_norm(call) if call.divided else call
    if call.x.dtype is torch.float32:  # half as much fits into shared memory
        how = replace(how, depth=min(how.depth, 32), stages=2)
    tokens, k = call.x.shape
    n = call.rows
    out = room(call.x.device, call.x.dtype, tokens, n)
    pdl = pdl_supported(call.x.device)
    blocks, groups = triton.cdiv(n, how.rows), triton.cdiv(tokens, how.tokens)
    parts, arrived = workspace(call.x.device, how, blocks * groups, call.gated)
    balanced_gemm_kernel[(blocks, how.splits, groups)](
        call.x, call.weight, or_x(call, call.bias), or_x(call, call.residual), out, parts, arrived,
        n, k, tokens, call.x.stride(0), call.alpha,
        BN=how.rows, BM=how.tokens, BK=how.depth, SPLITS=how.splits, EARLY=how.early if fetchable(call) else 0,
        BIAS=call.bias is not None, ACTIVATION=call.activation, GATED=call.gated,
        RESIDUAL=call.residual is not None, PDL=pdl,
        num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def default_gemm(call: LinearCall) -> Gemm:
    """Sizes that fit every call; the tables have better ones."""
    tokens = call.x.shape[0]
    if call.kind == "int4":  # a span of 512 values of x is in shared memory for each stage
        rows, block = 64 if call.gated else 128, min(padded_tokens(tokens), 64)
        return Gemm(rows=rows, tokens=block, warps=8, stages=2)
    if tokens <= 128:
        return Gemm(tokens=padded_tokens(tokens), stages=2)
    return Gemm(rows=64 if call.gated else 128, tokens=128, depth=64, warps=8, stages=3)


def default_integer_gemm(call: LinearCall) -> IntegerGemm:
    """Sizes that fit every call. On an H200 and 8B shapes of int8 they are within a tenth of the best from 2 to 1,024
    tokens; fewer than 192 programs share the depth. Few sizes: each is a kernel to compile."""
    tokens = min(max(16, padded_tokens(call.x.shape[0])), 64)
    programs = triton.cdiv(call.rows, 64) * triton.cdiv(call.x.shape[0], tokens)
    splits = next((splits for splits in (1, 2) if programs * splits >= 192), 4)
    if call.kind != "int4":
        return IntegerGemm(64, tokens, 256 if tokens == 16 and not call.gated else 128, splits, stages=4)
    if call.x.shape[0] > 128:
        return IntegerGemm(64 if call.gated else 128, 64, warps=8, stages=2)
    return IntegerGemm(64, min(tokens, 32), splits=splits, stages=2)  # a stage has four tiles of tokens: two fit


def fitting(call: LinearCall, how: Gemm) -> Gemm:
    """As it was measured for bfloat16. Of 32 bits half as much fits into shared memory; early fetches want rows that
    begin at a multiple of 16 bytes."""
    if call.x.dtype is torch.float32:
        most = 16 if call.kind == "int4" else 32
        how = replace(how, tokens=min(how.tokens, most), rows=min(how.rows, 64), depth=min(how.depth, 64), stages=2)
    return how if fetchable(call) else replace(how, early=0)


def fetchable(call: LinearCall) -> bool:
    """Whether every row of the weight begins at a multiple of 16 bytes."""
    return call.weight.shape[1] * call.weight.element_size() % 16 == 0 and call.weight.data_ptr() % 16 == 0


def library(call: LinearCall) -> Tensor:
    """torch's own GEMM; the norm, the activation and what quantized weights stand for have kernels of their own."""
    call = without_norm(call) if call.divided else call
    weight = call.weight
    if call.scale is not None:
        weight = dequantize_triton(words_of(weight), call.scale, call.kind, call.x.shape[1], call.x.dtype)
    if call.residual is not None and call.bias is None and call.activation == "none":
        return torch.addmm(call.residual, call.x, weight.t(), alpha=call.alpha)
    return finished(call, F.linear(call.x, weight, call.bias))


def finished(call: LinearCall, y: Tensor) -> Tensor:
    """The product with its bias, activated; and the residual, in kernels of their own."""
    if call.gated:
        gate, up = y.chunk(2, dim=-1)
        y = swiglu_triton(gate, up, call.activation, call.upcast)
    elif call.activation != "none":
        y = ACTIVATIONS[call.activation](y)
    return y if call.residual is None else torch.add(call.residual, y, alpha=call.alpha)


def without_norm(call: LinearCall) -> LinearCall:
    """The call on rows that are normed already."""
    if call.center:
        return uncentred(call)
    k, dtype, device = call.x.shape[1], call.x.dtype, call.x.device
    norm = ones(k, dtype, device) if call.norm is None else call.norm
    x = rms_norm_triton(call.x, norm, call.eps, call.offset, call.cast_last)
    return call._replace(x=x, norm=None, eps=0.0, offset=0.0, cast_last=False, normed=False)


def uncentred(call: LinearCall) -> LinearCall:
    """A LayerNorm is in matvec alone, of plain weights: the others get rows that are normed already."""
    if not call.center:
        return call
    x = layer_norm_triton(call.x, call.norm, call.norm_bias, call.eps)
    return call._replace(x=x, norm=None, norm_bias=None, eps=0.0, center=False)


@cache
def ones(k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weight of a norm that has none left; a few kilobytes for each width of a model. A parameter, since nothing
    writes it: what reads it may start early."""
    return torch.nn.Parameter(torch.ones(k, dtype=dtype, device=device), requires_grad=False)


def or_x(call: LinearCall, tensor: Tensor | None) -> Tensor:
    """A kernel does not read what is absent, but takes a tensor."""
    return call.x if tensor is None else tensor


def workspace(
    device: torch.device, how: Gemm | BalancedGemm | IntegerGemm, blocks: int, gated: bool
) -> tuple[Tensor, Tensor]:
    """Memory for the parts of a split-k GEMM, and a counter for each block of it; unread where there is one part."""
    size = (1 + gated) * how.rows * how.tokens + how.tokens
    parts = room(device, torch.float32, blocks * how.splits * size if how.splits > 1 else 1)
    return parts, counters(blocks if how.splits > 1 else 1, device)


def room(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    """Memory for results, with anything in it."""
    return torch.empty(size, dtype=dtype, device=device)


def padded_tokens(tokens: int) -> int:
    """The block of tokens of a GEMM on tensor cores."""
    return min(max(8, triton.next_power_of_2(tokens)), 128)


def words_of(weight: Tensor) -> Tensor:
    """Quantized weights as 16-bit words, others as they are."""
    return weight.view(PACKED) if weight.element_size() == 1 else weight
