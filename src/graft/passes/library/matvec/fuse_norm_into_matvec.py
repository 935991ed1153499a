"""fuse_norm_into_matvec: an RMSNorm becomes the prologue of the linear layers that read it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

import torch
from torch import Tensor
from torch.fx import Node

from graft.ir.nodes import is_op, options_of, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.library.matvec.linears import MatvecPatterns, check_weight, is_linear, linear, named
from graft.passes.patterns import Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft
NORM, ADD_NORM = ops.rms_norm.default, ops.add_rms_norm.default
MOST = 3  # linear layers that may each compute the norm again: queries, keys and values that were not merged


def normed_linear(
    x: Tensor, weight: Tensor, norm: Tensor, eps: float, bias: Tensor | None = None, residual: Tensor | None = None,
    offset: float = 0.0, cast_last: bool = False,
) -> Tensor:  # fmt: skip
    return linear(ops.rms_norm(x, norm, eps, offset, cast_last), weight, bias, residual=residual)


def fused(
    x: Tensor, weight: Tensor, norm: Tensor, eps: float, bias: Tensor | None, residual: Tensor | None, offset: float,
    cast_last: bool,
) -> Tensor:  # fmt: skip
    return ops.fused_linear(x, weight, bias, None, norm, eps, offset, cast_last, residual=residual)


def check_norm(match: Match) -> None:
    check_taken(match, next(node for node in match.nodes if is_op(node, NORM)))


def check_taken(match: Match, norm: Node) -> None:
    """All that read the norm must take it, or it would be computed for nothing."""
    readers = list(norm.users)
    check_readers(norm, readers)
    kinds = {"the input": match.tensors["x"], "the norm's weight": match.tensors["norm"]}
    for reader in readers:
        used = sum(value is norm for value in (*reader.args, *reader.kwargs.values()))
        if used > 1:
            raise Refused(reader, f"{where(reader)} reads it as more than its input")
        check_weight(reader)
        kinds[f"the weight of %{reader.name}"] = reader.args[1]
    dtypes = {what: tensor_of(node).dtype for what, node in kinds.items()}
    if len(set(dtypes.values())) > 1:
        raise Refused(norm, ", ".join(f"{what} is {dtype}" for what, dtype in dtypes.items()))


def check_readers(norm: Node, readers: Sequence[Node]) -> None:
    outside = next((reader for reader in readers if not is_linear(reader)), None)
    if outside is not None:
        raise Refused(outside, f"{where(norm)} is read by {named(outside)}")
    taken = next((node for node in readers if is_op(node, ops.fused_linear.default) and normed(node)), None)
    if taken is not None:
        raise Refused(taken, f"{where(taken)} has a norm already")
    count = len(readers)
    if count > MOST:
        raise Refused(norm, f"{where(norm)} is read by {count} linear layers and would be computed that often")


def normed(linear: Node) -> bool:
    return options_of(linear)["norm"] is not None


SHAPES = {"x": "b s k", "weight": "n k", "norm": "k", "bias": "n", "residual": "b s n"}
REWRITES = (Rewrite(normed_linear, fused, SHAPES, check_norm, allow_readers=True, needs=(NORM,)),)


@TransformRegistry.register("fuse_norm_into_matvec")
class FuseNormIntoMatvec(MatvecPatterns):
    """An RMSNorm becomes the prologue of the linear layers that read it, and is gone.

    before:  %n = graft.rms_norm(%x, %g, eps);  %y = linear(%n, %w)
    after:   %y = graft.fused_linear(%x, %w, norm=%g, eps=eps)

    Up to three linear layers may read it: each computes the norm for itself, which is cheap beside its weights. A
    norm that anything else reads stays. Numerics: the reference is norm and GEMM one after the other, bitwise; a
    kernel may keep the normed values in float32.
    """

    lacking = "the graph has no graft::rms_norm"
    explained = (NORM, ADD_NORM)

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def explain(self, node: Node) -> None:
        """A norm that something else reads, or that was fused with a sum which no linear layer could take."""
        if is_op(node, NORM):
            check_readers(node, list(node.users))
            return
        results = [user for user in node.users if is_op(user, getitem) and user.args[1] == 0]
        if any(is_linear(reader) for result in results for reader in result.users):
            raise Refused(
                node,
                f"{where(node)} also adds a residual that no linear layer could take; a prologue is a norm alone",
            )
