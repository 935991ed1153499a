"""What the transforms share that put a norm, an activation or a sum into a linear layer: graft::fused_linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import Match, NearMiss, check_outside
from graft.graph.memory import mutated_roots
from graft.graph.nodes import calls, is_op, is_weight, module_path, tensor_of, tensor_val, where
from graft.graph.text import op_text
from graft.transforms.base import BaseTransform, Context, Outcome, TransformConfig, erase_dead, no_match_reason
from graft.transforms.report import MatchRecord
from graft.transforms.walk import NoFit

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


class MatvecTransform(BaseTransform):
    """Subclasses say what there is at a call (`find`) and write it (`write`)."""

    config: DecodeConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    def candidates(self, gm: GraphModule) -> Iterator[Node]:
        """The calls at which a match could end."""
        raise NotImplementedError

    def lacking(self) -> str:
        """The reason where there is no candidate at all."""
        raise NotImplementedError

    def find(self, node: Node) -> Match | None:
        """What fits at this call; NoFit where it nearly does, None where it is something else."""
        raise NotImplementedError

    def write(self, editor: Editor, match: Match) -> list[Node]:
        """Puts the replacement in place and returns the nodes that it made."""
        raise NotImplementedError

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        reason = elsewhere(gm, context, self.config.devices)
        if reason:
            return Outcome(reason=reason, skipped=True)
        order = {node: index for index, node in enumerate(gm.graph.nodes)}
        mutated = mutated_roots(gm.graph)
        matches: list[Match] = []
        misses: list[NearMiss] = []
        for node in self.candidates(gm):
            try:
                match = self.find(node)
                if match is not None:
                    checked = check_outside(match, order, mutated)
                    if not isinstance(checked, Match):
                        raise NoFit(checked[0] or node, checked[1])
                    matches.append(checked)
            except NoFit as stop:
                misses.append(NearMiss(self.name, where(node), f"%{stop.node.name}", stop.reason, 1, 2))
        editor = Editor(gm, self.name)
        records = tuple(self.rewrite(editor, match) for match in matches)
        reason = no_match_reason(misses) if misses else self.lacking()
        return Outcome(records, tuple(misses), "" if records else reason)

    def rewrite(self, editor: Editor, match: Match) -> MatchRecord:
        anchor, path = where(match.anchor), module_path(match.anchor)
        replaced = tuple(node.name for node in match.nodes)
        made = self.write(editor, match)
        erase_dead(editor, match.nodes)
        return MatchRecord(anchor, path, replaced, tuple(node.name for node in made), match.pattern)


def elsewhere(gm: GraphModule, context: Context, devices: tuple[Device, ...]) -> str:
    """Why the graph is not one for these transforms, or ''."""
    if context.route != "decoder":
        return "the module is not run by graft's engine, so it has no decode steps"
    device = device_of(gm)
    if applies(device, context, devices):
        return ""
    if device == "cpu":
        return "on cpu the product runs by itself; fused_linear would be its reference"
    return f"the graph is on {device}, the transform is for {', '.join(devices) or 'no device'}"


def applies(device: str, context: Context, devices: tuple[Device, ...]) -> bool:
    return device in devices or (device == "cpu" and context.backend == "native" and "native" in devices)


def not_for(device: str, context: Context, devices: tuple[Device, ...]) -> str:
    """Why a transform of attention leaves a graph on this device alone, or ''."""
    if applies(device, context, devices):
        return ""
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
    """The arguments of a linear layer as those of graft::fused_linear, all of them; NoFit where they cannot be."""
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
    """NoFit at the first of `nodes`, which the reason names, where it is not so. The text is made only then: places
    are read off stack traces, 30 µs each."""
    if not truth:
        raise NoFit(nodes[0], reason.format(*(where(node) for node in nodes)))


def named(node: object) -> str:
    """`%mul (model.layers.0, …), aten.mul`."""
    return f"{where(node)}, {op_text(node)}" if isinstance(node, Node) else str(node)
