"""Linear layers of given names that read one input become one: for packages that merge some layers and no others."""

from __future__ import annotations

from typing import ClassVar

from torch.fx import Node

from graft.ir.patterns.match import Match
from graft.passes.library.merge.linears import check_together, merge_match
from graft.passes.library.merge.merge_gemms import WHAT, Member, MergeGemms, MergeRun, by_input


class MergeNamedLayers(MergeGemms):
    """Subclass, say `layers`, and register: all of them become one at every input that all of them read, or none do.

    layers: names of modules, `q_proj` of `model.layers.0.self_attn.q_proj`, in the order of their rows.
    """

    layers: ClassVar[tuple[str, ...]]
    lacking = "no linear layers of these names read one input"

    def candidates(self, run: MergeRun) -> list[Member]:
        groups = [
            tuple(node for name in self.layers for node in group if layer_name(node) == name)
            for group in by_input(run.gm).values()
        ]
        return [Member(own[0], own) for own in groups if len(own) == len(self.layers)]

    def find(self, run: MergeRun, member: Member) -> Match:
        for node in member.group:
            refused = run.refusal(node)
            if refused is not None:
                raise refused
        check_together(run.gm, member.group, WHAT, run.context.lazy)
        return merge_match(member.group)


def layer_name(linear: Node) -> str:
    """`q_proj`, of the weight `model.layers.0.self_attn.q_proj.weight`; '' where it has no module."""
    weight = linear.args[1]
    parts = str(weight.target).split(".") if isinstance(weight, Node) else []
    return parts[-2] if len(parts) > 1 else ""
