"""widen_linear: 16-bit linear layers on a CPU that cannot multiply them fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.ir.nodes import calls, is_op, tensor_of
from graft.ir.patterns.match import Match, Refused
from graft.ops.half_precision import widen_problem
from graft.passes.base import Context
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
LINEAR, MM, ADDMM = aten.linear.default, aten.mm.default, aten.addmm.default


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def linear_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return ops.linear(x, weight, bias)


def mm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight)


def mm_widened(x: Tensor, weight: Tensor) -> Tensor:
    return ops.linear(x, weight.transpose(-1, -2))


def addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight)


def addmm_widened(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.linear(x, weight.transpose(-1, -2), bias)


def check_pays(match: Match) -> None:
    """Refused where the GEMM does not pay in float32, which is asked of the machine, for each by itself."""
    problem = gemm_problem(match.anchor)
    if problem is not None:
        raise Refused(match.anchor, problem)


def gemms(gm: GraphModule) -> list[Node]:
    return [node for node in calls(gm.graph) if is_op(node, LINEAR, MM, ADDMM)]


def gemm_problem(node: Node) -> str | None:
    """None where the GEMM pays in float32, else why it stays as it is."""
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


BIAS, TRANSPOSED = {"bias": "n"}, {"x": "m k", "weight": "k n"}
REWRITES = (
    Rewrite(linear, linear_widened, {"x": "b s k", "weight": "n k"} | BIAS, check_pays, needs=(LINEAR,), exact=False),
    Rewrite(mm, mm_widened, TRANSPOSED, check_pays, needs=(MM,), exact=False),
    Rewrite(addmm, addmm_widened, TRANSPOSED | BIAS, check_pays, needs=(ADDMM,), exact=False),
)


@TransformRegistry.register("widen_linear")
class WidenLinear(PatternTransform):
    """A GEMM of 16-bit matrices runs in float32 where the CPU has no instructions for it.

    before:  %y = linear(%x, %w, %b);   %z = addmm(%b, %x, %v)
    after:   %y = graft.linear(%x, %w, %b);   %t = transpose(%v, -1, -2);  %z = graft.linear(%x, %t, %b)

    Last of all, so that other transforms still see plain linear layers. Weights stay 16-bit; the kernel widens one
    piece at a time. Elsewhere (float32, a GPU, a CPU that has such instructions) it is skipped with the reason.
    Numerics: summed in float32 and rounded once, bias included; eager may round before it adds the bias.
    """

    reads_decomposed = False
    lacking = "the graph has no linear, mm or addmm"
    explained = (ADDMM,)

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        if context.backend == "native":
            return "the native backend widens weights as it reads them"
        problems = [gemm_problem(node) for node in gemms(gm)]
        return "; ".join(dict.fromkeys(filter(None, problems))) if all(problems) else None

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def explain(self, node: Node) -> None:
        """An addmm whose arguments are others than the pattern's."""
        problem = gemm_problem(node)
        if problem is not None:
            raise Refused(node, problem)
