"""Sums, products and functions of single numbers: a chain of them is one loop, whose body is C++ of its own.

%m = mul(%x, 0.5);  %t = tanh(%m)   →   out[i] = plain_tanh((x[i] * 0.5f))
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graft.backends.native.emit import number
from graft.backends.native.plan import Planner, lowers
from graft.backends.native.program import Argument, NativeKernel, NotLowered, Value, WeightPointer
from graft.ir.nodes import same_shape, tensor_of, tensor_val
from graft.ops.pointwise import ROWS, pointwise_of

aten = torch.ops.aten
HEADER = "backends/native/pointwise.h"


FORMS = tuple(call for row in ROWS if row.cpp is not None for call in row.aten)


def is_pointwise(node: Node) -> bool:
    return node.target in FORMS or node.target is aten.pow.Tensor_Scalar


@lowers(*FORMS, aten.pow.Tensor_Scalar)
def lower_pointwise(plan: Planner, node: Node) -> None:
    """A node with one reader, which is pointwise too, is written into the reader's expression."""
    loop = Loop(plan, node)
    text = loop.expression(node)
    out = plan.new(node)
    plan.bind(node, out)
    if inlined(plan, node):
        return  # no step fills the buffer: the reader writes the expression again
    layout = out.layout
    body = (
        f"share({{counter}}, {plan.rows(layout).text}, [&](int64_t row) {{",
        f"  for (int64_t head = 0; head < {layout.heads}; ++head) {{",
        *(f"    const float* r_{name} = {name}.at(row, {head});" for name, head in loop.heads.items()),
        "    float* to = out.at(row, head);",
        f"    for (int64_t i = 0; i < {layout.size}; ++i) to[i] = {text};",
        "  }",
        "});",
    )
    plan.step(node, NativeKernel("pointwise", "", HEADER, body=body), **loop.operands, out=out)


def inlined(plan: Planner, node: Node) -> bool:
    users = list(node.users)
    if len(users) != 1 or not is_pointwise(users[0]) or users[0] not in plan.nodes:
        return False
    mine, theirs = tensor_val(node), tensor_val(users[0])
    return mine is not None and theirs is not None and same_shape(mine, theirs)


class Loop:
    """Collects what the expression of a node reads."""

    def __init__(self, plan: Planner, node: Node) -> None:
        self.plan = plan
        self.layout = plan.layout(node)
        self.operands: dict[str, Argument] = {}
        self.heads: dict[str, str] = {}  # which head of an operand belongs to one of the result

    def expression(self, node: Node) -> str:
        if node.target is aten.pow.Tensor_Scalar:
            return self.power(self.operand(node.args[0]), node.args[1])
        row = pointwise_of(node)
        if row is None or row.cpp is None:
            raise NotLowered(f"it has {', '.join(node.kwargs) or 'options of its own'}")
        return row.cpp.format(*(self.operand(arg) for arg in node.args[: len(row.takes)]))

    def power(self, base: str, exponent: Any) -> str:
        if exponent in (2, 3):
            return f"power{int(exponent)}({base})"
        return f"std::pow({base}, {number(float(exponent))})"

    def operand(self, arg: Any) -> str:
        if isinstance(arg, (int, float)):
            return number(float(arg))
        if not isinstance(arg, Node):
            raise NotLowered(f"{arg} is no number of the graph's own")
        if arg.op == "get_attr":
            return self.weight(arg)
        own = arg in self.plan.nodes and arg not in self.plan.inputs
        return self.expression(arg) if own and is_pointwise(arg) and inlined(self.plan, arg) else self.row(arg)

    def weight(self, arg: Node) -> str:
        tensor = tensor_of(arg)
        pointer: WeightPointer = self.plan.vector(arg)
        name = f"w{pointer.index}"
        self.operands[name] = pointer
        if tensor.numel() == 1:
            return f"{name}[0]"
        if int(tensor.shape[-1]) != self.layout.size:
            raise NotLowered(f"{arg} is broadcast over something else than the last dim")
        return f"{name}[i]"

    def row(self, arg: Node) -> str:
        value: Value = self.plan.value(arg)
        theirs, ours = value.layout, self.layout
        if theirs.rows != ours.rows or theirs.heads not in (1, ours.heads) or theirs.size not in (1, ours.size):
            raise NotLowered(f"%{arg.name} is broadcast in a way that rows are not")
        if theirs.heads == 1 and ours.heads > 1 and theirs.order == "flat":
            raise NotLowered(f"%{arg.name} has rows where the result has heads")
        name = f"x_{arg.name}"
        self.operands[name] = value
        self.heads[name] = "head" if theirs.heads == ours.heads else "0"
        return f"r_{name}[{'0' if theirs.size == 1 and ours.size > 1 else 'i'}]"
