"""A piece of a graph as a graph of its own, and run in float64 on made-up inputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from graft.ir.evaluate import example_size, fill
from graft.ir.nodes import calls, is_weight, output_node, placeholders, tensor_val, val
from graft.ir.subgraph import Cutter
from graft.passes.numeric.execution import in_float64
from graft.passes.numeric.inputs import widened
from graft.workbench.discover.regions import CandidateRegion
from graft.workbench.discover.source import op_name

LARGEST = 1 << 22  # elements of an input that is made up: 0.1 s in float64
SIZED = ("slice", "cat", "stack", "reshape", "expand", "layer_norm")  # calls whose numbers follow from sizes


def extract(piece: CandidateRegion) -> GraphModule:
    """A module of its own: inputs in the order of their first use (weights too, marked as such), results as a tuple
    unless there is one; the last comes first, since a pattern is laid on from there."""
    cutter = Cutter()
    for number, (node, name) in enumerate(input_names(piece).items()):
        meta = {key: value for key, value in node.meta.items() if key in KEPT}
        meta |= {"weight": True} if is_weight(node) else {}
        cutter.input(name, meta | {"discovered": number}, node)
    for node in piece.nodes:
        cutter.call(node)
    return cutter.module(piece.outputs()[::-1])


KEPT = ("val", "nn_module_stack", "stack_trace")


def input_names(piece: CandidateRegion) -> dict[Node, str]:
    """x, y, z for values, weight, weight_2 for weights, size for numbers."""
    names: dict[Node, str] = {}
    plain = iter(["x", "y", "z", *(f"x{i}" for i in range(3, 99))])
    counts = {"weight": 0, "size": 0}
    for node in piece.inputs():
        if tensor_val(node) is not None and not is_weight(node):
            names[node] = next(plain)
            continue
        role = "weight" if is_weight(node) else "size"
        counts[role] += 1
        names[node] = role if counts[role] == 1 else f"{role}_{counts[role]}"
    return names


def made_up_inputs(gm: GraphModule) -> list[Any] | None:
    """One value for each input, float64 where it is a float; None where one would be too large. Sizes are those of
    the example; large static ones are taken smaller where no call names a size."""
    shrunk = Shrunk(gm)
    shapes = [(node, val(node), shrunk.shape(node)) for node in placeholders(gm.graph)]
    if any(math.prod(shape) > LARGEST for _, _, shape in shapes):
        return None
    generator = torch.Generator().manual_seed(11)
    return [
        widened(fill(shape, value.dtype, "random", generator))
        if isinstance(value, torch.Tensor)
        else example_size(value, node)
        for node, value, shape in shapes
    ]


class Shrunk:
    """Static sizes above 64, each as another small one: what a kernel computes does not depend on them."""

    def __init__(self, gm: GraphModule) -> None:
        self.smaller: dict[int, int] = {}
        self.allowed = not any(op_name(node) in SIZED for node in calls(gm.graph))

    def shape(self, node: Node) -> list[int]:
        value = tensor_val(node)
        return [] if value is None else [self.size(size, node) for size in value.shape]

    def size(self, size: Any, node: Node) -> int:
        count = example_size(size, node)
        if not self.allowed or isinstance(size, torch.SymInt) or count <= 64:
            return count
        return self.smaller.setdefault(count, 65 + len(self.smaller))


def run_in_float64(gm: GraphModule, inputs: list[Any]) -> list[torch.Tensor]:
    values: dict[Node, Any] = dict(zip(placeholders(gm.graph), inputs, strict=True))
    with torch.no_grad():
        for node in calls(gm.graph):
            args, kwargs = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
            values[node] = in_float64(node.target, args, kwargs)
    results = map_arg(output_node(gm.graph).args[0], values.__getitem__)
    return list(results) if isinstance(results, (list, tuple)) else [results]


def literals_of(gm: GraphModule) -> list[float]:
    """The numbers among the arguments of its calls that could be an eps, a scale or a slope."""
    found: list[float] = []
    for node in calls(gm.graph):
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and val(node) is not None:
                found.append(float(value))
    return list(dict.fromkeys(found))
