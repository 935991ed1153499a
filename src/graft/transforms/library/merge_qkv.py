"""merge_qkv: the projections of query, key and value become one."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from graft.graph.nodes import calls, is_op
from graft.transforms.base import BaseTransform, Context, Outcome
from graft.transforms.merge import merge_groups, producing_linear
from graft.transforms.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft
# what may lie between a projection and attention
BETWEEN = frozenset(
    {
        aten.reshape.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        ops.rope.default,
        ops.rms_norm.default,
        ops.rms_norm_rope.default,
    }
)


@TransformRegistry.register("merge_qkv")
class MergeQKV(BaseTransform):
    """The projections of query, key and value become one, with a bias where one of them has it.

    before:  %q = linear(%x, %wq);  %k = linear(%x, %wk);  %v = linear(%x, %wv)
    after:   %qkv = linear(%x, %qkv_proj_weight);  %q = slice(%qkv, -1, 0, nq);  %k = slice(%qkv, -1, nq, nq + nk);  …

    The old weights become views of the merged one: no second copy. Numerics: same dtype, the matrix product may sum
    in another order.
    """

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        groups = [
            (node, [producing_linear(argument, BETWEEN) for argument in node.args[:3]])
            for node in calls(gm.graph)
            if is_op(node, ops.attention.default)
        ]
        return merge_groups(
            gm,
            self.name,
            groups,
            "qkv_proj",
            "query, key and value",
            "the graph has no graft::attention",
            context.held,
        )
