"""merge_gate_up: the gate and up projections of a gated MLP become one."""

from __future__ import annotations

import torch
from torch.fx import Node

from graft.ir.nodes import calls, is_op
from graft.passes.library.merge.linears import MergeTransform, producing_linear
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import RewriteRun

aten, ops = torch.ops.aten, torch.ops.graft
BETWEEN = frozenset({aten.slice.Tensor, aten.reshape.default, aten.select.int})


@TransformRegistry.register("merge_gate_up")
class MergeGateUp(MergeTransform):
    """The gate and up projections of a gated MLP become one, with its bias where both have one.

    before:  %g = linear(%x, %wg);  %u = linear(%x, %wu);  %y = graft.swiglu(%g, %u)
    after:   %gu = linear(%x, %gate_up_proj_weight);  %g = slice(%gu, -1, 0, n);  %u = slice(%gu, -1, n, 2n)
             %y = graft.swiglu(%g, %u)

    The old weights become views of the merged one: no second copy. Numerics: same dtype, the GEMM may sum
    in another order.

    A walk: between the projections and graft::swiglu may lie any slices, reshapes and selects, in any order,
    and a pattern has no word for "whatever lies between"; and the parameters move into one memory.
    """

    merged = "gate_up_proj"
    what = "gate and up"
    lacking = "the graph has no graft::swiglu"

    def candidates(self, run: RewriteRun) -> list[Node]:
        return [node for node in calls(run.gm.graph) if is_op(node, ops.swiglu.default)]

    def linears(self, call: Node) -> list[Node | None]:
        return [producing_linear(argument, BETWEEN) for argument in call.args[:2]]
