"""A piece of a graph as a plain PyTorch function: text that runs, and that can be a pattern."""

from __future__ import annotations

import json
import keyword
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import OpOverload, calls, is_op, output_node, placeholders, tensor_val

aten = torch.ops.aten
UNARY = ("rsqrt", "sqrt", "exp", "log", "sin", "cos", "tanh", "sigmoid", "neg", "abs", "erf", "reciprocal", "relu")


def binary(sign: str) -> Callable[..., str | None]:
    def spell(left: str, right: str, *rest: str) -> str | None:
        return None if rest else f"{left} {sign} {right}"

    return spell


def mean(x: str, dims: str, keep: str = "False", *rest: str) -> str | None:
    return None if rest or dims != "[-1]" else f"{x}.mean(-1, keepdim={keep})"


def cast(x: str, dtype: str, *rest: str) -> str | None:
    return None if rest else f"{x}.to({dtype})"


def part(x: str, dim: str, start: str, end: str, *rest: str) -> str | None:
    return None if rest or dim != "-1" else f"{x}[..., {start}:{end}]"


# How a call is written where it has no keywords; None: as the op itself.
SPELLINGS: dict[Any, Callable[..., str | None]] = {
    aten.add.Tensor: binary("+"),
    aten.sub.Tensor: binary("-"),
    aten.mul.Tensor: binary("*"),
    aten.div.Tensor: binary("/"),
    aten.mean.dim: mean,
    aten.to.dtype: cast,
    aten.slice.Tensor: part,
    aten.pow.Tensor_Scalar: lambda x, n: f"{x}.pow({n})",
    aten.silu.default: lambda x: f"torch.nn.functional.silu({x})",
    aten.cat.default: lambda items, dim: f"torch.cat({items}, {dim})",
    aten.linear.default: lambda *given: f"torch.nn.functional.linear({', '.join(given)})",
    aten.matmul.default: lambda left, right: f"torch.matmul({left}, {right})",
    operator.getitem: lambda items, index: f"{items}[{index}]",
    **{getattr(aten, name).default: (lambda x, name=name: f"torch.{name}({x})") for name in UNARY},
}


def function_source(gm: GraphModule, name: str, note: str = "") -> str:
    """`def name(x: Tensor, weight: Tensor) -> Tensor: …` with the imports that it needs."""
    names = plain_names(gm)
    inputs = placeholders(gm.graph)
    given = ", ".join(f"{names[n]}: {'Tensor' if tensor_val(n) is not None else 'int'}" for n in inputs)
    results = output_node(gm.graph).args[0]
    several = isinstance(results, (list, tuple))
    returned = f"tuple[{', '.join(['Tensor'] * len(results))}]" if several else "Tensor"
    lines = ["import torch", "from torch import Tensor", "", "", f"def {name}({given}) -> {returned}:"]
    lines += [f'    """{note}"""'] if note else []
    working = working_dtype(gm)
    for node in calls(gm.graph):
        text = call_source(node, names)
        lines.append(f"    {names[node]} = {text.replace(*working) if is_op(node, aten.to.dtype) else text}")
    text = ", ".join(names[n] for n in results) if several else names[results]  # pyrefly: ignore
    return "\n".join([*lines, f"    return {text}", ""])


def working_dtype(gm: GraphModule) -> tuple[str, str]:
    """A cast to the 16 bits that an input has is one to the input's dtype: the model may come in another one."""
    for node in placeholders(gm.graph):
        value = tensor_val(node)
        if value is not None and value.is_floating_point() and value.dtype.itemsize == 2:
            return f"({value.dtype})", f"({node.name}.dtype)"
    return "", ""


def call_source(node: Node, names: dict[Node, str]) -> str:
    given = [argument_source(a, names) for a in node.args]
    spell = SPELLINGS.get(node.target)
    text = spell(*given) if spell is not None and not node.kwargs else None
    if text is not None:
        return text
    given += [f"{key}={argument_source(value, names)}" for key, value in node.kwargs.items()]
    called = f"torch.ops.{node.target}" if isinstance(node.target, OpOverload) else node.target.__name__  # pyrefly: ignore
    return f"{called}({', '.join(given)})"


def argument_source(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(argument_source(item, names) for item in value) + "]"
    if isinstance(value, float) and value != value:
        return 'float("nan")'
    if value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return repr(value)


def plain_names(gm: GraphModule) -> dict[Node, str]:
    """Inputs keep their names; a call is named by its op: mul, mul_2."""
    names: dict[Node, str] = {}
    used = {node.name for node in placeholders(gm.graph)}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
        elif node.op == "call_function":
            names[node] = free_name(op_name(node), used)
    return names


def op_name(node: Node) -> str:
    """`mul` for aten.mul.Tensor."""
    name = node.target._schema.name if isinstance(node.target, OpOverload) else str(node.target.__name__)  # pyrefly: ignore
    return re.sub(r"\W", "_", name.rpartition("::")[2])


def free_name(base: str, used: set[str]) -> str:
    base = f"{base}_" if keyword.iskeyword(base) or base in ("torch", "Tensor") else base
    count, name = 1, base
    while name in used:
        count += 1
        name = f"{base}_{count}"
    used.add(name)
    return name
