"""A kernel written from a pattern, in Triton or in C++: tensors of one shape, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.backends.native.emit import number
from graft.ir.nodes import calls, output_node, placeholders
from graft.ir.trace import trace_function
from graft.ops.pointwise import TABLE, Pointwise
from graft.passes.elementwise import Earlier, PointwiseStep, steps_of
from graft.passes.patterns import Rewrite
from graft.testing.negatives import examples
from graft.workbench.scaffold.body import Body, literals_of, results_of, tensor_arguments

# A number that differs between two traces with these is an argument of the pattern, or follows from one.
FIRST, SECOND = 0.3713, 0.7129


@dataclass(frozen=True)
class KernelLanguage:
    """How it writes an op, an argument's name, a constant, and what follows from an argument."""

    title: str
    expression: Callable[[Pointwise], str | None]
    name: str
    constant: Callable[[float], str]
    reciprocal: str


def triton_number(value: float) -> str:
    """A float literal; `inf` would be a name."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


# An argument's own name might be one that a kernel's file has for something else: out, rows, weight.
GIVEN = "in_{}"
TRITON = KernelLanguage("Triton", lambda row: row.triton, GIVEN, triton_number, "(1.0 / {})")
CPP = KernelLanguage("C++", lambda row: row.cpp, "v_{}", number, "(1.0f / {})")


def given_names(names: Iterable[str]) -> list[str]:
    return [GIVEN.format(name) for name in names]


@dataclass(frozen=True)
class KernelSource:
    """The lines of a kernel's computation, the value it stores, its helpers, and the numbers it takes."""

    steps: tuple[str, ...]
    result: str
    helpers: tuple[str, ...]
    numbers: tuple[str, ...]


def kernel_of(body: Body, rewrite: Rewrite, language: KernelLanguage = TRITON) -> KernelSource | str:
    """The pattern as a kernel, or why none is generated."""
    names = list(literals_of(body.pattern))
    if any(isinstance(value, int) for value in literals_of(body.pattern).values()):
        return "it takes whole numbers, which may be sizes"
    if any(dtype.strip() and not dtype.strip().startswith("float") for dtype in dtypes_of(body)):
        return "it takes tensors of whole numbers"
    if len(set(body.shapes.values())) > 1:
        return "its tensors differ in shape"
    if results_of(body.pattern):
        return "it gives several results"
    values = [{name: base * (i + 1) for i, name in enumerate(names)} for base in (FIRST, SECOND)]
    graphs = [traced(rewrite, literals) for literals in values]
    both = [[(node, steps_of(node)) for node in calls(graph)] for graph in graphs]
    given = [language.name.format(name) for name in tensor_arguments(body.pattern)]
    destinations: dict[Node, str] = dict(zip(placeholders(graphs[0]), given, strict=True))
    lines: list[str] = []
    helpers: set[str] = set()
    for (node, steps), (_, others) in zip(*both, strict=True):
        if isinstance(steps, str) or isinstance(others, str):
            return steps if isinstance(steps, str) else str(others)
        own: list[str] = []
        for step, other in zip(steps, others, strict=True):
            text = expression(step, other, destinations, own, values, language)
            if text is None:
                return f"{step.op} at {step.args} has no expression in {language.title} here"
            helpers |= table_helper(step.op)
            own.append(f"t{len(lines)}")
            lines.append(f"{own[-1]} = {text}")
        destinations[node] = own[-1]
    (returned,) = output_node(graphs[0]).all_input_nodes
    return KernelSource(tuple(lines), destinations[returned], tuple(sorted(helpers)), tuple(names))


def table_helper(op: str) -> set[str]:
    """The function of ops/triton_math.py that its expression calls, if any."""
    return {op} if TABLE[op].helper else set()


def dtypes_of(body: Body) -> list[str]:
    return [shape.partition(":")[2] for shape in body.shapes.values()]


def traced(rewrite: Rewrite, literals: Mapping[str, float]) -> Graph:
    tensors = tuple(examples(rewrite, torch.float32).values())
    pattern: Callable[..., Any] = rewrite.pattern
    return trace_function(lambda *args: pattern(*args, **literals), tensors).graph


def expression(
    step: PointwiseStep,
    other: PointwiseStep,
    destinations: Mapping[Node, str],
    own: list[str],
    values: list[dict[str, float]],
    language: KernelLanguage,
) -> str | None:
    """One step as source; `other` is the same step traced with other numbers."""
    texts = []
    for argument, second in zip(step.args, other.args, strict=True):
        if isinstance(argument, Node):
            texts.append(destinations[argument])
        elif isinstance(argument, Earlier):
            texts.append(own[argument.index])
        elif isinstance(argument, torch.dtype):
            texts.append("")  # all is float32 in the kernel
        else:
            text = number_text(float(argument), float(second), values, language)
            if text is None:
                return None
            texts.append(text)
    form = language.expression(TABLE[step.op])
    return None if form is None else form.format(*texts)


def number_text(first: float, second: float, values: list[dict[str, float]], language: KernelLanguage) -> str | None:
    """A constant, an argument, its reciprocal or its negative; None for anything else that follows from arguments."""
    if first == second:
        return language.constant(first)
    forms = (("{}", lambda v: v), (language.reciprocal, lambda v: 1 / v), ("(-{})", lambda v: -v))
    for name in values[0]:
        for form, value in forms:
            if (first, second) == (value(values[0][name]), value(values[1][name])):
                return form.format(language.name.format(name))
    return None
