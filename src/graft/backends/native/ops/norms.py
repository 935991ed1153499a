"""RMSNorm, the same with the residual sum, and LayerNorm: ops/rms_norm, add_rms_norm and layer_norm/native.h."""

from __future__ import annotations

import torch
from torch.fx import Node

from graft.backends.native.plan import Planner, lowers
from graft.backends.native.program import NativeKernel, NotLowered, Text
from graft.ir.nodes import options_of

ops, aten = torch.ops.graft, torch.ops.aten


@lowers(ops.rms_norm.default)
def lower_rms_norm(plan: Planner, node: Node) -> None:
    """`dtype` and `cast_last` say where the graph rounds; rows are float32 here, and nothing does."""
    o = options_of(node)
    x, out = plan.value(o["x"]), plan.new(node)
    residual = None if o["residual"] is None else plan.value(o["residual"])
    if residual is not None and residual.layout != out.layout:
        raise NotLowered("the residual is broadcast")
    plan.step(
        node, NativeKernel("rms_norm", "RmsNormArgs", "ops/rms_norm/native.h"), x=x,
        residual=Text("View{}") if residual is None else residual, weight=plan.vector(o["weight"]),
        eps=o["eps"], offset=float(o["offset"]), rows=plan.rows(out.layout), out=out,
    )  # fmt: skip
    plan.bind(node, out)


@lowers(ops.add_rms_norm.default)
def lower_add_rms_norm(plan: Planner, node: Node) -> None:
    """The norm reads the float32 sum, `wide` or not."""
    o = options_of(node)
    x, residual = plan.flat(o["x"]), plan.flat(o["residual"])
    if x.layout != residual.layout or x.layout.heads > 1:
        raise NotLowered("x and residual differ in shape, or are in heads")
    out, total = plan.new(node, x.layout), plan.new(node, x.layout, "_sum")
    plan.step(
        node, NativeKernel("add_rms_norm", "AddRmsNormArgs", "ops/add_rms_norm/native.h", writes=("out", "sum")), x=x,
        residual=residual, weight=plan.vector(o["weight"]), eps=o["eps"], offset=float(o["offset"]),
        rows=plan.rows(x.layout), out=out, sum=total,
    )  # fmt: skip
    plan.bind(node, (out, total))


@lowers(ops.layer_norm.default, aten.layer_norm.default)
def lower_layer_norm(plan: Planner, node: Node) -> None:
    o = options_of(node)
    x = plan.value(o.get("x", o.get("input")))
    if len(o.get("normalized_shape", [0])) != 1:
        raise NotLowered("it norms more than the last dim")
    out = plan.new(node)
    plan.step(
        node, NativeKernel("layer_norm", "LayerNormArgs", "ops/layer_norm/native.h"), x=x,
        weight=plan.vector_or_null(o["weight"]), bias=plan.vector_or_null(o["bias"]),
        eps=o["eps"], rows=plan.rows(out.layout), out=out,
    )  # fmt: skip
    plan.bind(node, out)
