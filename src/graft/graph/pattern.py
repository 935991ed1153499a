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
import operator
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.errors import PatternError
from graft.graph.nodes import leaves, output_node, placeholders
from graft.graph.trace import Dialect, current_dialect, trace_function

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


# Argument name → "b s d": a letter, a number or "r+6" a dim, letters shared between arguments. "b s d : float32" says
# that the argument may be wider than the others, which makes the casts around it visible.
Shapes = Mapping[str, str]


def tensor_names(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if not is_literal(p)]


def literal_names(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if is_literal(p)]


def is_literal(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (int, float, "int", "float")


def cache_by_dialect(function: Callable[..., Any]) -> Callable[..., Any]:
    """A cache whose entries belong to the dialect that they were traced in."""

    @cache
    def compute(_: Dialect, *args: Any) -> Any:
        return function(*args)

    return wraps(function)(lambda *args: compute(current_dialect(), *args))


@cache_by_dialect
def loose_pattern(function: Callable[..., Any], shapes: tuple[tuple[str, str], ...]) -> Pattern:
    """The pattern with captures and open literals, from two traces that differ in every size and literal."""
    first, first_literals = example_trace(function, shapes, 0)
    if not has_numbers(first.graph):
        return replace(first, exact=False)  # nothing that sizes or literals could have gone into
    second, second_literals = example_trace(function, shapes, 1)
    return merge_traces(
        function, first, second, list(zip(first_literals.items(), second_literals.values(), strict=True))
    )


@cache_by_dialect
def outline(function: Callable[..., Any], shapes: tuple[tuple[str, str], ...]) -> Pattern:
    """The pattern with every number open: half the price of the loose one, and enough to see that nothing fits."""
    first, _ = example_trace(function, shapes, 0)
    copy, copies = Graph(), {}
    for node in first.graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
        copies[node].args = open_numbers(copies[node].args)
        copies[node].kwargs = open_numbers(copies[node].kwargs)
    inputs, outputs = (tuple(copies[node] for node in nodes) for nodes in (first.inputs, first.outputs))
    return Pattern(function.__name__, copy, inputs, outputs, exact=False)


def open_numbers(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(open_numbers(item) for item in value)
    if isinstance(value, dict):
        return {key: open_numbers(item) for key, item in value.items()}
    return Open() if isinstance(value, (int, float)) and not isinstance(value, bool) else value


@cache_by_dialect
def example_trace(
    function: Callable[..., Any], shapes: tuple[tuple[str, str], ...], which: int
) -> tuple[Pattern, dict[str, int | float]]:
    """The function traced with made-up sizes and literals; 0 and 1 differ in all of them."""
    scale, base = ((6, 0.3713), (10, 0.7129))[which]
    dims = {name: shape.partition(":")[0].split() for name, shape in shapes}
    letters = sorted({c for parts in dims.values() for part in parts for c in part if c.isalpha()})
    sizes = {letter: scale + 16 * index for index, letter in enumerate(letters)}
    specs = {
        name: TensorSpec(tuple(size_of(d, sizes) for d in dims[name]), example_dtype(shape)) for name, shape in shapes
    }
    literals = literal_examples(function, base)
    try:
        return trace(function, specs, literals), literals
    except PatternError:
        raise
    except Exception as error:  # a pattern is the user's code and may raise anything; the user's line is told
        raise PatternError(
            f"pattern {function.__name__} cannot be traced: {type(error).__name__}: {str(error).splitlines()[0]}"
            f" at {user_line(function, error)}; patterns are straight-line PyTorch on tensors"
        ) from error


def user_line(function: Callable[..., Any], error: Exception) -> str:
    """`file.py:12, in name: source text` of the innermost line of the pattern's own file that led to the error."""
    file = inspect.getsourcefile(function)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return f"{file}:{function.__code__.co_firstlineno}"
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}"


def example_dtype(shape: str) -> torch.dtype:
    name = shape.partition(":")[2].strip()
    return getattr(torch, name) if name else WORKING_DTYPE


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
    function: Callable[..., Any], first: Pattern, second: Pattern, literals: list[tuple[tuple[str, Any], Any]]
) -> Pattern:
    left_nodes, right_nodes = list(first.graph.nodes), list(second.graph.nodes)
    if [n.target for n in left_nodes[len(first.inputs) :]] != [n.target for n in right_nodes[len(second.inputs) :]]:
        raise PatternError(f"pattern {function.__name__} takes another path for other sizes; make it straight-line")
    captures = {(a, b): Capture(name) for (name, a), b in literals}
    for left, right in zip(left_nodes, right_nodes, strict=True):
        left.args = tuple(merge_values(a, b, captures) for a, b in zip(left.args, right.args, strict=True))
        left.kwargs = {k: merge_values(v, right.kwargs[k], captures) for k, v in left.kwargs.items()}
    return replace(first, exact=False)


