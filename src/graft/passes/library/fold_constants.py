"""fold_constants: what is computed from weights alone is computed once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import attribute
from graft.ir.effects import is_mutating, storage_root, with_views
from graft.ir.nodes import calls, is_op, tensor_of, tensor_val, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.library.matvec.linears import InDecodeSteps
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord
from graft.passes.rewriter import RewriteRun

CAST = torch.ops.aten.to.dtype


@TransformRegistry.register("fold_constants")
class FoldConstants(InDecodeSteps):
    """What a model computes from the weights of a norm alone, step by step, is computed once.

    before:  %g = add(%weight, 1.0);  %y = graft.layer_norm(%x, %g, %bias, eps)
    after:   %y = graft.layer_norm(%x, %g_folded, %bias, eps)

    Elementwise calls and casts of vectors (Nemotron adds 1 to each norm's weight, Qwen3-Next takes -exp of a layer's
    decays: kernels in every step). Matrices stay: folded they would be a second copy. So does what the graph writes
    in place, or gives away: a constant is the same in every step. Numerics: bitwise, since the calls themselves run.

    A walk: which calls they are does not matter, but what they read.
    """

    lacking = "no call of the graph reads weights alone"

    def candidates(self, run: RewriteRun) -> list[Node]:
        """The last calls of chains that read weights alone."""
        folded: dict[Node, None] = {}
        for node in calls(run.gm.graph):
            if reads_weights(node, folded):
                folded[node] = None
        return [node for node in folded if any(user not in folded for user in node.users)]

    def find(self, run: RewriteRun, node: Node) -> Match | None:
        if tensor_of(node).dim() > 1:
            raise Refused(node, f"{where(node)} gives a matrix, which would be a second copy of its weights")
        chain = chain_of(node)
        weights = dict.fromkeys(one for part in chain for one in part.all_input_nodes if one.op == "get_attr")
        check_constant(run, [*chain, *weights])
        check_kept(node)
        return Match("", {f"weight_{index}": one for index, one in enumerate(weights)}, {}, chain, (node,))

    def rewrite(self, run: RewriteRun, match: Match) -> MatchRecord:
        names = ", ".join(str(weight.target) for weight in match.tensors.values())
        return replace(super().rewrite(run, match), note=f"later changes of {names} are not seen")

    def write(self, run: RewriteRun, match: Match) -> list[Node]:
        node, first = match.anchor, match.tensors["weight_0"]
        with torch.no_grad():
            value = computed(run.gm, match.nodes)
        # model.layers.0.input_layernorm.weight → model.layers.0.input_layernorm.weight_folded
        held = run.editor.parameter(f"{first.target}_folded", value, before=node, like=node)
        run.editor.replace(node, held)
        return [held]


def reads_weights(node: Node, folded: Collection[Node]) -> bool:
    """In-place calls have the tag too, and would write the weights here."""
    inputs = node.all_input_nodes
    pointwise = is_op(node, CAST) or torch.Tag.pointwise in getattr(node.target, "tags", ())
    pointwise = pointwise and not is_mutating(node)
    given = all(one.op == "get_attr" or one in folded for one in inputs)
    return bool(inputs) and given and pointwise and tensor_val(node) is not None


def check_constant(run: RewriteRun, nodes: Sequence[Node]) -> None:
    """Refused where any of them is written, before or after: the next step would read what was true of this one."""
    written = next((node for node in nodes if storage_root(node) in run.mutated), None)
    if written is not None:
        raise Refused(written, f"the graph writes {where(written)} in place, so it is not the same in every step")


def check_kept(node: Node) -> None:
    """Refused where the caller gets the memory, and may write it."""
    if any(user.op == "output" for view in with_views([node]) for user in view.users):
        raise Refused(node, f"{where(node)} is a result of the graph, and the caller's to change")


def chain_of(node: Node) -> tuple[Node, ...]:
    """The call and those before it, the last first."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        found[one] = None
        waiting += [source for source in one.all_input_nodes if source.op != "get_attr"]
    return tuple(sorted(found, reverse=True))


def computed(gm: GraphModule, chain: Sequence[Node]) -> torch.Tensor:
    """chain: the last call first."""
    values: dict[Node, Any] = {}

    def value(one: Node) -> Any:
        return attribute(gm, str(one.target)) if one.op == "get_attr" else values[one]

    for node in reversed(chain):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
        values[node] = node.target(*args, **kwargs)  # pyrefly: ignore
    return values[chain[0]].detach()
