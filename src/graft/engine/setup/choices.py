"""The linear layers of a transformed graph as shapes that kernels are measured for, and what is known of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.base.errors import VerificationError
from graft.ir.nodes import calls, is_op, options_of, static_int, tensor_of, where
from graft.ops.fused_linear.choice import LinearShape, choose_kernel, shape_of
from graft.ops.launch import device_name
from graft.ops.ran import OpKernels

ops = torch.ops.graft


def model_shapes(module: GraphModule) -> dict[LinearShape, int]:
    """Every distinct shape of graft::fused_linear in the graph, and how often it is there."""
    return dict(Counter(shape for shape, _ in shapes_of(module)))


def shapes_of(module: GraphModule) -> Iterator[tuple[LinearShape, bool]]:
    """Of every linear layer that is graft's, and whether it rounds x to float8 in steps of several tokens."""
    for node in calls(module.graph):
        for weight, depth, gated, norm in layers_of(node):
            tensor = tensor_of(weight)
            rows, k = static_int(tensor.shape[0]), static_int(depth)
            if rows is None or k is None:
                raise VerificationError(f"{where(node)}: the sizes of its weight are not fixed")
            yield shape_of(rows, k, tensor.dtype, gated, norm), options_of(node)["fp8_from"] > 0


def layers_of(node: Node) -> list[tuple[Node, Any, bool, bool]]:
    """The calls of graft::fused_linear that this one is in steps of one token: weight, depth, whether it is gated and
    whether x is normed."""
    if not is_op(node, ops.fused_linear.default, ops.gated_mlp.default):
        return []
    given = options_of(node)
    depth, norm = tensor_of(given["x"]).shape[-1], given["norm"] is not None or given["normed"]
    if is_op(node, ops.fused_linear.default):
        return [(given["weight"], depth, given["activation"] != "none" and given["glu"], norm)]
    between = tensor_of(given["gate_up_scale"]).shape[0] // 2
    return [(given["gate_up"], depth, True, norm), (given["down"], between, False, False)]


def choice_notes(module: GraphModule, device: torch.device, kernels: Mapping[str, OpKernels]) -> list[str]:
    """For the report: nothing where no choice is looked up. kernels: what each op was lowered to."""
    linear = kernels.get("graft::fused_linear")
    looked_up = linear is None or any(len(one.kernels) > 1 for one in linear.ran)
    if device.type != "cuda" or not looked_up:
        return []
    note = choice_note(module, device_name(device))
    return [] if note is None else [note]


def choice_note(module: GraphModule, device: str) -> str | None:
    """Where the choice of kernels for this graph comes from; None where it has no GEMM to choose for.

    `fused_linear: 4 of 5 shapes measured on NVIDIA H200, 1 takes its nearest; graft tune MODEL measures`.
    """
    shapes = model_shapes(module)
    if not shapes:
        return None
    found = {shape: choose_kernel(shape, 1, device) for shape in shapes}
    own = Counter(choice.device for shape, choice in found.items() if choice.nearest == shape)
    near = sum(choice.nearest not in (None, shape) for shape, choice in found.items())
    unknown = sum(choice.nearest is None for choice in found.values())
    parts = [
        f"{count} of {len(shapes)} shapes measured on {name}{'' if name == device else f' (this is {device})'}"
        for name, count in own.items()
    ]
    parts += [f"{near} {'takes its' if near == 1 else 'take their'} nearest"] if near else []
    parts += [f"{unknown} without a measurement"] if unknown else []
    rounded = {shape for shape, rounds in shapes_of(module) if rounds}  # nothing is looked up for their many tokens
    several = [shape for shape in shapes if shape not in rounded and found[shape].nearest is not None]
    alone = sum(not choose_kernel(shape, 2, device).device for shape in several)
    parts += [f"{alone} for one token alone, and torch's or the default kernel runs more"] if alone else []
    here = own[device] == len(shapes) and not alone
    return f"fused_linear: {', '.join(parts)}{'' if here else '; `graft tune MODEL` measures'}"
