"""fold_constants: what is computed from weights alone is computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import attribute
from graft.ir.nodes import calls, tensor_of, tensor_val, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.base import Context, TransformConfig
from graft.passes.library.matvec.linears import DecodeConfig, elsewhere
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun


@TransformRegistry.register("fold_constants")
class FoldConstants(Rewriter):
    """What a model computes from the weights of a norm alone, step by step, is computed once.

    before:  %g = add(%weight, 1.0);  %y = graft.layer_norm(%x, %g, %bias, eps)
    after:   %y = graft.layer_norm(%x, %g_folded, %bias, eps)

    Elementwise calls on vectors (Nemotron adds 1 to each norm's weight, a kernel a norm in every step). Matrices
    stay: folded they would be a second copy. Numerics: bitwise, since the call itself runs.

    A walk: which calls they are does not matter, but what they read.
    """

    config: DecodeConfig  # pyrefly: ignore
    lacking = "no call of the graph reads weights alone"

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return elsewhere(gm, context, self.config.devices)

    def candidates(self, run: RewriteRun) -> list[Node]:
        return list(calls(run.gm.graph))

    def find(self, run: RewriteRun, node: Node) -> Match | None:
        inputs = node.all_input_nodes
        if not inputs or any(one.op != "get_attr" for one in inputs) or tensor_val(node) is None:
            return None
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return None
        if tensor_of(node).dim() > 1:
            raise Refused(node, f"{where(node)} gives a matrix, which would be a second copy of its weights")
        return Match("", {f"weight_{index}": one for index, one in enumerate(inputs)}, {}, (node,), (node,))

    def write(self, run: RewriteRun, match: Match) -> list[Node]:
        (node,), first = match.nodes, match.tensors["weight_0"]
        with torch.no_grad():
            value = computed(run.gm, node)
        # model.layers.0.input_layernorm.weight → model.layers.0.input_layernorm.weight_folded
        held = run.editor.parameter(f"{first.target}_folded", value, before=node, like=node)
        run.editor.replace(node, held)
        return [held]


def computed(gm: GraphModule, node: Node) -> torch.Tensor:
    def value(one: Node) -> Any:
        return attribute(gm, str(one.target))

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    return node.target(*args, **kwargs).detach()  # pyrefly: ignore
