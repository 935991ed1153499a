"""widen_linear: 16-bit linear layers on a CPU that cannot multiply them fast."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import calls, is_op, tensor_of
from graft.ir.patterns.match import Match, Refused
from graft.ops.half_precision import widen_problem
from graft.passes.base import Context
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun

aten, ops = torch.ops.aten, torch.ops.graft
LINEAR, MM, ADDMM = aten.linear.default, aten.mm.default, aten.addmm.default


@TransformRegistry.register("widen_linear")
class WidenLinear(Rewriter):
    """A product of 16-bit matrices runs in float32 where the CPU has no instructions for it.

    before:  %y = linear(%x, %w, %b);   %z = addmm(%b, %x, %v)
    after:   %y = graft.linear(%x, %w, %b);   %t = transpose(%v, -1, -2);  %z = graft.linear(%x, %t, %b)

    Last of all, so that other transforms still see plain linear layers. Weights stay 16-bit; the kernel widens one
    piece at a time. Elsewhere (float32, a GPU, a CPU that has such instructions) it is skipped with the reason.
    Numerics: summed in float32 and rounded once, bias included; eager may round before it adds the bias.

    A walk: whether a product pays in float32 is asked of the machine, for each product by itself, and a graph in
    which none does is skipped.
    """

    lacking = "the graph has no linear, mm or addmm"
    size = 1

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        if context.backend == "native":
            return "the native backend widens weights as it reads them"
        problems = [product_problem(node) for node in products(gm)]
        return "; ".join(dict.fromkeys(filter(None, problems))) if all(problems) else None

    def candidates(self, run: RewriteRun) -> list[Node]:
        return products(run.gm)

    def find(self, run: RewriteRun, node: Node) -> Match | None:
        problem = product_problem(node)
        if problem is not None:
            raise Refused(node, problem)
        return Match("", {}, {}, (node,), (node,))

    def check(self, run: RewriteRun, match: Match) -> None:
        """One call for another: nobody outside sees a difference."""

    def write(self, run: RewriteRun, match: Match) -> list[Node]:
        node, editor = match.anchor, run.editor
        x, w, b = operands(node)
        made = []
        if not is_op(node, LINEAR):  # their weight is [k, n]
            w = editor.call(aten.transpose.int, (w, -1, -2), before=node, like=node)
            made.append(w)
        wide = editor.call(ops.linear.default, (x, w) if b is None else (x, w, b), before=node, like=node)
        editor.replace(node, wide)
        return [*made, wide]


def products(gm: GraphModule) -> list[Node]:
    return [node for node in calls(gm.graph) if is_op(node, LINEAR, MM, ADDMM)]


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
