"""merge_gemms: linear layers that read one input become one."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import NearMiss
from graft.graph.nodes import calls, is_op, where
from graft.transforms.base import BaseTransform, Context, Outcome, no_match_reason
from graft.transforms.merge import member_problem, merge_linears, together_problem
from graft.transforms.registry import TransformRegistry

LINEAR = torch.ops.aten.linear.default
WHAT = "the linear layers"


@TransformRegistry.register("merge_gemms")
class MergeGemms(BaseTransform):
    """Linear layers that read one input become one, however many there are and whatever reads them.

    before:  %a = linear(%x, %wa);  %b = linear(%x, %wb, %bias);  %c = linear(%x, %wc)
    after:   %abc = linear(%x, %merged_proj_weight, %merged_proj_bias);  %a = slice(%abc, -1, 0, na);  …

    A layer without a bias gets zeros where others have one. One that cannot be merged (tied or computed weight, its
    result returned or written in place, merged by merge_qkv or merge_gate_up before) stays, and the others are merged
    without it. The old weights become views of the merged one: no second copy. Numerics: same dtype, the matrix
    product may sum in another order.
    """

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        editor = Editor(gm, self.name)
        records, misses = [], []
        groups = [nodes for nodes in by_input(gm).values() if len(nodes) > 1]
        for nodes in groups:
            problems = {node: merged_before(node) or member_problem(gm, node, WHAT) for node in nodes}
            able = [node for node, problem in problems.items() if problem is None]
            together = together_problem(gm, able, WHAT, context.held) if len(able) > 1 else None
            if len(able) > 1 and together is None:
                records.append(merge_linears(editor, able, "merged_proj", context.held))
            for node, problem in problems.items():
                if problem or together:
                    reason = problem or together or ""
                    misses.append(NearMiss(self.name, where(node), f"%{node.name}", reason, len(able), len(nodes)))
        reason = "" if records else no_match_reason(misses) if misses else "no two linear layers read one input"
        return Outcome(tuple(records), tuple(misses), reason)


def by_input(gm: GraphModule) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {}
    for node in calls(gm.graph):
        if is_op(node, LINEAR):
            found.setdefault(node.args[0], []).append(node)
    return found


def merged_before(node: Node) -> str | None:
    """Merging once more would move the weights that are views of this one away from it."""
    weight = node.args[1]
    maker = weight.meta.get("made_by") if isinstance(weight, Node) else None
    return f"{where(node)} was merged by {maker} already" if maker else None
