"""Products of a graph, and how one with a quantized weight takes the place of one without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor, attribute
from graft.graph.match import NearMiss
from graft.graph.nodes import calls, is_op, module_path, options_of, where
from graft.transforms.decode import DEFAULTS
from graft.transforms.quantization import Quantized
from graft.transforms.report import MatchRecord

aten, ops = torch.ops.aten, torch.ops.graft
LINEAR, MM, ADDMM = aten.linear.default, aten.mm.default, aten.addmm.default
FUSED, EXPERTS = ops.fused_linear.default, ops.moe_experts.default
FIELDS = [argument.name for argument in FUSED._schema.arguments]
TRANSFORM = "quantize_linear"
EXPERTS_STAY = "experts are no linear layers; their weights stay"


def linear_calls(gm: GraphModule) -> list[Node]:
    """Every product with a weight that is not quantized yet."""
    found = [node for node in calls(gm.graph) if is_op(node, LINEAR, MM, ADDMM, FUSED)]
    return [node for node in found if not is_op(node, FUSED) or operands(node)["scale"] is None]


def experts(gm: GraphModule) -> Iterator[Node]:
    return (node for node in calls(gm.graph) if is_op(node, EXPERTS))


def operands(node: Node) -> dict[str, Any]:
    """The arguments that graft::fused_linear takes in the place of this call, by name."""
    if is_op(node, FUSED):
        return options_of(node)
    if is_op(node, ADDMM):
        return {**DEFAULTS, "bias": node.args[0], "x": node.args[1], "weight": node.args[2]}
    bias = node.args[2] if len(node.args) > 2 else None
    return {**DEFAULTS, "x": node.args[0], "weight": node.args[1], "bias": bias}


def call_problem(node: Node) -> str | None:
    """Why this call is no linear layer, or None."""
    if not is_op(node, ADDMM):
        return None
    if node.kwargs or len(node.args) > 3:
        return "addmm with beta or alpha"
    bias = node.args[0].meta["val"]
    return None if bias.dim() == 1 else "what is added is not one row"


def norm_of(gm: GraphModule, given: dict[str, Any]) -> tuple[str, float]:
    """The weight of the norm that goes into the product's, and what is added to it; or neither: it may change."""
    norm = given["norm"]
    if not isinstance(norm, Node) or norm.op != "get_attr":
        return "", 0.0
    if not isinstance(attribute(gm, str(norm.target)), torch.nn.Parameter):
        return "", 0.0
    return str(norm.target), given["offset"] if given["cast_last"] else 0.0


def rewrite(editor: Editor, node: Node, given: dict[str, Any], made: Quantized) -> MatchRecord:
    q, scale = parameters(editor, made, node)
    return put_product(editor, node, given, made, q, scale)


def parameters(editor: Editor, made: Quantized, before: Node) -> tuple[Node, Node]:
    """The weight and its scale beside the old weight, and the nodes that read them."""
    owner, _, leaf = made.name.rpartition(".")
    prefix = f"{owner}." if owner else ""
    q = editor.parameter(f"{prefix}{leaf}_{made.format}", made.q, before=before, like=before)
    return q, editor.parameter(f"{prefix}{leaf}_scale", made.scale, before=before, like=before)


def put_product(
    editor: Editor, node: Node, given: dict[str, Any], made: Quantized, q: Node, scale: Node
) -> MatchRecord:
    full = {**given, "weight": q, "scale": scale}
    if made.norm:
        full |= {"norm": None, "offset": 0.0, "cast_last": False, "normed": True}
    args = [full[name] for name in FIELDS]
    defaults = [argument.default_value for argument in FUSED._schema.arguments]
    while args[-1] is defaults[len(args) - 1] or args[-1] == defaults[len(args) - 1]:
        args.pop()
    new = editor.call(FUSED, args, before=node, like=node)
    return put(editor, node, new, (q, scale), made)


def put(editor: Editor, node: Node, new: Node, read: tuple[Node, ...], made: Quantized) -> MatchRecord:
    """`new`, which reads the quantized weight, in place of `node`."""
    names = (*(each.name for each in read), new.name)
    record = MatchRecord(where(node), module_path(node), (node.name,), names, made.format, made.proof, made.note)
    unused = [arg for arg in node.all_input_nodes if arg.op == "get_attr"]
    editor.replace(node, new)
    editor.graph.erase_node(node)
    for weight in unused:
        if not weight.users:
            editor.graph.erase_node(weight)
    return record


def near_miss(node: Node, reason: str) -> NearMiss:
    return NearMiss(TRANSFORM, where(node), f"%{node.name}", reason, 1, 1)
