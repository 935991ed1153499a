"""Patterns: plain PyTorch functions, captured and canonicalized by the same code as the model.

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return weight * h.to(x.dtype)

A pattern is traced twice, with other sizes and other literals. Where the two graphs differ, the value is a capture
(it equals an argument in both) or follows from a size; both match anything at first. A match is then confirmed
against the pattern traced with the very shapes, dtypes and literals that were found, where nothing is left open.
What arguments there are is said in arguments.py beside this; the words that make a pattern several, in words.py;
how most graphs are searched with the first of the two traces alone, in outlines.py.
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
from torch.fx import Graph, GraphModule, Node

from graft.base.errors import PatternError
from graft.ir.canonical.rules import op_defaults
from graft.ir.effects import is_mutating
from graft.ir.nodes import leaves, output_node, placeholders
from graft.ir.patterns.arguments import (
    Argument,
    TensorSpec,
    arguments,
    call_arguments,
    example_specs,
    literal_examples,
    literal_names,
)
from graft.ir.patterns.variants import trace_variants
from graft.ir.patterns.words import Path
from graft.ir.trace import DecompositionLevel, current_level

ShapeItems = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Capture:
    """A literal argument of the pattern, bound to whatever the graph holds there."""

    name: str
    kind: str = "float"
    may_be_none: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Open:
    """A literal that follows from a size; checked by the confirming match."""


@dataclass(frozen=True)
class Pattern:
    """A traced pattern, or one variant of it. `loose` graphs have captures and open literals, confirmed ones none.

    outputs: None where the variant leaves a result out. effects: calls that write, and from which no output comes.
    path: how its words were decided; chosen: what its choices were.
    """

    name: str
    graph: Graph
    inputs: tuple[Node, ...]
    outputs: tuple[Node | None, ...]
    exact: bool
    effects: tuple[Node, ...] = ()
    path: tuple[int, ...] = ()
    chosen: tuple[tuple[str, str], ...] = ()

    @property
    def anchor(self) -> Node:
        assert self.outputs[0] is not None
        return self.outputs[0]

    @property
    def results(self) -> tuple[Node, ...]:
        """Everything that must be found: the outputs that there are, and the effects."""
        return (*(output for output in self.outputs if output is not None), *self.effects)

    @property
    def size(self) -> int:
        """How many calls the pattern has."""
        return sum(1 for node in self.graph.nodes if node.op == "call_function")


def cache_by_level(function: Callable[..., Any]) -> Callable[..., Any]:
    """A cache whose entries belong to the decomposition level that they were traced in."""

    @cache
    def compute(_: DecompositionLevel, *args: Any) -> Any:
        return function(*args)

    return wraps(function)(lambda *args: compute(current_level(), *args))


@cache_by_level
def loose_pattern(function: Callable[..., Any], shapes: ShapeItems, index: int) -> Pattern:
    """A variant with captures and open literals, from two traces that differ in every size and literal."""
    first = example_traces(function, shapes, 0)[index]
    if not literal_names(function) and not has_numbers(first.graph):
        return replace(first, exact=False)  # nothing that sizes could have gone into
    return merge_traces(first, second_trace(function, shapes, index), captures_of(function))


def second_trace(function: Callable[..., Any], shapes: ShapeItems, index: int) -> Pattern:
    """Of that variant alone; a list is as long as its variant has it only where all are traced."""
    if any(a.kind == "tensors" for a in arguments(function)):
        return example_traces(function, shapes, 1)[index]
    path = example_traces(function, shapes, 0)[index].path
    return traced_example(function, shapes, 1, path)[0]


@cache_by_level
def example_traces(function: Callable[..., Any], shapes: ShapeItems, which: int) -> list[Pattern]:
    """The variants traced with made-up sizes and literals; 0 and 1 differ in all of them."""
    return traced_example(function, shapes, which)


def traced_example(
    function: Callable[..., Any], shapes: ShapeItems, which: int, path: tuple[int, ...] | None = None
) -> list[Pattern]:
    specs = example_specs(function, dict(shapes), (6, 10)[which])
    try:
        return trace(function, specs, literal_examples(function, which), path)
    except PatternError:
        raise
    except Exception as error:  # a pattern is the user's code and may raise anything; the user's line is told
        own = OWN_TENSOR if "DeviceMismatch" in type(error).__name__ or "different devices" in str(error) else ""
        raise PatternError(
            f"pattern {function.__name__} cannot be traced: {type(error).__name__}: {str(error).splitlines()[0]}"
            f" at {user_line(function, error)}; patterns are straight-line PyTorch on tensors, here of"
            f" {', '.join(f'{name}: {dims}' for name, dims in shapes)} (a letter is a size){own}"
        ) from error


# traced tensors hold no values, so one that holds some cannot stand beside them; torch 2.11 has no class for that
OWN_TENSOR = "; a tensor that the pattern makes itself is none of the graph: take it as an argument, as constant(w)"


def user_line(function: Callable[..., Any], error: Exception) -> str:
    """`file.py:12, in name: source text` of the innermost line of the pattern's own file that led to the error."""
    file = inspect.getsourcefile(function)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return f"{file}:{function.__code__.co_firstlineno}"
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}"


