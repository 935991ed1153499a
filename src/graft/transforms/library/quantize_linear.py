"""quantize_linear: the weights of linear layers in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor, attribute
from graft.graph.match import NearMiss
from graft.graph.nodes import calls, is_op, module_path, options_of, where
from graft.transforms.base import BaseTransform, Context, Outcome, TransformConfig
from graft.transforms.decode import DEFAULTS
from graft.transforms.quantization import (
    How,
    Layers,
    Quantized,
    Saving,
    pattern_fits,
    quantize_weight,
    release,
    totals,
    weight_problem,
)
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

aten, ops = torch.ops.aten, torch.ops.graft
LINEAR, MM, ADDMM = aten.linear.default, aten.mm.default, aten.addmm.default
FUSED, EXPERTS = ops.fused_linear.default, ops.moe_experts.default
OUTPUT_HEAD = "lm_head"
FIELDS = [argument.name for argument in FUSED._schema.arguments]


@dataclass(frozen=True)
class QuantizeConfig(TransformConfig):
    """skip: globs for the names of parameters, or of any run of their parts, that stay as they are. head: the format
    of the output head, `none` to leave it. search: of int4, the clipping of each group that loses least, instead of
    its largest magnitude."""

    format: Literal["int8", "int4", "fp8"] = "int8"
    head: Literal["int8", "int4", "fp8", "none"] = "int8"
    search: bool = True
    skip: tuple[str, ...] = ()


@TransformRegistry.register("quantize_linear")
class QuantizeLinear(BaseTransform):
    """Weights of linear layers as int8 (a scale a row), fp8 (e4m3, a scale a row) or int4 (a scale each 128).

    before:  %y = linear(%x, %w, %b);   %z = graft.fused_linear(%x, %v, norm=%g, eps=…);   %u = addmm(%b, %x, %t)
    after:   %y = graft.fused_linear(%x, %q, %b, %s);   %z = graft.fused_linear(%x, %r, scale=%t, eps=…, normed=True)

    Only parameters that nothing else reads; a tied embedding, what `skip` names and experts stay as they are, each
    with its reason. The output head has 8 bits in every format (`head`). The weight of a norm goes into the product's
    before that is rounded, and with it a sixth of the kernel's instructions. Layer by layer; where the engine loaded
    the module itself, the old weight is given up as soon as the new one is there. Numerics: they change by design.
    Each weight is checked to be the nearest number that its scale can give (ops/fused_linear/rounding.py), and the
    record says how far that is; products are summed in float32.
    """

    config: QuantizeConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return QuantizeConfig

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        layers, editor = Layers.of(gm), Editor(gm, self.name)
        done: list[tuple[MatchRecord, Quantized]] = []
        misses = [near_miss(node, "experts are no linear layers; their weights stay") for node in experts(gm)]
        # a roll-back needs the old weights
        owned = context.owned if self.config.on_error == "raise" else None
        for node in linear_calls(gm):
            given = operands(node)
            problem = call_problem(node) or weight_problem(layers, given["weight"], self.skipped())
            if problem:
                misses.append(near_miss(node, problem))
                continue
            weight = given["weight"]
            how = How(
                self.format_of(str(weight.target)), self.config.search, is_op(node, MM, ADDMM), *norm_of(gm, given)
            )
            made = quantize_weight(gm, str(weight.target), how, context.shared)
            done.append((rewrite(editor, node, given, made), made))
            if owned is not None:
                release(gm, owned, str(weight.target))
        if not done:
            reasons = list(dict.fromkeys(miss.reason for miss in misses))
            return Outcome((), tuple(misses), "; ".join(reasons[:3]) or "the graph has no linear layer")
        context.outputs["quantized"] = Saving(self.config.format, sum(made.before - made.after for _, made in done))
        context.notes += totals([made for _, made in done], misses, kept_because(owned, context))
        context.notes += [f"quantize_linear: skip names no weight: {p!r}" for p in self.idle_patterns(layers)]
        return Outcome(tuple(record for record, _ in done), tuple(misses))

    def skipped(self) -> tuple[str, ...]:
        return (*self.config.skip, OUTPUT_HEAD) if self.config.head == "none" else self.config.skip

    def format_of(self, name: str) -> str:
        return self.config.head if pattern_fits(OUTPUT_HEAD, name) else self.config.format

    def idle_patterns(self, layers: Layers) -> list[str]:
        """Patterns that the user gave and that fit nothing."""
        return [p for p in self.config.skip if not any(pattern_fits(p, name) for name in layers.names)]


def kept_because(owned: Any, context: Context) -> str:
    """Why the float weights are still in memory, or '' where they are not."""
    if owned is not None:
        return ""
    return "on_error: skip may need them" if context.owned is not None else "the module is the caller's"


def linear_calls(gm: GraphModule) -> list[Node]:
    """Every product with a weight that is not quantized yet."""
    found = [node for node in calls(gm.graph) if is_op(node, LINEAR, MM, ADDMM, FUSED)]
    return [node for node in found if not is_op(node, FUSED) or operands(node)["scale"] is None]


def experts(gm: GraphModule) -> Iterator[Node]:
    return (node for node in calls(gm.graph) if is_op(node, EXPERTS))


def operands(node: Node) -> dict[str, Any]:
    """The arguments that graft::fused_linear takes in the place of this call, by name."""
    if is_op(node, FUSED):
        return options_of(node)
    if is_op(node, ADDMM):
        return {**DEFAULTS, "bias": node.args[0], "x": node.args[1], "weight": node.args[2]}
    bias = node.args[2] if len(node.args) > 2 else None
    return {**DEFAULTS, "x": node.args[0], "weight": node.args[1], "bias": bias}


def call_problem(node: Node) -> str | None:
    """Why this call is no linear layer, or None."""
    if not is_op(node, ADDMM):
        return None
    if node.kwargs or len(node.args) > 3:
        return "addmm with beta or alpha"
    bias = node.args[0].meta["val"]
    return None if bias.dim() == 1 else "what is added is not one row"


def norm_of(gm: GraphModule, given: dict[str, Any]) -> tuple[str, float]:
    """The weight of the norm that goes into the product's, and what is added to it; or neither: it may change."""
    norm = given["norm"]
    if not isinstance(norm, Node) or norm.op != "get_attr":
        return "", 0.0
    if not isinstance(attribute(gm, str(norm.target)), torch.nn.Parameter):
        return "", 0.0
    return str(norm.target), given["offset"] if given["cast_last"] else 0.0


