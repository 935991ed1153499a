"""fuse_swiglu: activation(gate) * up becomes one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.graph.match import Match
from graft.graph.nodes import same_shape, tensor_val
from graft.transforms.base import PatternTransform, Rewrite
from graft.transforms.registry import TransformRegistry


def silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def silu_fused(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.graft.swiglu(gate, up)


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def gelu_tanh_fused(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.graft.swiglu(gate, up, "gelu_tanh")


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def gelu_fused(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.graft.swiglu(gate, up, "gelu")


def same_kind(match: Match) -> str | None:
    gate, up = tensor_val(match.tensors["gate"]), tensor_val(match.tensors["up"])
    if gate is None or up is None or not same_shape(gate, up):
        return "gate and up differ in shape, so one is broadcast"
    return None if gate.dtype == up.dtype else f"gate is {gate.dtype} and up is {up.dtype}"


aten = torch.ops.aten
SHAPES = {"gate": "b s d", "up": "b s d"}


@TransformRegistry.register("fuse_swiglu")
class FuseSwiGLU(PatternTransform):
    """activation(gate) * up becomes one op.

    before:  %a = silu(%gate);  %y = mul(%a, %up)          (or gelu, tanh or erf form; operands in either order)
    after:   %y = graft.swiglu(%gate, %up)

    Numerics: bitwise with the reference; the Triton kernel computes the activation in float32 and rounds it to the
    working dtype before the product, as eager does.
    """

    def rewrites(self) -> Sequence[Rewrite]:
        forms = (
            (silu, silu_fused, aten.silu.default),
            (gelu_tanh, gelu_tanh_fused, aten.gelu.default),
            (gelu, gelu_fused, aten.gelu.default),
        )
        return [Rewrite(pattern, fused, SHAPES, same_kind, needs=(op,)) for pattern, fused, op in forms]
