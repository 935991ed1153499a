"""fuse_residual_into_matvec: the residual sum after a linear layer becomes its epilogue."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from graft.ir.nodes import calls, is_op, options_of, same_shape, tensor_of, tensor_val, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.library.matvec.linears import MatvecTransform, fused_product, is_product, named, need, product
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import RewriteRun
from graft.passes.walk import readers_text

aten, ops = torch.ops.aten, torch.ops.graft
ADD, ADD_NORM = aten.add.Tensor, ops.add_rms_norm.default
# what stands between a linear layer and the sum in some models, and how to say so
BETWEEN = {
    ops.rms_norm.default: "norms the product before it is added",
    ops.layer_norm.default: "norms the product before it is added",
    aten.mul.Tensor: "scales the product before it is added",
    aten.div.Tensor: "scales the product before it is added",
    aten.to.dtype: "casts the product before it is added",
    aten.reshape.default: "reshapes the product before it is added",
    aten.index_select.default: "chooses rows of the product before it is added",
}
TRANSPOSED = (aten.addmm.default, aten.mm.default)


@TransformRegistry.register("fuse_residual_into_matvec")
class FuseResidualIntoMatvec(MatvecTransform):
    """The residual sum after a linear layer becomes its epilogue; a norm fused with the sum stands alone again.

    before:  %y = linear(%a, %w);  %n, %x = graft.add_rms_norm(%y, %r, %g, eps)
    after:   %x = graft.fused_linear(%a, %w, residual=%r);  %n = graft.rms_norm(%x, %g, eps)

    Also a plain `add(%y, %r)`, in either order, and a linear layer with a bias. Numerics: the reference rounds the
    product, then the sum, as eager does; a kernel may add before it rounds, once.

    A walk: the product may have anything fused into it already, which goes on as it is.
    """

    lacking = "no linear layer of the graph is followed by a sum"

    def candidates(self, run: RewriteRun) -> Iterator[Node]:
        return (node for node in calls(run.gm.graph) if is_op(node, ADD, ADD_NORM))

    def find(self, run: RewriteRun, node: Node) -> Match | None:
        summands = node.args[:2]
        if not all(isinstance(value, Node) and tensor_val(value) is not None for value in summands):
            return None
        linears = [value for value in summands if is_product(value)]
        if not linears:
            explain(node, summands)
            return None
        linear = max(linears)  # of two products the later one: the other is ready by then
        residual = other(node, linear)
        given = product(linear)
        if list(linear.users) != [node]:
            raise Refused(linear, f"{where(linear)} is read by {readers_text(linear)}")
        need(residual is not linear, "{} adds {} to itself", node, linear)
        need(not node.kwargs, "{} adds a multiple (alpha)", node)
        need(given["residual"] is None, "{} has a residual already", linear)
        y, r = tensor_of(linear), tensor_of(residual)
        need(same_shape(y, r), "the residual {} is broadcast to the product", residual)
        need(y.dtype == r.dtype, f"the residual {{}} is {r.dtype}, the product {y.dtype}", residual)
        tensors = {"x": given["x"], "weight": given["weight"], "residual": residual}
        wide = is_op(node, ADD_NORM) and options_of(node)["wide"]
        need(not wide, "{} norms the sum before it is rounded, and the product gives it rounded", node)
        if is_op(node, ADD):
            return Match("add", tensors, {}, (node, linear), (node,))
        pieces = tuple(node.users)
        need(all(is_op(piece, getitem) for piece in pieces), "{} is read as a whole", node)
        tensors["norm"] = node.args[2]
        return Match("add_rms_norm", tensors, {}, (*pieces, node, linear), pieces)

    def write(self, run: RewriteRun, match: Match) -> list[Node]:
        linear = match.nodes[-1]
        total = match.nodes[-2]
        given = {**product(linear), "residual": other(total, linear)}
        fused = fused_product(run.editor, given, before=total, like=linear)
        if is_op(total, ADD):
            run.editor.replace(total, fused)
            return [fused]
        options = options_of(total)
        made = [fused]
        for piece in match.outputs:
            if piece.args[1] == 1:
                run.editor.replace(piece, fused)
                continue
            args = [fused, *(options[key] for key in ("weight", "eps", "offset", "cast_last"))]
            while not args[-1] and len(args) > 3:  # defaults are left out
                args.pop()
            made.append(run.editor.call(ops.rms_norm.default, args, before=total, like=piece))
            run.editor.replace(piece, made[-1])
        return made


def other(total: Node, linear: Node) -> Node:
    """The summand that is not the product."""
    first, second = total.args[:2]
    return second if first is linear else first


def explain(node: Node, summands: tuple[Node, ...]) -> None:
    """Refused where a linear layer is near, or a norm was fused with the sum; else the sum is none of a residual."""
    for value in summands:
        source: Any = value
        while is_op(source, *BETWEEN):
            source = source.args[0]
        if list(value.users) != [node]:
            continue
        if is_product(source):
            raise Refused(value, f"{named(value)}, {BETWEEN[value.target]}")
        if is_op(source, *TRANSPOSED):
            raise Refused(
                value, f"{where(value)} comes from a product with a [k, n] weight; fused_linear reads [n, k]"
            )
    if is_op(node, ADD_NORM):
        raise Refused(node, f"neither {named(summands[0])} nor {named(summands[1])} is a linear layer")
