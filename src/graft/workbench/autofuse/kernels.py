"""A new op's native kernel by itself, against its reference in float64: sizes and magnitudes that a model may never
show, and where an eps, a mask or a tail that is wrong does show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from graft.backends.native.lower import lower_native
from graft.ir.io.symbols import fresh_mode
from graft.ir.patterns.arguments import size_of
from graft.ops import OPS
from graft.ops.cases import tolerance

TOKENS = 13
WIDTHS = (16, 77)  # of a row whose width is open: whole lanes, and a tail
SCALES = (1.0, 1e-3, 30.0)
SLACK = 8  # times the dtype's tolerance for one sum as long as the row: kernels chain a few


class NotOneShape(Exception):
    """Why a kernel is not run by itself."""


def native_kernel_problem(op: str, shapes: Mapping[str, str]) -> tuple[str, int]:
    """What is wrong with the native kernel of graft::`op`, '' for nothing; and how many runs were compared."""
    reference = OPS[op].reference
    runs = 0
    for width in WIDTHS if open_width(shapes) else (0,):
        run = compiled(op, shapes, width)
        for scale in SCALES:
            args = inputs(shapes, width, scale)
            got, wanted = results(run(args)), results(reference(*(a.double() for a in args)))
            shaken = results(reference(*(shake(a).double() for a in args)))
            for index, (mine, exact, wrong) in enumerate(zip(got, wanted, shaken, strict=True)):
                allowed = SLACK * tolerance(torch.float32, int(exact.shape[-1]))
                far, sensitive = distance(mine, exact), distance(wrong, exact)
                if not far <= allowed:
                    size = f"rows of {exact.shape[-1]}, inputs around {scale:g}"
                    return f"result {index} is off by {far:.1e} where {allowed:.1e} is allowed ({size})", runs
                if not sensitive > allowed:
                    return f"result {index} does not depend on its inputs, so nothing was compared", runs
                runs += 1
    return "", runs


def open_width(shapes: Mapping[str, str]) -> bool:
    return any(dims(shape)[-1].isalpha() for shape in shapes.values() if dims(shape))


def dims(shape: str) -> list[str]:
    return shape.partition(":")[0].split()


def sizes(shapes: Mapping[str, str], width: int) -> dict[str, int]:
    """A batch of 1, then tokens; the last dim is the width."""
    widest = max((dims(shape) for shape in shapes.values()), key=len)
    leading = [dim for dim in widest[:-1] if dim.isalpha()]
    if not 1 <= len(leading) <= 2:
        raise NotOneShape(f"its rows are {' '.join(widest[:-1])}, not a batch of tokens")
    named = dict(zip(leading[::-1], (TOKENS, 1), strict=False))
    others = {dim for shape in shapes.values() for dim in dims(shape) if dim.isalpha()} - set(named)
    return named | dict.fromkeys(others, width)


def inputs(shapes: Mapping[str, str], width: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    known = sizes(shapes, width)
    made = []
    for shape in shapes.values():
        size = [size_of(dim, known) for dim in dims(shape)]
        tensor = torch.randn(size, generator=generator)
        made.append(one_sided(tensor) * scale if len(size) > 1 else tensor)
    return made


def one_sided(rows: Tensor) -> Tensor:
    """Of three rows one has no positive number and one no negative: an extreme that starts at 0 shows there."""
    tokens = torch.arange(rows.shape[-2])[:, None] % 3
    return torch.where(tokens == 0, -rows.abs(), torch.where(tokens == 1, rows.abs(), rows))


def compiled(op: str, shapes: Mapping[str, str], width: int) -> Callable[[list[Tensor]], Any]:
    """A graph of this one call, lowered as a decoder's is."""
    args = inputs(shapes, width, 1.0)
    mode, graph, root = fresh_mode(), Graph(), torch.nn.Module()
    with mode:
        ids = graph.placeholder("input_ids")
        ids.meta["val"] = torch.empty(1, TOKENS, dtype=torch.int64)
        nodes, fakes, given = [], [], []
        for (name, _), tensor in zip(shapes.items(), args, strict=True):
            if tensor.dim() < 2:
                root.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
                node = graph.get_attr(name)
            else:
                node = graph.placeholder(name)
                given.append(name)
            node.meta["val"] = torch.empty(tensor.shape)
            nodes.append(node)
            fakes.append(node.meta["val"])
        target = getattr(torch.ops.graft, op).default
        call = graph.call_function(target, tuple(nodes))
        call.meta["val"] = target(*fakes)
        if isinstance(call.meta["val"], (tuple, list)):
            items = []
            for index, value in enumerate(call.meta["val"]):
                item = graph.call_function(getitem, (call, index))
                item.meta["val"] = value
                items.append(item)
            graph.output(tuple(items))
        else:
            graph.output((call,))
    lowered = lower_native(GraphModule(root, graph))
    eager = next((note for note in lowered.notes if f"graft.{op}" in note), "")
    if eager:
        raise NotOneShape(eager)
    ids_now = torch.zeros(1, TOKENS, dtype=torch.int64)
    names = list(shapes)

    def run(values: list[Tensor]) -> Any:
        for name, value in zip(names, values, strict=True):
            if name not in given and not torch.equal(getattr(root, name), value):
                raise NotOneShape(f"{name} is a weight, which is packed once")
        return lowered.call(ids_now, *(v for n, v in zip(names, values, strict=True) if n in given))

    return run


def results(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def shake(tensor: Tensor) -> Tensor:
    """Slightly other inputs: what the comparison must be able to tell."""
    return (tensor.roll(1) if tensor.dim() else tensor) * 1.01


def distance(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value of each row."""
    if got.shape != wanted.shape:
        return float("inf")
    left, right = got.double(), wanted.double()
    scale = right.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((left - right).abs() / scale).max())
