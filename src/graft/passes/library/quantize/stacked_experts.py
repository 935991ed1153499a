"""The experts of a mixture as quantize_linear sees them: two stacks of weights that one call reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor, attribute
from graft.ir.nodes import args_of, is_op, options_of, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.storage import identity
from graft.passes.library.quantize.quantization import Quantized, WeightReaders, check_weight
from graft.passes.library.shard.experts import stored
from graft.weights.pack_rows import KIND
from graft.weights.stacked import StackLayout, abstract_stack, in_halves, pack_stacked

ops, TRANSPOSE = torch.ops.graft, torch.ops.aten.transpose.int
STACKS = ("gate_up", "down")
THROUGH = (
    torch.ops.aten.to.dtype, torch.ops.aten.slice.Tensor, torch.ops.aten.reshape.default, torch.ops.aten.view.default,
    torch.ops.aten.add.Tensor,
)  # fmt: skip


@dataclass(frozen=True)
class ExpertStack:
    """One of the two: the parameter, how it lies, and the transpose that the call reads it through."""

    side: str
    weight: Node
    layout: StackLayout

    @property
    def name(self) -> str:
        return str(self.weight.target)


def stacks_of(node: Node) -> tuple[ExpertStack, ...]:
    given, found = options_of(node), []
    for side in STACKS:
        weight, transposed = stored(given[side])
        gated = side == "gate_up"
        found.append(ExpertStack(side, weight, StackLayout(transposed, gated, gated and bool(given["interleaved"]))))
    return tuple(found)


def is_packed(node: Node) -> bool:
    return options_of(node)["gate_up_scale"] is not None


def find_experts(layers: WeightReaders, node: Node, skip: Sequence[str], formats: Mapping[str, str]) -> Match:
    """Both stacks, or neither: kernels read them in one format. formats: by the names of the weights."""
    given = options_of(node)
    for stack in stacks_of(node):
        read = given[stack.side]
        if read is not stack.weight and len(read.users) > 1:
            raise Refused(node, f"{where(read)} has other readers too")
        check_weight(layers, node, stack.weight, skip, dims=3)
        format = formats[stack.name]
        if format == "file":
            raise Refused(
                node, f"{stack.name} was dequantized when the file was read; --quantize int8 or int4 packs experts"
            )
    if given["interleaved"] and given["gate_up_bias"] is not None:
        bias = given["gate_up_bias"]
        parameter = isinstance(bias, Node) and bias.op == "get_attr"
        if not parameter or not isinstance(attribute(layers.gm, str(bias.target)), torch.nn.Parameter):
            raise Refused(
                node, f"gate and up take turns, and the bias {where(bias)} is no parameter to be put in order"
            )
    kinds = sorted(set(formats.values()))
    if len(kinds) > 1:
        raise Refused(node, f"gate_up and down would be {' and '.join(kinds)}, which no kernel reads together")
    transposes = (given[side] for side in STACKS if is_op(given[side], TRANSPOSE))
    return Match(kinds[0], {}, {}, (*transposes, node), (node,))


def pack_stack(
    gm: GraphModule, stack: ExpertStack, format: str, search: bool, shared: dict[Any, Any] | None
) -> Quantized:
    """format: int8, int4 or fp8; of native tiles q8 or q4."""
    weight = attribute(gm, stack.name).detach()
    key = ("quantize_linear", format, search, stack.layout, identity(weight))
    if shared is not None and key in shared:
        return shared[key]
    if weight.is_meta and format not in KIND.values():
        return Quantized(stack.name, format, *abstract_stack(weight, format, stack.layout), None, weight.nbytes)
    packed = pack_stacked(weight, format, stack.layout, stack.name, search)
    made = Quantized(stack.name, format, *packed, weight.nbytes)
    if shared is not None:
        shared[key] = made
    return made


def put_experts(gm: GraphModule, editor: Editor, node: Node, read: Mapping[str, tuple[Node, Node]]) -> list[Node]:
    """The call with packed stacks, gate and up in halves; `read`: of each side the nodes of weight and scale."""
    given: dict[str, Any] = dict(options_of(node))
    made: list[Node] = []
    for side, (q, scale) in read.items():
        given |= {side: q, f"{side}_scale": scale}
        made += [q, scale]
    if given["interleaved"] and given["gate_up_bias"] is not None:
        old = given["gate_up_bias"]
        halves = in_halves(attribute(gm, str(old.target)).detach(), 1)
        given["gate_up_bias"] = editor.parameter(f"{old.target}_halves", halves, before=node, like=node)
        made.append(given["gate_up_bias"])
    given["interleaved"] = False
    new = editor.call(node.target, args_of(node.target, given, defaults=False), before=node, like=node)
    editor.replace(node, new)
    return [*made, new]


def routed_by(gm: GraphModule) -> frozenset[Node]:
    """Linear layers whose results choose experts."""
    found: set[Node] = set()
    for route in gm.graph.nodes:
        if not is_op(route, ops.moe_route.default):
            continue
        waiting = [route.args[0]]
        while waiting:
            node = waiting.pop()
            if is_op(node, *THROUGH):
                waiting += [one for one in node.all_input_nodes if one.op == "call_function"]
            elif isinstance(node, Node) and node.op == "call_function":
                found.add(node)
    return frozenset(found)


def check_router(node: Node, routers: frozenset[Node], format: str) -> None:
    """4 bits are too few to choose with: a token that goes to other experts is another token."""
    if node in routers and format == "int4":
        size = tensor_of(node).shape[-1]
        raise Refused(
            node, f"it is a router: 4 bits would send tokens to other experts, and its {size} rows save little"
        )
