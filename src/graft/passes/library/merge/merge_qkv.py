"""merge_qkv: the projections of query, key and value become one."""

from __future__ import annotations

import torch
from torch.fx import Node

from graft.ir.nodes import calls, is_op
from graft.passes.library.merge.linears import MergeTransform, producing_linear
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import RewriteRun

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
    }
)


@TransformRegistry.register("merge_qkv")
class MergeQKV(MergeTransform):
    """The projections of query, key and value become one, with a bias where one of them has it.

    before:  %q = linear(%x, %wq);  %k = linear(%x, %wk);  %v = linear(%x, %wv)
    after:   %qkv = linear(%x, %qkv_proj_weight);  %q = slice(%qkv, -1, 0, nq);  %k = slice(%qkv, -1, nq, nq + nk);  …

    The old weights become views of the merged one: no second copy. Numerics: same dtype, the GEMM may sum
    in another order.

    A walk: between a projection and attention lie reshapes, transposes, norms and rotations, others in each family,
    and a pattern has no word for "whatever lies between"; and the parameters move into one memory.
    """

    merged = "qkv_proj"
    what = "query, key and value"
    lacking = "the graph has no graft::attention"

    def candidates(self, run: RewriteRun) -> list[Node]:
        return [node for node in calls(run.gm.graph) if is_op(node, ops.attention.default)]

    def linears(self, call: Node) -> list[Node | None]:
        return [producing_linear(argument, BETWEEN) for argument in call.args[:3]]
