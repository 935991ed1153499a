"""What the transforms share that put a norm, an activation or a sum into a linear layer: graft::fused_linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.ir.io.text import op_text
from graft.ir.nodes import calls, is_op, is_weight, tensor_of, tensor_val, where
from graft.ir.patterns.match import Refused
from graft.ir.patterns.words import constant, one_of
from graft.passes.base import Context, TransformConfig
from graft.passes.patterns import PatternTransform
from graft.passes.rewriter import Rewriter

aten, ops = torch.ops.aten, torch.ops.graft
LINEAR, FUSED = aten.linear.default, ops.fused_linear.default
# read once: torch makes a new object of every argument that is asked for
DEFAULTS: dict[str, Any] = {argument.name: argument.default_value for argument in FUSED._schema.arguments}
Device = Literal["cuda", "cpu", "meta", "native"]


@dataclass(frozen=True)
class DecodeConfig(TransformConfig):
    """devices: where the transform runs; on others it is skipped, with the reason. `native` is the CPU, where the
    graph is lowered to the native backend."""

    devices: tuple[Device, ...] = ("cuda", "native")


class InDecodeSteps(Rewriter):
    """Runs where graft's engine decodes, on the devices that it is told."""

    config: DecodeConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return elsewhere(gm, context, self.config.devices)


class MatvecPatterns(InDecodeSteps, PatternTransform):
    """Patterns that do."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
    cast_last: bool = False, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """In a pattern: a linear layer, perhaps with a norm or a residual sum fused into it."""
    return one_of(
        lambda: F.linear(x, constant(weight), bias),
        lambda: ops.fused_linear(
            x, constant(weight), bias, None, norm, eps, offset, cast_last, "none", False, residual
        ),
    )


def elsewhere(gm: GraphModule, context: Context, devices: tuple[Device, ...]) -> str | None:
    """Why the graph is not one for these transforms, or None."""
    if context.route != "decoder":
        return "the module is not run by graft's engine, so it has no decode steps"
    device = device_of(gm)
    if applies(device, context, devices):
        return None
    if device == "cpu":
        return "on cpu the GEMM runs by itself; fused_linear would be its reference"
    return f"the graph is on {device}, the transform is for {', '.join(devices) or 'no device'}"


def applies(device: str, context: Context, devices: tuple[Device, ...]) -> bool:
    return device in devices or (device == "cpu" and context.backend == "native" and "native" in devices)


def not_for(device: str, context: Context, devices: tuple[Device, ...]) -> str | None:
    """Why a transform of attention leaves a graph on this device alone, or None."""
    if applies(device, context, devices):
        return None
    named = ("the native backend" if name == "native" else name for name in devices)
    return f"it is for {' and '.join(named)}, the graph is on {device}"


def device_of(gm: GraphModule) -> str:
    """The kind of device of the graph's first computed tensor."""
    made = (tensor_val(node) for node in calls(gm.graph))
    return next((tensor.device.type for tensor in made if tensor is not None), "cpu")


def is_linear(node: object) -> bool:
    """A linear layer, with or without something fused into it."""
    return is_op(node, LINEAR, FUSED)


def check_weight(linear: Node) -> None:
    """Refused where the weight is none that graft::fused_linear reads."""
    weight = linear.args[1]
    if not is_weight(weight):
        raise Refused(linear, f"the weight of {where(linear)} is computed in the graph")
    if tensor_of(weight).dim() != 2:
        raise Refused(linear, f"the weight of {where(linear)} is a vector")


def named(node: object) -> str:
    """`%mul (model.layers.0, …), aten.mul`."""
    return f"{where(node)}, {op_text(node)}" if isinstance(node, Node) else str(node)
