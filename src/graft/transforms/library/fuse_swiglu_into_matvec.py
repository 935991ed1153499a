"""fuse_swiglu_into_matvec: the gated activation becomes the epilogue of the gate-up product."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from graft.graph.match import Match, Refused
from graft.graph.nodes import calls, is_op, options_of, static_int, tensor_of, where
from graft.transforms.decode import MatvecTransform, fused_product, is_product, need, product
from graft.transforms.registry import TransformRegistry
from graft.transforms.rewriter import Run

aten, ops = torch.ops.aten, torch.ops.graft
SLICE = aten.slice.Tensor


@TransformRegistry.register("fuse_swiglu_into_matvec")
class FuseSwigluIntoMatvec(MatvecTransform):
    """The gated activation becomes the epilogue of the gate-up product.

    before:  %y = linear(%x, %w);  %g = slice(%y, -1, 0, n);  %u = slice(%y, -1, n, 2n);  %a = graft.swiglu(%g, %u)
    after:   %a = graft.fused_linear(%x, %w, activation="silu")

    Also where a norm went into the product. The gate must be the first half. Numerics: the reference rounds the
    product before the activation, as eager does; a kernel may keep it in float32.

    A walk: the product may have anything fused into it already, which goes on as it is.
    """

    lacking = "the graph has no graft::swiglu"

    def candidates(self, run: Run) -> Iterator[Node]:
        return (node for node in calls(run.gm.graph) if is_op(node, ops.swiglu.default))

    def find(self, run: Run, node: Node) -> Match | None:
        gate, up = node.args[:2]
        for half in (gate, up):
            need(is_op(half, SLICE), "{} is no half of a gate-up product", half)
        linear = gate.args[0]
        need(is_product(linear), "{} is no linear layer", linear)
        need(up.args[0] is linear, "{} and {} come from two products", gate, up)
        n = tensor_of(linear).shape[-1]
        spans = [span(half) for half in (gate, up)]
        if spans == [(n // 2, n), (0, n // 2)]:
            raise Refused(
                node, f"{where(linear)} gives the gate in its second half; fused_linear reads it in the first"
            )
        need(spans == [(0, n // 2), (n // 2, n)], "{} and {} are no halves of a product", gate, up)
        given = product(linear)
        need(given["residual"] is None, "{} adds a residual before the activation", linear)
        need(given["activation"] == "none", "{} has an activation already", linear)
        tensors = {key: given[key] for key in ("x", "weight")}
        return Match(options_of(node)["activation"], tensors, {}, (node, gate, up, linear), (node,))

    def write(self, run: Run, match: Match) -> list[Node]:
        swiglu, *_, linear = match.nodes
        options = options_of(swiglu)
        given = {**product(linear), "activation": options["activation"], "upcast": options["upcast"]}
        fused = fused_product(run.editor, given, before=swiglu, like=swiglu)
        run.editor.replace(swiglu, fused)
        return [fused]


def span(half: Node) -> tuple[int, int] | None:
    """Where a slice of the last dim begins and ends, or None."""
    options = options_of(half)
    size, rank = static_int(tensor_of(half.args[0]).shape[-1]), tensor_of(half.args[0]).dim()
    start, end = static_int(options["start"]), static_int(options["end"])
    if size is None or start is None or end is None or options["dim"] not in (-1, rank - 1) or options["step"] != 1:
        return None
    return start, min(end, size)
