"""The arguments of a pattern, read off its signature, and the shapes that it is traced with.

    x: Tensor                     a tensor of the graph                bias: Tensor | None    a tensor, or nothing
    eps: float, n: int            a number that the graph holds        window: int | None     a number, or nothing
    upcast: bool                  a flag                               form: Literal["a", "b"] one of some names
    weights: list[Tensor]         as many as the graph has (`repeated`)

An argument with a default may be left out by a variant that does not read it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from graft.base.errors import PatternError

WORKING_DTYPE = torch.bfloat16  # makes every cast of a pattern visible; matches any floating dtype
# Argument name → "b s d": a dim is a letter, a number, "r+6" or "2*n", letters shared between arguments. "b s d :
# float32" says that the argument may be wider than the others, which makes the casts around it visible. "n d *3" is a
# list of at most three.
Shapes = Mapping[str, str]
DIM = re.compile(r"(\d+|[A-Za-z])([*+](\d+|[A-Za-z]))*")
LIST = re.compile(r"\*[1-9]\d*")
Kind = Literal["tensor", "tensors", "int", "float", "bool", "name"]


@dataclass(frozen=True)
class TensorSpec:
    """What a pattern is traced with: sizes (None where the model's size is dynamic) and dtype."""

    sizes: tuple[int | None, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Argument:
    """One argument of a pattern. names: what a `Literal` may be. empty: there is no default."""

    name: str
    kind: Kind
    may_be_none: bool = False
    names: tuple[str, ...] = ()
    default: Any = inspect.Parameter.empty

    @property
    def has_default(self) -> bool:
        return self.default is not inspect.Parameter.empty


@cache
def arguments(function: Callable[..., Any]) -> tuple[Argument, ...]:
    return tuple(map(argument, inspect.signature(function).parameters.values()))


def argument(parameter: inspect.Parameter) -> Argument:
    annotation = parameter.annotation
    text = annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else annotation
    text = text if isinstance(text, str) else str(text)
    base = re.sub(r"\s*\|\s*None$", "", text).strip()
    none = base != text or parameter.default is None
    named = re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", base, re.DOTALL)
    if named:
        names = ast.literal_eval(f"({named[1]},)")
        return Argument(parameter.name, "name", none, names, parameter.default)
    kind: Kind = base if base in ("int", "float", "bool") else "tensors" if base.startswith("list[") else "tensor"
    return Argument(parameter.name, kind, none or "None]" in base, (), parameter.default)


def tensor_names(function: Callable[..., Any]) -> list[str]:
    return [a.name for a in arguments(function) if a.kind in ("tensor", "tensors")]


def literal_names(function: Callable[..., Any]) -> list[str]:
    return [a.name for a in arguments(function) if a.kind not in ("tensor", "tensors")]


def example_specs(function: Callable[..., Any], shapes: Shapes, scale: int) -> dict[str, TensorSpec]:
    """Made-up sizes, other ones for another scale. An item of a list is `weights[0]`."""
    if not isinstance(shapes, Mapping) or sorted(tensor_names(function)) != sorted(shapes):
        raise PatternError(
            f"pattern {function.__name__} takes the tensors {tensor_names(function)}"
            f" but shapes are given for {sorted(shapes)}"
        )
    for name, shape in shapes.items():
        check_shape(function, name, shape)
    dims = {name: shape.partition(":")[0].split() for name, shape in shapes.items()}
    letters = sorted({c for parts in dims.values() for part in parts for c in part if c.isalpha()})
    sizes = {letter: scale + 16 * index for index, letter in enumerate(letters)}
    specs = {}
    for name, parts in dims.items():
        many = parts and parts[-1].startswith("*")
        each = tuple(size_of(dim, sizes) for dim in (parts[:-1] if many else parts))
        spec = TensorSpec(each, example_dtype(shapes[name]))
        specs |= {f"{name}[{i}]": spec for i in range(int(parts[-1][1:]))} if many else {name: spec}
    return specs


def check_shape(function: Callable[..., Any], name: str, shape: object) -> None:
    """Raises PatternError, with the part that is not understood."""
    about = f"pattern {function.__name__}: the shape of {name} is {shape!r}"
    if not isinstance(shape, str):
        raise PatternError(f'{about}; write it as a text of dims, "b s d", with letters that tensors share')
    dims, colon, dtype = (part.strip() for part in shape.partition(":"))
    parts = dims.split()
    if parts and LIST.fullmatch(parts[-1]):
        parts = parts[:-1]
    for part in parts:
        if not DIM.fullmatch(part):
            raise PatternError(f"{about}, and {part!r} is no dim: a letter, a number, r+6 or 2*n, apart by spaces")
    if colon and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise PatternError(f"{about}, and {dtype!r} is no dtype of torch's, such as float32")


def example_dtype(shape: str) -> torch.dtype:
    name = shape.partition(":")[2].strip()
    return getattr(torch, name) if name else WORKING_DTYPE


def size_of(dim: str, sizes: Mapping[str, int]) -> int:
    """'s' → the size of s, '1' → 1, 'r+6' → their sum, '2*n' → their product."""
    total = 0
    for summand in dim.split("+"):
        product = 1
        for factor in summand.split("*"):
            product *= int(factor) if factor.isdigit() else sizes[factor]
        total += product
    return total


def literal_examples(function: Callable[..., Any], which: int) -> dict[str, Any]:
    """Made-up literals: those of 0 and 1 differ in every argument, and no two arguments differ in the same way."""
    base, flags = (0.3713, 0.7129)[which], 0
    examples: dict[str, Any] = {}
    for index, a in enumerate(arguments(function)):
        if a.kind == "bool":
            examples[a.name], flags = (which == 1) != (flags % 2 == 1), flags + 1
        elif a.kind == "name":
            examples[a.name] = a.names[(which + index) % len(a.names)]
        elif a.kind in ("int", "float"):
            examples[a.name] = int(base * 100) + index if a.kind == "int" else base + 0.0137 * index
    return examples


def call_arguments(
    function: Callable[..., Any], tensors: Mapping[str, torch.Tensor], literals: Mapping[str, Any]
) -> dict[str, Any]:
    """What the function is called with: `weights[0]`, `weights[1]` become the list `weights`."""
    given: dict[str, Any] = {}
    known = {**literals, **tensors}
    for a in arguments(function):
        if a.kind == "tensors":
            items = [f"{a.name}[{i}]" for i in range(len(known))]
            given[a.name] = [known[item] for item in items if item in known]
        elif a.name in known:
            given[a.name] = known[a.name]
    return given
