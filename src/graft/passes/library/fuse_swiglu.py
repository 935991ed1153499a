"""fuse_swiglu: activation(gate) * up becomes one op."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ir.nodes import is_op, same_shape, tensor_of, tensor_val, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.patterns.needs import any_of
from graft.ir.patterns.words import choice, one_of
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

aten, ops = torch.ops.aten, torch.ops.graft


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return activated(gate) * up


def in_float(gate: Tensor, up: Tensor) -> Tensor:
    return (activated(gate.to(torch.float32)) * up.to(torch.float32)).to(gate.dtype)


def gate_in_float(gate: Tensor, up: Tensor) -> Tensor:
    return (activated(gate.to(torch.float32)) * up).to(gate.dtype)


def from_float(gate: Tensor, up: Tensor) -> Tensor:
    return activated(gate.to(torch.float32)).to(gate.dtype) * up


def activated(x: Tensor) -> Tensor:
    return choice(
        "activation",
        silu=lambda: F.silu(x),
        gelu_tanh=lambda: F.gelu(x, approximate="tanh"),
        gelu=lambda: F.gelu(x),
        relu_squared=lambda: one_of(lambda: F.relu(x).pow(2), lambda: torch.square(F.relu(x))),
        relu=lambda: F.relu(x),
    )


def fused(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ops.swiglu(gate, up, activation)


def fused_in_float(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ops.swiglu(gate, up, activation, True)


# ── spelled by hand ─────────────────────────────────────────────────────────────────────────────────────────────


def silu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def silu_fused(gate: Tensor, up: Tensor) -> Tensor:
    return ops.swiglu(gate, up)


def gelu_tanh_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3)))) * up


def gelu_tanh_fused(gate: Tensor, up: Tensor) -> Tensor:
    return ops.swiglu(gate, up, "gelu_tanh")


def gelu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    scaled = one_of(lambda: gate * math.sqrt(0.5), lambda: gate / math.sqrt(2))
    return 0.5 * gate * (1.0 + torch.erf(scaled)) * up


def gelu_fused(gate: Tensor, up: Tensor) -> Tensor:
    return ops.swiglu(gate, up, "gelu")


def quick_gelu(gate: Tensor, up: Tensor, slope: float) -> Tensor:
    return gate * torch.sigmoid(slope * gate) * up


def same_kind(match: Match) -> None:
    gate, up = tensor_val(match.tensors["gate"]), tensor_val(match.tensors["up"])
    if gate is None or up is None or not same_shape(gate, up):
        raise Refused(match.anchor, "gate and up differ in shape, so one is broadcast")
    if gate.dtype != up.dtype:
        raise Refused(match.anchor, f"gate is {gate.dtype} and up is {up.dtype}")


def not_between_casts(match: Match) -> None:
    """The larger pattern takes a `mul` that is float32 only between casts."""
    gate, readers = match.tensors["gate"], list(match.anchor.users)
    cast = is_op(gate, aten.to.dtype) and len(readers) == 1 and is_op(readers[0], aten.to.dtype)
    if cast and tensor_of(gate.args[0]).dtype == tensor_of(readers[0]).dtype:
        reason = f"the mul is float32 between {where(gate)} and {where(readers[0])}, which must go too"
        raise Refused(match.anchor, reason)
    same_kind(match)


def is_float(match: Match) -> None:
    gate = tensor_val(match.tensors["gate"])
    if gate is not None and gate.dtype != torch.float32:
        raise Refused(match.anchor, f"gelu by hand in {gate.dtype} rounds after every step, graft::swiglu once")
    same_kind(match)


SHAPES = {"gate": "b s d", "up": "b s d"}
WIDE = {"gate": "b s d : float32", "up": "b s d : float32"}
ACTIVATION = any_of(aten.silu.default, aten.gelu.default, aten.relu.default)
TANH = (aten.tanh.default, aten.pow.Tensor_Scalar)
QUICK = "x * sigmoid(c * x) is quick_gelu, whose values are not those of silu"
# the kernels of 16-bit activations are float32 inside, but may take another path for the last few values of a row:
# what is rounded after the activation, or spelled by hand, is not exact
REWRITES = (
    Rewrite(plain, fused, SHAPES, not_between_casts, needs=(ACTIVATION,)),
    Rewrite(in_float, fused_in_float, SHAPES, same_kind, needs=(ACTIVATION, aten.to.dtype)),
    Rewrite(gate_in_float, fused_in_float, SHAPES, same_kind, needs=(ACTIVATION, aten.to.dtype)),
    Rewrite(from_float, fused, SHAPES, same_kind, needs=(ACTIVATION, aten.to.dtype), exact=False),
    Rewrite(silu_by_hand, silu_fused, SHAPES, same_kind, needs=(aten.sigmoid.default,), exact=False),
    Rewrite(gelu_tanh_by_hand, gelu_tanh_fused, WIDE, is_float, needs=TANH, exact=False),
    Rewrite(gelu_by_hand, gelu_fused, WIDE, is_float, needs=(aten.erf.default,), exact=False),
    Rewrite(quick_gelu, quick_gelu, SHAPES, needs=(aten.sigmoid.default,), refuse=QUICK),
)


@TransformRegistry.register("fuse_swiglu")
class FuseSwiGLU(PatternTransform):
    """activation(gate) * up becomes one op.

    before:  %a = silu(%gate);  %y = mul(%a, %up)          (or gelu in any form, relu or its square; in either order)
    after:   %y = graft.swiglu(%gate, %up)

    Numerics: bitwise with the reference; the Triton kernel computes the activation in float32 and rounds it to the
    working dtype before it is multiplied, or after that alone, as the model does. An activation cast from float32, or
    spelled by hand (x * sigmoid(x) in any dtype, gelu in float32), may be a few roundings off.
    """

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