def merge_values(left: Any, right: Any, by_value: dict[Any, Capture]) -> Any:
    if isinstance(left, (list, tuple)):
        return [merge_values(a, b, by_value) for a, b in zip(left, right, strict=True)]
    if isinstance(left, Node) or left == right:
        return left
    return by_value.get((left, right), Open())


def exact_pattern(
    function: Callable[..., Any], specs: Mapping[str, TensorSpec], literals: Mapping[str, Any], written: bool = False
) -> Pattern:
    """The function traced with the sizes, dtypes and literals of one match; equal layers share one trace.

    Sizes that are dynamic in the model are traced as `FILLER`. In a pattern, a number that follows from one can then
    equal nothing in the graph. A replacement is `written` into the graph, so there such a number is an error.
    """
    return _exact(function, tuple(specs.items()), tuple(literals.items()), written)


FILLER, OTHER_FILLER = 1_000_003, 1_000_033


@cache_by_dialect
def _exact(
    function: Callable[..., Any],
    specs: tuple[tuple[str, TensorSpec], ...],
    literals: tuple[tuple[str, Any], ...],
    written: bool,
) -> Pattern:
    def traced(filler: int) -> Pattern:
        filled = {
            name: TensorSpec(tuple(filler if s is None else s for s in spec.sizes), spec.dtype)
            for name, spec in specs
        }
        return trace(function, filled, dict(literals))

    first = traced(FILLER)
    dynamic = any(None in spec.sizes for _, spec in specs)
    if written and dynamic and has_numbers(first.graph, {value for _, value in literals}):
        second = traced(OTHER_FILLER)
        if graph_literals(first.graph) != graph_literals(second.graph):
            raise PatternError(f"{function.__name__} writes a dynamic size into its graph as a number")
    return first


def graph_literals(graph: Graph) -> list[str]:
    return [f"{node.target}{node.args}{node.kwargs}" for node in graph.nodes if node.op == "call_function"]


def has_numbers(graph: Graph, known: Collection[Any] = ()) -> bool:
    """True when some call has a number among its arguments that is not `known`; dims from the end do not count."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            for leaf in leaves((node.args, node.kwargs)):
                number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
                if number and leaf not in known and not (isinstance(leaf, int) and -8 < leaf < 0):
                    return True
    return False


def trace(function: Callable[..., Any], specs: Mapping[str, TensorSpec], literals: Mapping[str, Any]) -> Pattern:
    names = tensor_names(function)
    if sorted(names) != sorted(specs):
        raise PatternError(
            f"pattern {function.__name__} takes the tensors {names} but shapes are given for {sorted(specs)}"
        )
    examples = tuple(
        torch.empty([s or 0 for s in specs[n].sizes], dtype=specs[n].dtype, device="meta") for n in names
    )
    gm = trace_function(lambda *tensors: function(*tensors, **literals), examples)
    results = output_node(gm.graph).args[0]
    outputs = tuple(results) if isinstance(results, (list, tuple)) else (results,)
    inputs = tuple(placeholders(gm.graph))
    for node, name in zip(inputs, names, strict=True):
        node.meta["pattern_input"] = name
    if not all(isinstance(o, Node) and o.op == "call_function" for o in outputs):
        raise PatternError(f"pattern {function.__name__} must return results of operations, not its own inputs")
    return Pattern(function.__name__, gm.graph, inputs, outputs, exact=True)
