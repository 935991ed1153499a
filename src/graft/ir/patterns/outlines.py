"""Patterns from one trace instead of two: enough to see that nothing fits, and mostly to see what does.

An outline has every number open, and every flag where the pattern takes some. Where it fits, a guess says which
literals are the pattern's arguments: a number that is one of the made-up ones, a flag of the argument's name. A guess
need not be right: what it finds is confirmed like any match, against the pattern traced for that very site, and where
that fails the second trace decides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.canonical.rules import op_argument_names, op_defaults
from graft.ir.patterns.arguments import arguments, literal_examples
from graft.ir.patterns.pattern import (
    Capture,
    Open,
    Pattern,
    ShapeItems,
    cache_by_level,
    captures_of,
    example_traces,
    literal_key,
)

Opening = Callable[[Any, str], Any]  # a literal, and the name of the argument that it is → what stands for it


@cache_by_level
def outlines(function: Callable[..., Any], shapes: ShapeItems) -> list[Pattern]:
    """The variants with every number open, and every flag where there are some."""
    captures_of(function)  # raises where they could not be told apart later
    flags = has_flags(function)
    return [opened(pattern, flags, lambda *_: Open()) for pattern in example_traces(function, shapes, 0)]


@cache_by_level
def guessed_pattern(function: Callable[..., Any], shapes: ShapeItems, index: int) -> Pattern:
    """A variant with the captures that its one trace suggests, and the rest open."""
    examples = literal_examples(function, 0)
    captures = {a.name: Capture(a.name, a.kind, a.may_be_none, a.names) for a in arguments(function)}
    by_value = {literal_key(value): captures[name] for name, value in examples.items()}

    def guess(value: Any, name: str) -> Any:
        if isinstance(value, (bool, str)):
            return captures[name] if name in examples and examples[name] == value else Open()
        return by_value.get(literal_key(value), Open())

    return opened(example_traces(function, shapes, 0)[index], has_flags(function), guess)


def has_flags(function: Callable[..., Any]) -> bool:
    return any(a.kind in ("bool", "name") for a in arguments(function))


def opened(pattern: Pattern, flags: bool, opening: Opening) -> Pattern:
    """A copy with something else for its literals; where there are flags, also for defaults that calls leave out."""
    copy, copies = Graph(), {}
    for node in pattern.graph.nodes:
        copies[node] = copied = copy.node_copy(node, copies.__getitem__)
        if node.target in (operator.getitem, torch.ops.aten.to.dtype):
            continue  # which result of a call it is follows from no size, and a cast has no literals
        args, names = whole_arguments(copied) if flags else copied.args, op_argument_names(node.target)
        pairs = zip(args, (*names, *[""] * len(args)), strict=False)
        copied.args = tuple(open_literal(value, flags, opening, name) for value, name in pairs)
        copied.kwargs = {name: open_literal(value, flags, opening, name) for name, value in copied.kwargs.items()}
    inputs, outputs, effects = (
        tuple(node and copies[node] for node in nodes) for nodes in (pattern.inputs, pattern.outputs, pattern.effects)
    )
    return replace(pattern, graph=copy, inputs=inputs, outputs=outputs, effects=effects, exact=False)


def whole_arguments(node: Node) -> tuple[Any, ...]:
    """Up to the last flag or name of the op, with the defaults that the normal form leaves out at the end."""
    defaults = op_defaults(node.target)
    count = max((i + 1 for i, default in enumerate(defaults) if isinstance(default, (bool, str))), default=0)
    left_out = defaults[len(node.args) : count]
    return (*node.args, *(Open() if isinstance(default, (list, tuple)) else default for default in left_out))


def open_literal(value: Any, flags: bool, opening: Opening, name: str) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(open_literal(item, flags, opening, name) for item in value)
    flag = isinstance(value, (bool, str))
    return opening(value, name) if (flags if flag else isinstance(value, (int, float))) else value
