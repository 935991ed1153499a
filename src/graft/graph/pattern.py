"""Patterns: plain PyTorch functions, captured and canonicalized by the same code as the model.

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return weight * h.to(x.dtype)

A pattern is traced twice, with other sizes and other literals. Where the two graphs differ, the value is a capture
(it equals an argument in both) or follows from a size; both match anything at first. A match is then confirmed
against the pattern traced with the very shapes, dtypes and literals that were found, where nothing is left open.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.errors import PatternError
from graft.graph.nodes import output_node
from graft.graph.trace import trace_function

WORKING_DTYPE = torch.bfloat16  # makes every cast of a pattern visible; matches any floating dtype


@dataclass(frozen=True)
class Capture:
    """A literal argument of the pattern, bound to whatever the graph holds there."""

    name: str


@dataclass(frozen=True)
class Open:
    """A literal that follows from a size; checked by the confirming match."""


@dataclass(frozen=True)
class Pattern:
    """A traced pattern. `loose` graphs have captures and open literals; confirmed ones are exact."""

    name: str
    graph: Graph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    exact: bool

    @property
    def anchor(self) -> Node:
        return self.outputs[0]

    @property
    def size(self) -> int:
        """How many calls the pattern has."""
        return sum(1 for node in self.graph.nodes if node.op == "call_function")


@dataclass(frozen=True)
class TensorSpec:
    """What a pattern is traced with: sizes (None where the model's size is dynamic) and dtype."""

    sizes: tuple[int | None, ...]
    dtype: torch.dtype


Shapes = Mapping[str, str]  # argument name → "b s d": a letter, a number or "r+6" a dim, letters shared between arguments


def tensor_names(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if not is_literal(p)]


def literal_names(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if is_literal(p)]


def is_literal(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (int, float, "int", "float")


@cache
def loose_pattern(function: Callable[..., Any], shapes: tuple[tuple[str, str], ...]) -> Pattern:
    """The pattern with captures and open literals, from two traces that differ in every size and literal."""
    letters = sorted({c for _, dims in shapes for c in dims if c.isalpha()})
    traces, literal_sets = [], []
    for scale, base in ((6, 0.3713), (10, 0.7129)):
        sizes = {letter: scale + 16 * index for index, letter in enumerate(letters)}
        specs = {
            name: TensorSpec(tuple(size_of(dim, sizes) for dim in dims.split()), WORKING_DTYPE)
            for name, dims in shapes
        }
        literals = literal_examples(function, base)
        traces.append(trace(function, specs, literals))
        literal_sets.append(literals)
    return merge_traces(function, traces, literal_sets)


def size_of(dim: str, sizes: Mapping[str, int]) -> int:
    """'s' → the size of s, '1' → 1, 'r+6' → their sum."""
    return sum(int(part) if part.isdigit() else sizes[part] for part in dim.split("+"))


def literal_examples(function: Callable[..., Any], base: float) -> dict[str, int | float]:
    examples: dict[str, int | float] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if is_literal(parameter):
            whole = parameter.annotation in (int, "int")
            examples[parameter.name] = int(base * 100) + index if whole else base + 0.0137 * index
    return examples


def merge_traces(
    function: Callable[..., Any], traces: list[Pattern], literal_sets: list[dict[str, int | float]]
) -> Pattern:
    first, second = (list(t.graph.nodes) for t in traces)
    if [n.target for n in first if n.op == "call_function"] != [n.target for n in second if n.op == "call_function"]:
        raise PatternError(f"pattern {function.__name__} takes another path for other sizes; make it straight-line")
    by_value = {(a, b): Capture(name) for (name, a), b in zip(literal_sets[0].items(), literal_sets[1].values(), strict=True)}
    for left, right in zip(first, second, strict=True):
        left.args = tuple(merge_values(a, b, by_value) for a, b in zip(left.args, right.args, strict=True))
        left.kwargs = {k: merge_values(v, right.kwargs[k], by_value) for k, v in left.kwargs.items()}
    return Pattern(function.__name__, traces[0].graph, traces[0].inputs, traces[0].outputs, exact=False)


def merge_values(left: Any, right: Any, by_value: dict[Any, Capture]) -> Any:
    if isinstance(left, (list, tuple)):
        return [merge_values(a, b, by_value) for a, b in zip(left, right, strict=True)]
    if isinstance(left, Node) or left == right:
        return left
    return by_value.get((left, right), Open())


def exact_pattern(
    function: Callable[..., Any], specs: Mapping[str, TensorSpec], literals: Mapping[str, Any]
) -> Pattern:
    """The function traced with the sizes, dtypes and literals of one match; equal layers share one trace."""
    return _exact(function, tuple(specs.items()), tuple(literals.items()))


@cache
def _exact(
    function: Callable[..., Any], specs: tuple[tuple[str, TensorSpec], ...], literals: tuple[tuple[str, Any], ...]
) -> Pattern:
    traces = []
    for filler in (7, 11):  # stands for dynamic sizes; what depends on it cannot be written as a literal
        filled = {
            name: TensorSpec(tuple(filler if s is None else s for s in spec.sizes), spec.dtype) for name, spec in specs
        }
        traces.append(trace(function, filled, dict(literals)))
        if all(None not in spec.sizes for _, spec in specs):
            break
    if len(traces) == 2 and graph_literals(traces[0].graph) != graph_literals(traces[1].graph):
        raise PatternError(f"{function.__name__} writes a dynamic size into its graph as a number")
    return traces[0]


def graph_literals(graph: Graph) -> list[str]:
    return [f"{node.target}{node.args}{node.kwargs}" for node in graph.nodes if node.op == "call_function"]


def trace(function: Callable[..., Any], specs: Mapping[str, TensorSpec], literals: Mapping[str, Any]) -> Pattern:
    names = tensor_names(function)
    if sorted(names) != sorted(specs):
        raise PatternError(
            f"pattern {function.__name__} takes the tensors {names} but shapes are given for {sorted(specs)}"
        )
    examples = tuple(torch.empty(specs[n].sizes, dtype=specs[n].dtype, device="meta") for n in names)
    gm = trace_function(lambda *tensors: function(*tensors, **literals), examples)
    results = output_node(gm.graph).args[0]
    outputs = tuple(results) if isinstance(results, (list, tuple)) else (results,)
    inputs = tuple(node for node in gm.graph.nodes if node.op == "placeholder")
    for node, name in zip(inputs, names, strict=True):
        node.meta["pattern_input"] = name
    if not all(isinstance(o, Node) and o.op == "call_function" for o in outputs):
        raise PatternError(f"pattern {function.__name__} must return results of operations, not its own inputs")
    return Pattern(function.__name__, gm.graph, inputs, outputs, exact=True)
