"""What the calls of a graph are to someone who looks for fusions: free, bound by memory, a GEMM, attention."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from graft.ir.effects import alias_sources, is_mutating
from graft.ir.nodes import OpOverload, is_op, tensor_val, val
from graft.passes.elementwise import is_pointwise

aten, ops = torch.ops.aten, torch.ops.graft
REDUCTIONS = {aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.correction}
SOFTMAX = {aten.softmax.int, aten.log_softmax.int}
NORMS = {
    *(aten.layer_norm.default, aten.rms_norm.default),
    *(ops.rms_norm.default, ops.add_rms_norm.default, ops.layer_norm.default),
    ops.l2_norm.default,
}
ROWWISE = {*NORMS, ops.swiglu.default, ops.rope.default}
SLICES = {aten.slice.Tensor, aten.select.int, aten.squeeze.dim}
MATMULS = {
    *(aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default),
    *(aten.addmm.default, aten.baddbmm.default, ops.linear.default, ops.fused_linear.default),
    ops.gated_mlp.default,
}
ATTENTION = {
    *(ops.attention.default, ops.paged_attention.default, ops.cached_attention.default),
    *(ops.rope_attention.default, aten.scaled_dot_product_attention.default),
    *(ops.latent_attention.default, ops.paged_latent_attention.default),
}
LOOKUPS = {aten.embedding.default, aten.index_select.default}  # read as much as they give
COPIES = {aten.contiguous.default, aten.clone.default}


def is_free(node: Node) -> bool:
    """Launches nothing: a view, an item of a tuple, a size. A cast that changes the dtype is no view."""
    if node.op != "call_function" or is_op(node, getitem) or isinstance(val(node), (int, torch.SymInt)):
        return True
    if node.target in COPIES or is_mutating(node):
        return False
    sources = [tensor_val(source) for source in alias_sources(node)]
    made = tensor_val(node)
    return bool(sources) and all(s is None or made is None or s.dtype == made.dtype for s in sources)


def works_on_rows(node: Node) -> bool:
    """Computes each row (the last dim) from the same rows of its inputs: one kernel can keep a row at hand."""
    if node.op != "call_function" or is_mutating(node):
        return False
    if node.target in REDUCTIONS:
        dims, keep = (*node.args, None, False)[1:3]
        return dims == [-1] and (keep is True or node.kwargs.get("keepdim") is True)
    if node.target in SOFTMAX:
        return node.args[1] == -1
    if is_op(node, aten.cat.default):
        return len(node.args) > 1 and node.args[1] == -1
    if is_op(node, getitem):
        return isinstance(node.args[0], Node) and node.args[0].target in ROWWISE
    return node.target in ROWWISE or node.target in SLICES or is_pointwise(node)


def is_norm(node: Node) -> bool:
    return node.target in NORMS or node.target in REDUCTIONS


def is_matmul(node: object) -> bool:
    return is_op(node, *MATMULS)


def is_attention(node: object) -> bool:
    return is_op(node, *ATTENTION)


def first_tensor(node: Node) -> torch.Tensor | None:
    """The value of a node, or the first of several."""
    value = val(node)
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value if isinstance(value, torch.Tensor) else None


def through_views(node: Node) -> Node:
    """What a value was before views of it were taken."""
    while node.op == "call_function" and is_free(node) and (sources := node_inputs(node)):
        node = sources[0]
    return node


def node_inputs(node: Node) -> list[Node]:
    return [source for source in node.all_input_nodes if not isinstance(val(source), (int, torch.SymInt))]


def readers(node: Node) -> list[Node]:
    """The calls that read a value, through views of it."""
    found: list[Node] = []
    for user in node.users:
        found += readers(user) if user.op == "call_function" and is_free(user) else [user]
    return list(dict.fromkeys(found))


def is_call(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function"


def is_graft(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace == "graft"
