"""The functions that a program is made of, and what they look up outside of themselves.

Followed are the methods of its modules' classes, torch's own left out, and functions of the same file that they call.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Variable:
    """A global variable, or one of an enclosing function."""

    value: Any
    put: Callable[[Any], None]


def global_names(function: types.FunctionType) -> set[str]:
    """The names that its code, and code within it, may look up outside."""
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return names


@dataclass(frozen=True)
class VariablePlace:
    """Where a variable is: a name in a table, or the cell of an enclosing function."""

    name: str
    value: Any
    table: dict[str, Any]
    cell: types.CellType | None = None

    def put(self, value: Any) -> None:
        if self.cell is not None:
            self.cell.cell_contents = value
        else:
            self.table[self.name] = value


def variables(module: torch.nn.Module) -> list[Variable]:
    """What the program's code looks up, each place once."""
    return [Variable(place.value, place.put) for place in places(module)]


def places(module: torch.nn.Module) -> list[VariablePlace]:
    found: dict[tuple[int, str], VariablePlace] = {}
    waiting, seen = list(functions(module)), set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for key, place in looked_up(function):
            found[key] = place
            value = place.value
            if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                waiting.append(value)
    return list(found.values())


def looked_up(function: types.FunctionType) -> Iterator[tuple[tuple[int, str], VariablePlace]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # filled
            yield (id(cell), ""), VariablePlace(name, cell.cell_contents, {}, cell)
    table = function.__globals__
    for name in global_names(function) & table.keys():
        yield (id(table), name), VariablePlace(name, table[name], table)


def functions(module: torch.nn.Module) -> Iterator[types.FunctionType]:
    for _, function in methods(module):
        yield function


def reached(found: Iterable[tuple[str, types.FunctionType]]) -> list[types.FunctionType]:
    """Those to which `forward` leads: functions of one name count as one, and so do those of the same file."""
    by_name: dict[str, list[types.FunctionType]] = {}
    for name, function in found:
        by_name.setdefault(name, []).append(function)
    waiting: list[types.FunctionType] = list(by_name.get("forward", ()))
    seen: dict[types.FunctionType, None] = {}
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen[current] = None
        for name in global_names(current):
            waiting += by_name.get(name, ())
            outside = current.__globals__.get(name)
            if isinstance(outside, types.FunctionType) and outside.__module__ == current.__module__:
                waiting.append(outside)
    return list(seen)


def methods(module: torch.nn.Module) -> Iterator[tuple[str, types.FunctionType]]:
    """Methods and properties of the program's own classes, by their names; the forward of a plain function."""
    classes = {base for part in module.modules() for base in type(part).__mro__}
    for base in classes:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield from methods_of(base)
    for part in module.modules():
        if "forward" in vars(part):
            yield from named("forward", vars(part)["forward"])


def methods_of(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in list(vars(kind).items()):
        yield from named(name, value)


def named(name: str, value: Any) -> Iterator[tuple[str, types.FunctionType]]:
    value = value.fget if isinstance(value, property) else value
    value = inspect.unwrap(value) if callable(value) else value
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        yield name, value
