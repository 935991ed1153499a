"""Linear layers, alone or with what is fused into them, and gated activations: LinearArgs and ops/swiglu/native.h."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graft.backends.native.cpu import multiplies_halves
from graft.backends.native.plan import Planner, lowers
from graft.backends.native.program import NativeKernel, NotLowered, Pointer, Stride, Text, WeightPointer
from graft.ir.nodes import options_of, tensor_of
from graft.weights.native_tiles import CPP, HALVES
from graft.weights.tiles import kind_of

aten, ops = torch.ops.aten, torch.ops.graft
HEADER = "ops/fused_linear/native.h"


@lowers(aten.linear.default, ops.linear.default)
def lower_linear(plan: Planner, node: Node) -> None:
    x, weight, *bias = node.args
    lower_gemm(plan, node, x, weight, bias=bias[0] if bias else None)


@lowers(aten.addmm.default)
def lower_addmm(plan: Planner, node: Node) -> None:
    """GPT-2's layers: the weight is [k, n], and is transposed once."""
    bias, x, weight = node.args[:3]
    if node.kwargs or len(node.args) > 3:
        raise NotLowered("it has beta or alpha")
    lower_gemm(plan, node, x, weight, bias=bias, transposed=True)


@lowers(aten.mm.default)
def lower_mm(plan: Planner, node: Node) -> None:
    lower_gemm(plan, node, *node.args, transposed=True)


@lowers(ops.fused_linear.default)
def lower_fused_linear(plan: Planner, node: Node) -> None:
    """In float32 it does not matter where a graph rounds."""
    o = options_of(node)
    if o["center"]:
        raise NotLowered("its norm is a LayerNorm")
    unread = ("cast_last", "upcast", "fp8_from", "norm_bias", "center")
    lower_gemm(plan, node, **{name: o[name] for name in o if name not in unread})


def lower_gemm(
    plan: Planner, node: Node, x: Any, weight: Any, *, bias: Any = None, scale: Any = None, norm: Any = None,
    eps: float = 0.0, offset: float = 0.0, activation: str = "none", residual: Any = None, normed: bool = False,
    glu: bool = True, alpha: float = 1.0, transposed: bool = False,
) -> None:  # fmt: skip
    rows, out, gated = plan.flat(x), plan.new(node), activation != "none" and glu
    check_vector(bias, out.layout.width * (1 + gated))
    check_vector(norm, rows.layout.width)
    if scale is None:
        pointer, form = matrix(plan, weight, transposed, gated)
    else:
        pointer, form = tiles(plan, weight, rows.layout.width)
    sum_with = None if residual is None else plan.flat(residual)
    if sum_with is not None and sum_with.layout.width != out.layout.width:
        raise NotLowered("the residual is broadcast")
    sizes = f"<{form}>({plan.rows(rows.layout).text}, {rows.layout.width}"
    scratch, shared = f"linear_scratch{sizes}, true)", f"linear_shared{sizes})"
    told = ("glu", *(() if sum_with is None else ("alpha",)))
    kernel = NativeKernel(f"linear<{form}>", "LinearArgs", HEADER, scratch=scratch, shared=shared, told=told)
    plan.step(
        node, kernel, x=Pointer(rows), ldx=Stride(rows), tokens=plan.rows(rows.layout), k=rows.layout.width,
        n=out.layout.width, w=pointer,
        bias=plan.vector_or_null(bias), norm=plan.vector_or_null(norm), eps=eps, offset=float(offset), normed=normed,
        act=Text(f"Act::{activation}"), glu=glu, alpha=float(alpha),
        residual=Text("nullptr") if sum_with is None else Pointer(sum_with),
        ldr=0 if sum_with is None else Stride(sum_with), out=Pointer(out), ldo=Stride(out),
        shared=Text("call.shared"),
    )  # fmt: skip
    plan.bind(node, out)


def check_vector(vector: Any, size: int) -> None:
    """The kernel reads a value for each row of the weight, or each column; torch spreads fewer over all of them."""
    if vector is not None and tuple(tensor_of(vector).shape) != (size,):
        raise NotLowered(f"{vector} is {list(tensor_of(vector).shape)}, not {size} values")


def matrix(plan: Planner, weight: Any, transposed: bool, gated: bool) -> tuple[WeightPointer, str]:
    """Where the packed weight lies, and the C++ type that reads it."""
    if tensor_of(weight).dim() != 2:
        raise NotLowered("the weight is not a matrix")
    kind, form = float_form(tensor_of(weight).dtype)
    return plan.weight(weight, kind, gated=gated, transposed=transposed), form


def float_form(dtype: torch.dtype) -> tuple[str, str]:
    """How a float weight is packed, and the C++ type. Tiles of float16 keep a bfloat16's 8 bits (native_f16.h)."""
    if dtype is torch.bfloat16 and multiplies_halves():
        return "f16", HALVES
    kinds = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    if dtype not in kinds:
        raise NotLowered(f"the weight is {dtype}")
    return kinds[dtype], CPP[kinds[dtype]]


def tiles(plan: Planner, weight: Any, columns: int) -> tuple[WeightPointer, str]:
    """A weight that the graph holds as the kernel reads it: its own memory, no copy."""
    return plan.weight(weight, "as_is"), CPP[kind_of(int(tensor_of(weight).shape[1]), columns)]


@lowers(ops.swiglu.default)
def lower_swiglu(plan: Planner, node: Node) -> None:
    o = options_of(node)
    gate, up, out = plan.flat(o["gate"]), plan.flat(o["up"]), plan.new(node)
    if gate.layout != up.layout or gate.layout.heads > 1:
        raise NotLowered("gate and up differ in shape, or are in heads")
    plan.step(
        node, NativeKernel("swiglu", "SwigluArgs", "ops/swiglu/native.h"), gate=gate, up=up,
        act=Text(f"Act::{o['activation']}"), rows=plan.rows(out.layout), out=out,
    )  # fmt: skip
    plan.bind(node, out)
