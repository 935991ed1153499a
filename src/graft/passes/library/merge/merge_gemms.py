"""merge_gemms: linear layers that read one input become one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.nodes import calls, is_op, where
from graft.ir.patterns.match import Match, NearMiss, Refused
from graft.passes.base import Context
from graft.passes.library.merge.linears import check_member, check_together, merge_linears, merge_match
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun

LINEAR = torch.ops.aten.linear.default
WHAT = "the linear layers"


@TransformRegistry.register("merge_gemms")
class MergeGemms(Rewriter):
    """Linear layers that read one input become one, however many there are and whatever reads them.

    before:  %a = linear(%x, %wa);  %b = linear(%x, %wb, %bias);  %c = linear(%x, %wc)
    after:   %abc = linear(%x, %merged_proj_weight, %merged_proj_bias);  %a = slice(%abc, -1, 0, na);  …

    A layer without a bias gets zeros where others have one. One that cannot be merged (tied or computed weight, its
    result returned or written in place, merged by merge_qkv or merge_gate_up before) stays, and the others are merged
    without it. The old weights become views of the merged one: no second copy. Numerics: same dtype, the
    GEMM may sum in another order.

    A walk: whether it can be merged is asked of each sibling, and the others are merged without it, where a pattern
    takes all that it has or none; and the parameters move into one memory.
    """

    find_first = True
    lacking = "no two linear layers read one input"

    def start(self, gm: GraphModule, context: Context) -> MergeRun:
        return MergeRun(gm, context, Editor(gm, self.name))

    def candidates(self, run: MergeRun) -> list[Member]:
        groups = [tuple(nodes) for nodes in by_input(run.gm).values() if len(nodes) > 1]
        return [Member(node, group) for group in groups for node in group]

    def find(self, run: MergeRun, member: Member) -> Match | None:
        """All that can be merged with it, at the first of them."""
        refused = run.refusal(member.anchor)
        if refused is not None:
            raise refused
        able = run.able(member.group)
        if len(able) < 2:
            return None
        check_together(run.gm, able, WHAT, run.context.lazy)
        return merge_match(able) if member.anchor is able[0] else None

    def check(self, run: MergeRun, match: Match) -> None:
        """Who else reads or writes a layer was asked of each."""

    def write(self, run: MergeRun, match: Match) -> list[Node]:
        return merge_linears(run.editor, match.nodes, "merged_proj", run.context.lazy)

    def near_miss(self, run: MergeRun, member: Member, refused: Refused) -> NearMiss:
        near = super().near_miss(run, member, refused)
        return replace(near, matched=len(run.able(member.group)), size=len(member.group))


@dataclass(frozen=True)
class Member:
    """A linear layer among all that read its input."""

    anchor: Node
    group: tuple[Node, ...]


@dataclass
class MergeRun(RewriteRun):
    refusals: dict[Node, Refused | None] = field(default_factory=dict)

    def refusal(self, node: Node) -> Refused | None:
        """Why a layer cannot be merged with any other."""
        if node not in self.refusals:
            try:
                check_not_merged(node)
                check_member(self.gm, node, WHAT)
            except Refused as refused:
                self.refusals[node] = refused
            else:
                self.refusals[node] = None
        return self.refusals[node]

    def able(self, group: tuple[Node, ...]) -> list[Node]:
        return [node for node in group if self.refusal(node) is None]


def by_input(gm: GraphModule) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {}
    for node in calls(gm.graph):
        if is_op(node, LINEAR):
            found.setdefault(node.args[0], []).append(node)
    return found


def check_not_merged(node: Node) -> None:
    """Merging once more would move the weights that are views of this one away from it."""
    weight = node.args[1]
    maker = weight.meta.get("made_by") if isinstance(weight, Node) else None
    if maker and maker != "shard_tensor_parallel":  # a part of a weight is a weight like any other
        raise Refused(node, f"{where(node)} was merged by {maker} already")
