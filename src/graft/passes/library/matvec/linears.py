"""What the transforms share that put a norm, an activation or a sum into a linear layer: graft::fused_linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
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


class MatvecTransform(Rewriter):
    """Runs where graft's engine decodes, on the devices that it is told."""

    config: DecodeConfig  # pyrefly: ignore
    find_first = True

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return elsewhere(gm, context, self.config.devices)


class MatvecPatterns(PatternTransform):
    """The same, for two plain functions."""

    config: DecodeConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return elsewhere(gm, context, self.config.devices)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, offset: float, cast_last: bool
) -> Tensor:
    """In a pattern: a linear layer, perhaps with a norm fused into it."""
    return one_of(
        lambda: F.linear(x, constant(weight), bias),
        lambda: ops.fused_linear(x, constant(weight), bias, None, norm, eps, offset, cast_last),
    )


def elsewhere(gm: GraphModule, context: Context, devices: tuple[Device, ...]) -> str | None:
    """Why the graph is not one for these transforms, or None."""
    if context.route != "decoder":
        return "the module is not run by graft's engine, so it has no decode steps"
    device = device_of(gm)
    if applies(device, context, devices):
        return None
    if device == "cpu":
        return "on cpu the product runs by itself; fused_linear would be its reference"
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


def is_product(node: object) -> bool:
    """A linear layer, with or without something fused into it."""
    return is_op(node, LINEAR, FUSED)


def product(node: Node) -> dict[str, Any]:
    """The arguments of a linear layer as those of graft::fused_linear, all of them; Refused where they cannot be."""
    given = {
        **DEFAULTS,
        **dict(zip(DEFAULTS, node.args, strict=False)),
        **node.kwargs,
    }  # both begin with x, weight, bias
    weight = given["weight"]
    need(is_weight(weight), "the weight of {} is computed in the graph", node)
    need(tensor_of(weight).dim() == 2, "the weight of {} is a vector", node)
    return given


def fused_product(editor: Editor, given: dict[str, Any], *, before: Node, like: Node) -> Node:
    """A call of graft::fused_linear above `before`; defaults at its end are left out."""
    args = [given[name] for name in DEFAULTS]
    defaults = list(DEFAULTS.values())
    while len(args) > 2 and args[-1] == defaults[len(args) - 1]:
        args.pop()
    return editor.call(FUSED, args, before=before, like=like)


def need(truth: bool, reason: str, *nodes: Node) -> None:
    """Refused at the first of `nodes`, which the reason names, where it is not so. The text is made only then: places
    are read off stack traces, 30 µs each."""
    if not truth:
        raise Refused(nodes[0], reason.format(*(where(node) for node in nodes)))


def named(node: object) -> str:
    """`%mul (model.layers.0, …), aten.mul`."""
    return f"{where(node)}, {op_text(node)}" if isinstance(node, Node) else str(node)
