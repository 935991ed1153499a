"""fuse_norm_into_matvec: an RMSNorm becomes the prologue of the linear layers that read it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

import torch
from torch.fx import Node

from graft.ir.nodes import calls, is_op, options_of, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.library.matvec.linears import MatvecTransform, fused_product, is_product, named, need, product
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import RewriteRun

ops = torch.ops.graft
NORM, ADD_NORM = ops.rms_norm.default, ops.add_rms_norm.default
MOST = 3  # products that may each compute the norm again: queries, keys and values that were not merged


@TransformRegistry.register("fuse_norm_into_matvec")
class FuseNormIntoMatvec(MatvecTransform):
    """An RMSNorm becomes the prologue of the linear layers that read it, and is gone.

    before:  %n = graft.rms_norm(%x, %g, eps);  %y = linear(%n, %w)
    after:   %y = graft.fused_linear(%x, %w, norm=%g, eps=eps)

    Up to three linear layers may read it: each computes the norm for itself, which is cheap beside its weights. A
    norm that anything else reads stays. Numerics: the reference is norm and product one after the other, bitwise; a
    kernel may keep the normed values in float32.

    A walk: a pattern has no word for "one to three readers", and each of them may have more fused into it already.
    """

    lacking = "the graph has no graft::rms_norm"

    def candidates(self, run: RewriteRun) -> Iterator[Node]:
        return (node for node in calls(run.gm.graph) if is_op(node, NORM, ADD_NORM))

    def find(self, run: RewriteRun, node: Node) -> Match | None:
        if is_op(node, ADD_NORM):
            explain_sum(node)
            return None
        readers = list(node.users)
        outside = next((reader for reader in readers if not is_product(reader)), None)
        if outside is not None:
            raise Refused(outside, f"{where(node)} is read by {named(outside)}")
        count = len(readers)
        need(count <= MOST, f"{{}} is read by {count} products and would be computed that often", node)
        options = options_of(node)
        x, g = options["x"], options["weight"]
        kinds = {"the input": tensor_of(x), "the norm's weight": tensor_of(g)}
        for reader in readers:
            given = product(reader)
            used = sum(value is node for value in (*reader.args, *reader.kwargs.values()))
            need(given["x"] is node and used == 1, "{} reads it as more than its input", reader)
            need(given["norm"] is None, "{} has a norm already", reader)
            kinds[f"the weight of %{reader.name}"] = tensor_of(given["weight"])
        dtypes = {what: kind.dtype for what, kind in kinds.items()}
        if len(set(dtypes.values())) > 1:
            raise Refused(node, ", ".join(f"{what} is {dtype}" for what, dtype in dtypes.items()))
        pattern = "one product" if count == 1 else f"{count} products"
        return Match(pattern, {"x": x, "norm": g}, {}, (*readers, node), tuple(readers))

    def write(self, run: RewriteRun, match: Match) -> list[Node]:
        *readers, norm = match.nodes
        options = options_of(norm)
        kept = {key: options[key] for key in ("eps", "offset", "cast_last")}
        made = []
        for reader in readers:
            given = {**product(reader), "x": options["x"], "norm": options["weight"], **kept}
            made.append(fused_product(run.editor, given, before=reader, like=reader))
            run.editor.replace(reader, made[-1])
        return made


def explain_sum(node: Node) -> None:
    """A norm that was fused with a sum no linear layer could take: a near miss where products read it."""
    normed = [user for user in node.users if is_op(user, getitem) and user.args[1] == 0]
    if any(is_product(reader) for piece in normed for reader in piece.users):
        raise Refused(
            node, f"{where(node)} also adds a residual that no product could take; a prologue is a norm alone"
        )
