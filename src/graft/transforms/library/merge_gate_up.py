"""merge_gate_up: the gate and up projections of a gated MLP become one."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from graft.graph.nodes import calls, is_op
from graft.transforms.base import BaseTransform, Context, Outcome
from graft.transforms.merge import merge_groups, producing_linear
from graft.transforms.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
BETWEEN = frozenset({aten.slice.Tensor, aten.reshape.default, aten.select.int})


@TransformRegistry.register("merge_gate_up")
class MergeGateUp(BaseTransform):
    """The gate and up projections of a gated MLP become one, with its bias where both have one.

    before:  %g = linear(%x, %wg);  %u = linear(%x, %wu);  %y = graft.swiglu(%g, %u)
    after:   %gu = linear(%x, %gate_up_proj_weight);  %g = slice(%gu, -1, 0, n);  %u = slice(%gu, -1, n, 2n)
             %y = graft.swiglu(%g, %u)

    The old weights become views of the merged one: no second copy. Numerics: same dtype, the matrix product may sum
    in another order.
    """

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        groups = [
            (node, [producing_linear(argument, BETWEEN) for argument in node.args[:2]])
            for node in calls(gm.graph)
            if is_op(node, ops.swiglu.default)
        ]
        return merge_groups(
            gm, self.name, groups, "gate_up_proj", "gate and up", "the graph has no graft::swiglu", context.held
        )
