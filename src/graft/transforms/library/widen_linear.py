"""widen_linear: 16-bit linear layers on a CPU that cannot multiply them fast."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import NearMiss
from graft.graph.nodes import calls, is_op, module_path, tensor_of, where
from graft.ops.narrow import widen_problem
from graft.transforms.base import BaseTransform, Context, Outcome
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

aten, ops = torch.ops.aten, torch.ops.graft
LINEAR, MM, ADDMM = aten.linear.default, aten.mm.default, aten.addmm.default


@TransformRegistry.register("widen_linear")
class WidenLinear(BaseTransform):
    """A product of 16-bit matrices runs in float32 where the CPU has no instructions for it.

    before:  %y = linear(%x, %w, %b);   %z = addmm(%b, %x, %v)
    after:   %y = graft.linear(%x, %w, %b);   %t = transpose(%v, -1, -2);  %z = graft.linear(%x, %t, %b)

    Last of all, so that other transforms still see plain linear layers. Weights stay 16-bit; the kernel widens one
    piece at a time. Elsewhere (float32, a GPU, a CPU that has such instructions) it is skipped with the reason.
    Numerics: summed in float32 and rounded once, bias included; eager may round before it adds the bias.
    """

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        if context.backend == "native":
            return Outcome(reason="the native backend widens weights as it reads them", skipped=True)
        found = [node for node in calls(gm.graph) if is_op(node, LINEAR, MM, ADDMM)]
        if not found:
            return Outcome(reason="the graph has no linear, mm or addmm")
        problems = {node: product_problem(node) for node in found}
        editor = Editor(gm, self.name)
        records = tuple(widen(editor, node) for node, problem in problems.items() if problem is None)
        misses = tuple(
            NearMiss(self.name, where(node), f"%{node.name}", problem, 1, 1)
            for node, problem in problems.items()
            if problem
        )
        if records:
            return Outcome(records, misses)
        return Outcome(reason="; ".join(dict.fromkeys(miss.reason for miss in misses)), skipped=True)


def product_problem(node: Node) -> str | None:
    """None where the product pays in float32, else why it stays as it is."""
    x, w, b = operands(node)
    if is_op(node, ADDMM) and (node.kwargs or len(node.args) > 3):
        return "addmm with beta or alpha"
    if tensor_of(w).dim() != 2:
        return "the weight is a vector"
    if b is not None and tensor_of(b).dim() != 1:
        return "what is added is not one row"
    return widen_problem(tensor_of(w), tensor_of(x), None if b is None else tensor_of(b))


def operands(node: Node) -> tuple[Node, Node, Node | None]:
    """x, the weight as the call has it, and the bias."""
    if is_op(node, ADDMM):
        b, x, w = node.args[:3]
        return x, w, b
    return node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else None


def widen(editor: Editor, node: Node) -> MatchRecord:
    x, w, b = operands(node)
    made = []
    if not is_op(node, LINEAR):  # their weight is [k, n]
        w = editor.call(aten.transpose.int, (w, -1, -2), before=node, like=node)
        made.append(w.name)
    wide = editor.call(ops.linear.default, (x, w) if b is None else (x, w, b), before=node, like=node)
    record = MatchRecord(where(node), module_path(node), (node.name,), (*made, wide.name))
    editor.replace(node, wide)
    editor.graph.erase_node(node)
    return record
