"""The functions that a program is made of, and what they look up outside of themselves.

Followed are the methods of its modules' classes, torch's own left out, and functions of the same file that they call.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
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


def variables(module: torch.nn.Module) -> list[Variable]:
    """What the program's code looks up, each place once."""
    found: dict[tuple[int, str], Variable] = {}
    waiting, seen = list(functions(module)), set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for key, variable in looked_up(function):
            found[key] = variable
            value = variable.value
            if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                waiting.append(value)
    return list(found.values())


def looked_up(function: types.FunctionType) -> Iterator[tuple[tuple[int, str], Variable]]:
    for cell in function.__closure__ or ():
        if cell != types.CellType():  # filled
            yield (id(cell), ""), Variable(cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
    table = function.__globals__
    for name in global_names(function) & table.keys():
        yield (id(table), name), Variable(table[name], functools.partial(table.__setitem__, name))


def functions(module: torch.nn.Module) -> Iterator[types.FunctionType]:
    classes = {base for part in module.modules() for base in type(part).__mro__}
    own = [base for base in classes if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = [value for base in own for value in vars(base).values()]
    forwards = [vars(part)["forward"] for part in module.modules() if "forward" in vars(part)]  # of a plain function
    for value in (*methods, *forwards):
        value = inspect.unwrap(value) if callable(value) else value
        while isinstance(value, functools.partial):
            value = value.func
        value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType):
            yield value
