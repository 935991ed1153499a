"""transpose_weight: a GEMM with a [k, n] weight becomes a linear layer, whose weight lies row by row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from graft.ir.edit import attribute
from graft.ir.nodes import calls, is_op, is_weight, same_sizes, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.library.matvec.linears import LINEAR, InDecodeSteps
from graft.passes.library.merge.stacking import owner_problem, sharer
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import RewriteRun

aten = torch.ops.aten
ADDMM, RESHAPE = aten.addmm.default, aten.reshape.default
GEMMS = (ADDMM, aten.mm.default, LINEAR, torch.ops.graft.fused_linear.default)  # take a weight in any layout


@TransformRegistry.register("transpose_weight")
class TransposeWeight(InDecodeSteps):
    """A GEMM with a [k, n] weight becomes a linear layer, whose weight lies row by row.

    before:  %f = reshape(%x, [-1, k]);  %y = addmm(%b, %f, %w);  %z = reshape(%y, [b, s, n])
    after:   %z = linear(%x, %w_rows, %b)

    GPT-2 keeps its weights so. What fuses norms, activations and sums into linear layers then does it here too, and
    a decode step reads whole rows. The memory is the same: the old weight becomes a view of the new one.
    Numerics: a GEMM may sum in another order.

    A walk: the parameter moves in memory, and sizes of both reshapes are computed in the graph.
    """

    lacking = "the graph has no GEMM with a [k, n] weight"
    size = 3

    def candidates(self, run: RewriteRun) -> list[Node]:
        return [node for node in calls(run.gm.graph) if is_op(node, ADDMM)]

    def find(self, run: RewriteRun, node: Node) -> Match:
        bias, flat, weight = node.args[:3]
        check_call(node, bias, weight)
        result = next(iter(node.users), None)
        if not is_op(flat, RESHAPE) or len(node.users) != 1 or not is_op(result, RESHAPE):
            raise Refused(node, f"{where(node)} does not read the rows of a larger tensor, and give such rows")
        if tensor_of(result).shape[-1] != tensor_of(weight).shape[1]:
            raise Refused(node, f"{where(result)} divides the rows of {where(node)}")
        problem = owner_problem(run.gm, [weight], "the GEMM")
        if problem is not None:
            raise Refused(node, problem)
        check_memory(run, str(weight.target), node)
        return Match("", {"x": flat.args[0], "weight": weight, "bias": bias}, {}, (result, node), (result,))

    def write(self, run: RewriteRun, match: Match) -> list[Node]:
        result, node = match.nodes
        x, weight, bias = match.tensors.values()
        rows = laid_out(run.gm.get_parameter(str(weight.target)))
        # transformer.h.0.mlp.c_fc.weight → transformer.h.0.mlp.c_fc.weight_rows
        held = run.editor.parameter(f"{weight.target}_rows", rows, before=node, like=node)
        sizes = (*tensor_of(result).shape[:-1], tensor_of(weight).shape[0])
        made = [held]
        if not same_sizes(tensor_of(x).shape, sizes):  # heads that lie side by side
            lead = result.args[1][:-1]
            x = run.editor.call(RESHAPE, (x, [*lead, sizes[-1]]), before=result, like=node)
            made.append(x)
        made.append(run.editor.call(LINEAR, (x, held, bias), before=result, like=node))
        run.editor.replace(result, made[-1])
        return made


def check_call(node: Node, bias: Node, weight: Node) -> None:
    if len(node.args) > 3 or node.kwargs:
        raise Refused(node, f"{where(node)} has beta or alpha")
    if not is_weight(weight):
        raise Refused(node, f"the weight of {where(node)} is computed in the graph")
    if not is_weight(bias) or tensor_of(bias).dim() != 1:
        raise Refused(node, f"what {where(node)} adds is no bias")


def check_memory(run: RewriteRun, name: str, node: Node) -> None:
    """Refused where others lie in the memory of the weight, or read it as it lies: it moves away from them; and where
    its numbers are still in a file."""
    weight = run.gm.get_parameter(name)
    if run.context.lazy is not None and weight in run.context.lazy:
        raise Refused(node, f"the weight {name} lies in its file, in blocks")
    if weight.t().is_contiguous():
        return
    other = sharer(run.gm, [weight])
    if other is not None:
        raise Refused(node, f"the weight {name} shares its memory with {other}")
    held = [one for one in run.gm.graph.nodes if one.op == "get_attr" and attribute(run.gm, one.target) is weight]
    reader = next((user for one in held for user in one.users if not is_op(user, *GEMMS)), None)
    if reader is not None:
        raise Refused(reader, f"{where(reader)} reads the weight {name} as it lies")


def laid_out(weight: torch.nn.Parameter) -> Tensor:
    """As [n, k] row by row. The old one becomes a view of it; an earlier graph of the module may have done so."""
    if not weight.t().is_contiguous():
        weight.data = weight.data.t().contiguous().t()
    return weight.data.t()
