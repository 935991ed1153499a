"""ATen calls in the language of graft::elementwise (ops/elementwise/program.py), or why they cannot be said in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graft.graph.canonical import is_random
from graft.graph.memory import is_mutating
from graft.graph.nodes import OpOverload, tensor_of, tensor_val, where
from graft.graph.text import target_text
from graft.ops.elementwise.codegen import triton_problem
from graft.ops.elementwise.program import DTYPES, KINDS, SIGNATURES, Call, Program, Ref
from graft.ops.elementwise.reference import kinds_of, value_dtypes

aten = torch.ops.aten
UNARY = "neg abs exp log sqrt rsqrt reciprocal sin cos erf tanh sigmoid silu relu softplus logical_not bitwise_not"
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Step:
    """One call of the language for a node; an argument is a node, a number, a dtype, or an earlier step by its index
    in a Ref."""

    op: str
    args: tuple[Any, ...]


Rule = Callable[[Node], list[Step] | str]


def plain(op: str) -> Rule:
    """The same op with the same arguments."""

    def rule(node: Node) -> list[Step] | str:
        extra = [str(a) for a in node.args[len(SIGNATURES[op]) :]] + [f"{k}={v}" for k, v in node.kwargs.items()]
        if extra:
            return f"{target_text(node.target)} with {', '.join(extra)} is not generated"
        return [Step(op, tuple(node.args))]

    return rule


def gelu(node: Node) -> list[Step]:
    return [Step("gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu", tuple(node.args[:1]))]


def power(node: Node) -> list[Step] | str:
    """ATen takes these exponents apart in the same way, with the same roundings."""
    x, exponent = node.args
    if tensor_of(x).dtype is torch.float16 and tensor_of(x).device.type == "cpu" and exponent not in (2, 0.5, -1):
        return f"a power of {exponent} of float16 is rounded only once on a CPU"
    if exponent == 2:
        return [Step("mul", (x, x))]
    if exponent == 3:
        return [Step("mul", (x, x)), Step("mul", (Ref("t", 0), x))]
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in named and tensor_of(x).is_floating_point():
        return [Step(named[exponent], (x,))]
    return f"a power of {exponent} is not generated"


def square(node: Node) -> list[Step]:
    return [Step("mul", (node.args[0], node.args[0]))]


def clamp(node: Node) -> list[Step] | str:
    x, low, high = (*node.args, None, None)[:3]
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (low, high)):
        return "a bound of clamp is NaN"
    if low is not None and high is not None:
        return [Step("clamp", (x, low, high))]
    return [Step("clamp_max", (x, high)) if low is None else Step("clamp_min", (x, low))]


def masked_fill(node: Node) -> list[Step]:
    x, mask, value = node.args
    return [Step("where", (mask, value, x))]


def cast(node: Node) -> list[Step] | str:
    x, dtype, *rest = node.args
    if rest or node.kwargs or tensor_of(x).dtype == dtype:
        return "it may give its input back instead of a new tensor"
    return [Step("to", (x, dtype))]


RULES: dict[Any, Rule] = {
    **{getattr(aten, op).default: plain(op) for op in UNARY.split()},
    **{getattr(aten, op).Tensor: plain(op) for op in ("add", "sub", "mul", "div", *COMPARISONS)},
    **{getattr(aten, op).Scalar: plain(op) for op in ("add", "sub", "mul", "div", "rsub", *COMPARISONS)},
    **{getattr(aten, op).default: plain(op) for op in ("minimum", "maximum", "logical_and", "logical_or")},
    **{getattr(aten, f"__{op}__").Tensor: plain(f"bitwise_{op}") for op in ("and", "or")},
    **{getattr(aten, f"bitwise_{op}").Tensor: plain(f"bitwise_{op}") for op in ("and", "or")},
    **{op: plain("where") for op in (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)},
    aten.clamp_min.default: lambda node: clamp_of(node, "clamp_min"),
    aten.clamp_max.default: lambda node: clamp_of(node, "clamp_max"),
    aten.clamp.default: clamp,
    aten.gelu.default: gelu,
    aten.pow.Tensor_Scalar: power,
    aten.square.default: square,
    aten.masked_fill.Scalar: masked_fill,
    aten.to.dtype: cast,
}


def clamp_of(node: Node, op: str) -> list[Step] | str:
    bound = node.args[1]
    return "a bound of clamp is NaN" if isinstance(bound, float) and math.isnan(bound) else plain(op)(node)


def steps_of(node: Node) -> list[Step] | str:
    """What the node computes, in the language, or why it cannot be said."""
    rule = RULES.get(node.target)
    if is_random(node):
        return f"{where(node)} is {target_text(node.target)}, which is random"
    if rule is None:
        return f"{where(node)} is {target_text(node.target)}, which is not an op that can be generated"
    steps = rule(node)
    problem = steps if isinstance(steps, str) else arguments_problem(steps) or value_problem(node, steps)
    return f"{where(node)}: {problem}" if problem else steps


def arguments_problem(steps: list[Step]) -> str | None:
    for step in steps:
        for kind, argument in zip(SIGNATURES[step.op], step.args, strict=True):
            if isinstance(argument, Node) and tensor_val(argument) is None:
                return f"it takes %{argument.name}, a number that is computed"
            tensor = isinstance(argument, (Node, Ref)) and kind in "ts"
            number = isinstance(argument, (bool, int, float)) and kind in "sn"
            if not tensor and not number and not (kind == "d" and argument in DTYPES.values()):
                return f"{step.op} takes {KINDS[kind]} where the graph has {argument}"
    return None


def value_problem(node: Node, steps: list[Step]) -> str | None:
    """Devices, dtypes and promotion: the language must give the very value that the graph records."""
    result = tensor_val(node)
    if result is None:
        return "it does not give one tensor"
    inputs = list(dict.fromkeys(a for s in steps for a in s.args if isinstance(a, Node)))
    tensors = [tensor_of(a) for a in inputs]
    if any(t.device != result.device for t in tensors):
        return "its inputs are on different devices"
    text, kinds = build(steps, inputs).text, kinds_of(tensors)
    if any(t.dtype not in DTYPES.values() for t in tensors):
        return f"no kernel is generated for {next(t.dtype for t in tensors if t.dtype not in DTYPES.values())}"
    if value_dtypes(text, kinds)[-1] != result.dtype:
        return f"it gives {result.dtype}, the language {value_dtypes(text, kinds)[-1]}"
    mixed = [t for t in tensors if t.dim() == 0 and t.dtype != result.dtype]
    if mixed and result.dim() and result.dtype in (torch.float16, torch.bfloat16):
        return f"how a 0-d tensor of {mixed[0].dtype} is rounded beside {result.dtype} depends on the device"
    return triton_problem(text, kinds)


def build(steps: list[Step], inputs: list[Node]) -> Program:
    """A program of one node alone."""
    place = {node: Ref("i", index) for index, node in enumerate(inputs)}
    calls = [Call(s.op, tuple(place[a] if isinstance(a, Node) else a for a in s.args)) for s in steps]
    return Program(tuple(calls), (len(calls) - 1,))


def program_of(
    steps: dict[Node, list[Step]], nodes: list[Node], outputs: list[Node], renamed: dict[Node, Node]
) -> tuple[list[Node], Program]:
    """The inputs and the program of a region; the results are those of `outputs`, in order. `renamed`: what stands
    for a node of a region above now."""
    values: dict[Node, Ref] = {}
    inputs: dict[Node, Ref] = {}
    calls: list[Call] = []
    for node in nodes:
        base = len(calls)

        def resolve(argument: Any, base: int = base) -> Any:
            if isinstance(argument, Ref):
                return Ref("t", base + argument.index)
            if not isinstance(argument, Node):
                return argument
            source = renamed.get(argument, argument)
            return values.get(source) or inputs.setdefault(source, Ref("i", len(inputs)))

        calls += [Call(step.op, tuple(resolve(a) for a in step.args)) for step in steps[node]]
        values[node] = Ref("t", len(calls) - 1)
    return list(inputs), Program(tuple(calls), tuple(values[node].index for node in outputs))


def is_pointwise(node: Node) -> bool:
    """Works element by element, whether or not it can be generated; what is random (dropout) counts as well."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return (
        node.target in RULES or is_random(node) or (torch.Tag.pointwise in node.target.tags and not is_mutating(node))
    )
