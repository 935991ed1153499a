"""GEMMs of a graph, and how one with a quantized weight replaces one without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor, attribute
from graft.ir.nodes import calls, is_op, options_of
from graft.ir.patterns.match import Match, Refused
from graft.passes.base import Context
from graft.passes.library.matvec.linears import DEFAULTS
from graft.passes.library.quantize.quantization import Quantized, WeightReaders, release
from graft.passes.library.quantize.stacked_experts import (
    find_experts,
    is_packed,
    pack_stack,
    put_experts,
    routed_by,
    stacks_of,
)
from graft.passes.rewriter import RewriteRun

aten, ops = torch.ops.aten, torch.ops.graft
LINEAR, MM, ADDMM = aten.linear.default, aten.mm.default, aten.addmm.default
FUSED, EXPERTS, LATENT = ops.fused_linear.default, ops.moe_experts.default, ops.paged_latent_attention.default
FIELDS = [argument.name for argument in FUSED._schema.arguments]
TRANSFORM = "quantize_linear"
LATENT_STAYS = "the weight of latent attention is no linear layer's; it stays"


def linear_calls(gm: GraphModule) -> list[Node]:
    """Every GEMM with a weight that is not quantized yet."""
    found = [node for node in calls(gm.graph) if is_op(node, LINEAR, MM, ADDMM, FUSED)]
    return [node for node in found if not is_op(node, FUSED) or operands(node)["scale"] is None]


def others(gm: GraphModule) -> Iterator[Node]:
    """Calls that are no linear layers: every mixture whose experts are not packed yet, and latent attention."""
    return (node for node in calls(gm.graph) if is_op(node, LATENT) or (is_op(node, EXPERTS) and not is_packed(node)))


def operands(node: Node) -> dict[str, Any]:
    """The arguments that graft::fused_linear takes in place of this call, by name."""
    if is_op(node, FUSED):
        return options_of(node)
    if is_op(node, ADDMM):
        return {**DEFAULTS, "bias": node.args[0], "x": node.args[1], "weight": node.args[2]}
    bias = node.args[2] if len(node.args) > 2 else None
    return {**DEFAULTS, "x": node.args[0], "weight": node.args[1], "bias": bias}


def check_call(node: Node) -> None:
    """Refused where this call is no linear layer."""
    if not is_op(node, ADDMM):
        return
    if node.kwargs or len(node.args) > 3:
        raise Refused(node, "addmm with beta or alpha")
    if node.args[0].meta["val"].dim() != 1:
        raise Refused(node, "what is added is not one row")


def norm_of(gm: GraphModule, given: dict[str, Any]) -> tuple[str, float]:
    """The weight of the norm that goes into the GEMM's, and what is added to it; or neither: it may change."""
    norm = given["norm"]
    if given["center"]:
        return "", 0.0
    if not isinstance(norm, Node) or norm.op != "get_attr":
        return "", 0.0
    if not isinstance(attribute(gm, str(norm.target)), torch.nn.Parameter):
        return "", 0.0
    return str(norm.target), given["offset"] if given["cast_last"] else 0.0


def parameters(editor: Editor, made: Quantized, before: Node) -> tuple[Node, Node]:
    """The weight and its scale beside the old weight, and the nodes that read them."""
    owner, _, leaf = made.name.rpartition(".")
    prefix = f"{owner}." if owner else ""
    q = editor.parameter(f"{prefix}{leaf}_{made.format}", made.q, before=before, like=before)
    return q, editor.parameter(f"{prefix}{leaf}_scale", made.scale, before=before, like=before)


def put_linear(
    editor: Editor, node: Node, given: dict[str, Any], made: Quantized, q: Node, scale: Node
) -> list[Node]:
    full = {**given, "weight": q, "scale": scale}
    if made.norm:
        full |= {"norm": None, "offset": 0.0, "cast_last": False, "normed": True}
    args = [full[name] for name in FIELDS]
    defaults = [argument.default_value for argument in FUSED._schema.arguments]
    while args[-1] is defaults[len(args) - 1] or args[-1] == defaults[len(args) - 1]:
        args.pop()
    return put(editor, node, editor.call(FUSED, args, before=node, like=node), q, scale)


def put(editor: Editor, node: Node, new: Node, q: Node, scale: Node) -> list[Node]:
    """`new`, which reads the quantized weight, in place of `node`; what was made."""
    editor.replace(node, new)
    return [q, scale, new]


def weight_match(node: Node, format: str) -> Match:
    return Match(format, {}, {}, (node,), (node,))


class Quantizing(RewriteRun):
    """Weights one after another: each is freed, where it may be, before the next is made."""

    def __init__(self, gm: GraphModule, context: Context, on_error: str, skip: Sequence[str]) -> None:
        super().__init__(gm, context, Editor(gm, TRANSFORM))
        self.layers, self.skip = WeightReaders.of(gm), skip
        # a roll-back needs the old weights
        self.owned = context.owned if on_error == "raise" else None
        self.done: list[Quantized] = []
        self.made: dict[Node, tuple[Quantized, ...]] = {}  # by the call that reads it now
        self.routers = routed_by(gm)

    @property
    def kept(self) -> str:
        """Why the float weights are still in memory, or '' where they are not."""
        if self.owned is not None:
            return ""
        return "on_error: skip may need them" if self.context.owned is not None else "the module is the caller's"

    def candidates(self) -> Iterable[Node]:
        raise NotImplementedError

    def find(self, node: Node) -> Match | None:
        raise NotImplementedError

    def write(self, node: Node) -> list[Node]:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    # ── experts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def format_of(self, name: str) -> str:
        raise NotImplementedError

    def find_experts(self, node: Node) -> Match:
        formats = {stack.name: self.format_of(stack.name) for stack in stacks_of(node)}
        return find_experts(self.layers, node, self.skip, formats)

    def write_experts(self, node: Node, kinds: Mapping[str, str], search: bool = True) -> list[Node]:
        """One stack after the other; kinds: what a format is called here."""
        read, done = {}, []
        for stack in stacks_of(node):
            if self.context.lazy is not None and attribute(self.gm, stack.name) in self.context.lazy:
                self.context.lazy.fill(attribute(self.gm, stack.name))
            made = pack_stack(self.gm, stack, kinds[self.format_of(stack.name)], search, self.context.shared)
            read[stack.side] = parameters(self.editor, made, node)
            done.append(made)
            if self.owned is not None:
                release(self.gm, self.owned, stack.name)
        self.made[node] = tuple(done)
        self.done += done
        return put_experts(self.gm, self.editor, node, read)
