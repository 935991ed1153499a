"""fuse_swiglu: activation(gate) * up becomes one op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ir.nodes import is_op, same_shape, tensor_of, tensor_val, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

aten = torch.ops.aten


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


# ── float32 inside ──────────────────────────────────────────────────────────────────────────────────────────────


def in_float(plain: Callable[..., Tensor], activation: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(activation(gate.float()) * up.float()).to(dtype), and its op."""

    def pattern(gate: Tensor, up: Tensor) -> Tensor:
        return plain(gate.to(torch.float32), up.to(torch.float32)).to(gate.dtype)

    def fused(gate: Tensor, up: Tensor) -> Tensor:
        return torch.ops.graft.swiglu(gate, up, activation, True)

    pattern.__name__ = f"{plain.__name__}_in_float"
    return pattern, fused


def silu_from_float(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.to(torch.float32)).to(gate.dtype) * up


def gelu_tanh_from_float(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate.to(torch.float32), approximate="tanh").to(gate.dtype) * up


def gelu_from_float(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate.to(torch.float32)).to(gate.dtype) * up


# ── spelled by hand ─────────────────────────────────────────────────────────────────────────────────────────────


def silu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def gelu_tanh_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3)))) * up


def gelu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1.0 + torch.erf(gate * math.sqrt(0.5))) * up


def gelu_by_division(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1.0 + torch.erf(gate / math.sqrt(2))) * up


def quick_gelu(gate: Tensor, up: Tensor, slope: float) -> Tensor:
    return gate * torch.sigmoid(slope * gate) * up


def squared_relu(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate).pow(2) * up


def same_kind(match: Match) -> None:
    gate, up = tensor_val(match.tensors["gate"]), tensor_val(match.tensors["up"])
    if gate is None or up is None or not same_shape(gate, up):
        raise Refused(match.anchor, "gate and up differ in shape, so one is broadcast")
    if gate.dtype != up.dtype:
        raise Refused(match.anchor, f"gate is {gate.dtype} and up is {up.dtype}")


def not_between_casts(match: Match) -> None:
    """The larger pattern takes a product that is float32 only between casts."""
    gate, readers = match.tensors["gate"], list(match.anchor.users)
    cast = is_op(gate, aten.to.dtype) and len(readers) == 1 and is_op(readers[0], aten.to.dtype)
    if cast and tensor_of(gate.args[0]).dtype == tensor_of(readers[0]).dtype:
        reason = f"the product is float32 between {where(gate)} and {where(readers[0])}, which must go too"
        raise Refused(match.anchor, reason)
    same_kind(match)


def is_float(match: Match) -> None:
    gate = tensor_val(match.tensors["gate"])
    if gate is not None and gate.dtype != torch.float32:
        raise Refused(match.anchor, f"gelu by hand in {gate.dtype} rounds after every step, graft::swiglu once")
    same_kind(match)


SHAPES = {"gate": "b s d", "up": "b s d"}
WIDE = {"gate": "b s d : float32", "up": "b s d : float32"}
# pattern, op, what it needs
PLAIN = (
    (silu, silu_fused, (aten.silu.default,)),
    (gelu_tanh, gelu_tanh_fused, (aten.gelu.default,)),
    (gelu, gelu_fused, (aten.gelu.default,)),
)
IN_FLOAT = (
    (*in_float(silu, "silu"), (aten.silu.default, aten.to.dtype)),
    (*in_float(gelu_tanh, "gelu_tanh"), (aten.gelu.default, aten.to.dtype)),
    (*in_float(gelu, "gelu"), (aten.gelu.default, aten.to.dtype)),
)
# the kernels of 16-bit activations are float32 inside, but may take another path for the last few values of a row
ROUNDED = (
    (silu_from_float, silu_fused, (aten.silu.default, aten.to.dtype)),
    (gelu_tanh_from_float, gelu_tanh_fused, (aten.gelu.default, aten.to.dtype)),
    (gelu_from_float, gelu_fused, (aten.gelu.default, aten.to.dtype)),
    (silu_by_hand, silu_fused, (aten.sigmoid.default,)),
)
BY_HAND = (
    (gelu_tanh_by_hand, gelu_tanh_fused, (aten.tanh.default, aten.pow.Tensor_Scalar)),
    (gelu_by_hand, gelu_fused, (aten.erf.default,)),
    (gelu_by_division, gelu_fused, (aten.erf.default, aten.div.Tensor)),
)
REFUSED = (
    (quick_gelu, (aten.sigmoid.default,), "x * sigmoid(c * x) is quick_gelu, whose values are not those of silu"),
    (squared_relu, (aten.relu.default,), "relu squared is none of the activations of graft::swiglu"),
)
REWRITES = (
    *(Rewrite(pattern, fused, SHAPES, not_between_casts, needs=needs) for pattern, fused, needs in PLAIN),
    *(Rewrite(pattern, fused, SHAPES, same_kind, needs=needs) for pattern, fused, needs in IN_FLOAT),
    *(Rewrite(pattern, fused, SHAPES, same_kind, needs=needs, exact=False) for pattern, fused, needs in ROUNDED),
    *(Rewrite(pattern, fused, WIDE, is_float, needs=needs, exact=False) for pattern, fused, needs in BY_HAND),
    *(Rewrite(other, other, SHAPES, needs=needs, refuse=reason) for other, needs, reason in REFUSED),
)


@TransformRegistry.register("fuse_swiglu")
class FuseSwiGLU(PatternTransform):
    """activation(gate) * up becomes one op.

    before:  %a = silu(%gate);  %y = mul(%a, %up)          (or gelu, tanh or erf form; operands in either order)
    after:   %y = graft.swiglu(%gate, %up)

    Numerics: bitwise with the reference; the Triton kernel computes the activation in float32 and rounds it to the
    working dtype before the product, or after it alone, as the model does. An activation cast from float32, or
    spelled by hand (x * sigmoid(x) in any dtype, gelu in float32), may be a few roundings off.
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