def captures_of(function: Callable[..., Any]) -> dict[Any, Capture]:
    """The literal arguments by their values in the two traces."""
    values = zip(*(literal_examples(function, which).values() for which in (0, 1)), strict=True)
    literals = [a for a in arguments(function) if a.name in literal_names(function)]
    captures: dict[Any, Capture] = {}
    for a, pair in zip(literals, values, strict=True):
        key = tuple(map(literal_key, pair))
        if key in captures:
            raise PatternError(
                f"pattern {function.__name__} has too many arguments like {captures[key].name!r} and {a.name!r} to"
                " tell them apart; at most two are flags"
            )
        captures[key] = Capture(a.name, a.kind, a.may_be_none, a.names)
    return captures


def literal_key(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value  # True is not 1


def merge_traces(first: Pattern, second: Pattern, captures: dict[Any, Capture]) -> Pattern:
    left_nodes, right_nodes = list(first.graph.nodes), list(second.graph.nodes)
    if [n.target for n in left_nodes[len(first.inputs) :]] != [n.target for n in right_nodes[len(second.inputs) :]]:
        raise PatternError(f"pattern {first.name} takes another path for other sizes; make it straight-line")
    for left, right in zip(left_nodes, right_nodes, strict=True):
        count = max(len(left.args), len(right.args))
        pairs = zip(with_defaults(left, count), with_defaults(right, count), strict=True)
        left.args = tuple(merge_values(a, b, captures) for a, b in pairs)
        left.kwargs = {k: merge_values(v, right.kwargs[k], captures) for k, v in left.kwargs.items()}
    return replace(first, exact=False)


def with_defaults(node: Node, count: int) -> tuple[Any, ...]:
    """The first `count` arguments of a call; the normal form leaves defaults at the end out."""
    return node.args if len(node.args) >= count else (*node.args, *op_defaults(node.target)[len(node.args) : count])


def merge_values(left: Any, right: Any, by_value: dict[Any, Capture]) -> Any:
    if isinstance(left, (list, tuple)):
        return [merge_values(a, b, by_value) for a, b in zip(left, right, strict=True)]
    if isinstance(left, Node) or (left == right and type(left) is type(right)):
        return left
    return by_value.get((literal_key(left), literal_key(right)), Open())


def exact_pattern(
    function: Callable[..., Any],
    specs: Mapping[str, TensorSpec],
    literals: Mapping[str, Any],
    written: bool = False,
    path: tuple[int, ...] = (),
) -> Pattern:
    """The function traced with the sizes, dtypes and literals of one match; equal layers share one trace.

    Sizes that are dynamic in the model are traced as `FILLER`. In a pattern, a number that follows from one can then
    equal nothing in the graph. A replacement is `written` into the graph, so there such a number is an error.
    """
    taken = {a.name: a for a in arguments(function)}
    known = {name: value for name, value in literals.items() if name.partition("[")[0] in taken}
    given = {name: spec for name, spec in specs.items() if name.partition("[")[0] in taken}
    return _exact(function, tuple(given.items()), tuple(known.items()), written, path)


FILLER, OTHER_FILLER = 1_000_003, 1_000_033


@cache_by_level
def _exact(
    function: Callable[..., Any],
    specs: tuple[tuple[str, TensorSpec], ...],
    literals: tuple[tuple[str, Any], ...],
    written: bool,
    path: tuple[int, ...],
) -> Pattern:
    def traced(filler: int) -> Pattern:
        filled = {
            name: TensorSpec(tuple(filler if s is None else s for s in spec.sizes), spec.dtype)
            for name, spec in specs
        }
        (pattern,) = trace(function, filled, dict(literals), path)
        return pattern

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


def trace(
    function: Callable[..., Any],
    specs: Mapping[str, TensorSpec],
    literals: Mapping[str, Any],
    path: tuple[int, ...] | None = None,
) -> list[Pattern]:
    """All variants, or the one that `path` decides."""
    examples = [torch.empty([s or 0 for s in spec.sizes], dtype=spec.dtype, device="meta") for spec in specs.values()]

    def body(*tensors: torch.Tensor) -> Any:
        return function(**call_arguments(function, dict(zip(specs, tensors, strict=True)), literals))

    known = {a.name: a for a in arguments(function)}
    variants = trace_variants(body, examples, path)
    return [variant_pattern(function.__name__, gm, decided, list(specs), known) for gm, decided in variants]


def variant_pattern(
    name: str, gm: GraphModule, path: Path, names: list[str], known: Mapping[str, Argument]
) -> Pattern:
    results = output_node(gm.graph).args[0]
    outputs = tuple(results) if isinstance(results, (list, tuple)) else (results,)
    inputs = tuple(placeholders(gm.graph))
    for index, (node, given) in enumerate(zip(inputs, names, strict=True)):
        node.meta["pattern_input"] = given
        node.meta["may_be_none"] = known[given.partition("[")[0]].may_be_none
        node.meta["constant"] = index in path.constant_inputs
    made = all(o is None or (isinstance(o, Node) and o.op == "call_function") for o in outputs)
    if not made or outputs[0] is None:
        raise PatternError(f"pattern {name} must return results of operations, not its own inputs")
    effects = tuple(node for node in gm.graph.nodes if is_mutating(node) and not leads_to(node, outputs))
    if not any(node.op == "get_attr" for node in gm.graph.nodes):
        gm.graph.owning_module = None  # each has a class of its own, and a trace visits all classes of modules
    full = " ".join((name, *path.chosen.values()))
    return Pattern(full, gm.graph, inputs, outputs, True, effects, path.whole, tuple(path.chosen.items()))


def leads_to(node: Node, outputs: Collection[Node | None]) -> bool:
    return node in outputs or any(leads_to(user, outputs) for user in node.users)