def rewrite(editor: Editor, node: Node, given: dict[str, Any], made: Quantized) -> MatchRecord:
    weight = given["weight"]
    owner = made.name.rpartition(".")[0]
    prefix = f"{owner}." if owner else ""
    leaf = made.name.rpartition(".")[2]
    q = editor.parameter(f"{prefix}{leaf}_{made.format}", made.q, before=node, like=node)
    scale = editor.parameter(f"{prefix}{leaf}_scale", made.scale, before=node, like=node)
    full = {**given, "weight": q, "scale": scale}
    if made.norm:
        full |= {"norm": None, "offset": 0.0, "cast_last": False, "normed": True}
    args = [full[name] for name in FIELDS]
    defaults = [argument.default_value for argument in FUSED._schema.arguments]
    while args[-1] is defaults[len(args) - 1] or args[-1] == defaults[len(args) - 1]:
        args.pop()
    new = editor.call(FUSED, args, before=node, like=node)
    names = (q.name, scale.name, new.name)
    record = MatchRecord(where(node), module_path(node), (node.name,), names, made.format, made.proof, made.note)
    editor.replace(node, new)
    editor.graph.erase_node(node)
    for unused in (weight, given["norm"]):
        if isinstance(unused, Node) and not unused.users:
            editor.graph.erase_node(unused)
    return record


def near_miss(node: Node, reason: str) -> NearMiss:
    return NearMiss("quantize_linear", where(node), f"%{node.name}", reason, 1, 1)
