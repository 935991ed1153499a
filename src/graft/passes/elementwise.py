"""ATen calls in the ops of the elementwise table (ops/pointwise.py), or why they cannot be said in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graft.ir.canonical.normal_form import is_random
from graft.ir.effects import is_mutating
from graft.ir.io.text import target_text
from graft.ir.nodes import OpOverload, tensor_of, tensor_val, where
from graft.ops.pointwise import BY_CALL, KINDS, TABLE, UNTAGGED, pointwise_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Earlier:
    """The result of an earlier step of the same call, by its index."""

    index: int


@dataclass(frozen=True)
class PointwiseStep:
    """One op of the table for a call; an argument is a node, a number, a dtype, or an earlier step."""

    op: str
    args: tuple[Any, ...]


Rule = Callable[[Node], list[PointwiseStep] | str]


def power(node: Node) -> list[PointwiseStep] | str:
    """ATen takes these exponents apart in the same way, with the same roundings."""
    x, exponent = node.args
    if exponent == 2:
        return [PointwiseStep("mul", (x, x))]
    if exponent == 3:
        return [PointwiseStep("mul", (x, x)), PointwiseStep("mul", (Earlier(0), x))]
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in named and tensor_of(x).is_floating_point():
        return [PointwiseStep(named[exponent], (x,))]
    return f"a power of {exponent} is not generated"


def square(node: Node) -> list[PointwiseStep]:
    return [PointwiseStep("mul", (node.args[0], node.args[0]))]


def clamp(node: Node) -> list[PointwiseStep] | str:
    x, low, high = (*node.args, None, None)[:3]
    if low is None or high is None:
        return "a clamp on one side is not generated"
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (low, high)):
        return "a bound of clamp is NaN"
    return [PointwiseStep("clamp", (x, low, high))]


def cast(node: Node) -> list[PointwiseStep] | str:
    x, dtype, *rest = node.args
    if rest or node.kwargs or tensor_of(x).dtype == dtype:
        return "it may give its input back instead of a new tensor"
    return [PointwiseStep("to", (x, dtype))]


# Calls that are more than one op of the table, or other arguments of one.
RULES: dict[Any, Rule] = {
    aten.clamp.default: clamp,
    aten.pow.Tensor_Scalar: power,
    aten.square.default: square,
    aten.to.dtype: cast,
}


def steps_of(node: Node) -> list[PointwiseStep] | str:
    """What the node computes, in ops of the table, or why it cannot be said."""
    if is_random(node):
        return f"{where(node)} is {target_text(node.target)}, which is random"
    if node.target in RULES:
        steps = RULES[node.target](node)
    elif (row := pointwise_of(node)) is not None:
        steps = [PointwiseStep(row.name, tuple(node.args[: len(row.takes)]))]
    elif node.target in BY_CALL:
        own = [str(a) for a in node.args[len(BY_CALL[node.target].takes) :]]
        extra = [*own, *(f"{name}={value}" for name, value in node.kwargs.items())]
        steps = f"{target_text(node.target)} with {', '.join(extra)} is not generated"
    else:
        return f"{where(node)} is {target_text(node.target)}, which is not an op that can be generated"
    problem = steps if isinstance(steps, str) else arguments_problem(steps) or value_problem(node, steps)
    return f"{where(node)}: {problem}" if problem else steps


def arguments_problem(steps: list[PointwiseStep]) -> str | None:
    for step in steps:
        for kind, argument in zip(TABLE[step.op].takes, step.args, strict=True):
            if isinstance(argument, Node) and tensor_val(argument) is None:
                return f"it takes %{argument.name}, a number that is computed"
            tensor = isinstance(argument, (Node, Earlier)) and kind in "ts"
            number = isinstance(argument, (int, float)) and kind in "sn"
            if not tensor and not number and not (kind == "d" and isinstance(argument, torch.dtype)):
                return f"{step.op} takes {KINDS[kind]} where the graph has {argument}"
    return None


def value_problem(node: Node, steps: list[PointwiseStep]) -> str | None:
    """Generated kernels compute in float32, on one device."""
    result = tensor_val(node)
    if result is None:
        return "it does not give one tensor"
    tensors = [tensor_of(a) for step in steps for a in step.args if isinstance(a, Node)]
    if any(t.device != result.device for t in tensors):
        return "its inputs are on different devices"
    odd = next((t.dtype for t in (*tensors, result) if not t.is_floating_point() or t.itemsize > 4), None)
    return None if odd is None else f"generated kernels compute in float32, not in {odd}"


def is_pointwise(node: Node) -> bool:
    """Works element by element, whether or not it can be generated; what is random (dropout) counts as well."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target in BY_CALL or node.target in RULES or node.target in UNTAGGED or is_random(node):
        return True
    return torch.Tag.pointwise in node.target.tags and not is_mutating(node)
