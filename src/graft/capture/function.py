"""A plain function as a module: what it closes over is state, under the names of its variables.

cache = torch.zeros(8)
def step(x): cache.add_(x); return cache.sum()      →   a module `step` with the buffer `cache` and that forward
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graft.base.errors import CaptureError, UsageError
from graft.ir.program.own_code import global_names
from graft.ir.snapshot import NUMBERS

CODE = (types.ModuleType, types.BuiltinFunctionType, type)


def as_module(program: Any) -> torch.nn.Module:
    """The module itself, or one that calls the function. Raises UsageError for what cannot be called."""
    if isinstance(program, torch.nn.Module):
        return program
    if isinstance(program, type) and issubclass(program, torch.nn.Module):
        raise UsageError(
            f"{program.__name__} is a class; compile an object of it, as in graft.compile({program.__name__}(…), …)"
        )
    if not callable(program):
        raise UsageError(f"a module or a function can be compiled, not a {type(program).__name__}")
    name = getattr(program, "__name__", type(program).__name__)
    return type(name if name.isidentifier() else "function", (FunctionModule,), {})(program)


class FunctionModule(torch.nn.Module):
    """`forward` has the signature of the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        variables = list(closed_over(function))
        for name, value in {name: value for _, name, value in variables}.items():
            hold(self, name, value)

        @functools.wraps(function, updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            before = [(table, name, table[name]) for table, name, _ in variables]
            try:
                result = function(*args, **kwargs)
                refuse_rebound(before)
                return result
            finally:
                for table, name, value in before:
                    table[name] = value

        self.forward = forward if has_signature(function) else lambda *args: forward(*args)


def hold(module: torch.nn.Module, name: str, value: Any) -> None:
    """Makes `value` state of `module`; what is neither a tensor nor a module is watched for changes."""
    if isinstance(value, (*NUMBERS, types.NoneType)):
        return
    while hasattr(module, name):
        name += "_"
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)


def refuse_rebound(before: list[tuple[Any, str, Any]]) -> None:
    for table, name, value in before:
        if table[name] is not value:
            raise CaptureError(
                f"the function sets the variable {name} of its surroundings: a graph cannot keep it; make it a tensor"
                " and write into it, or return the new value"
            )


class Cells:
    """The variables of enclosing functions, as a mapping."""

    def __init__(self, function: types.FunctionType) -> None:
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        return self.cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value


def closed_over(function: Any, seen: set[int] | None = None) -> Iterator[tuple[Any, str, Any]]:
    """(table, name, value) of each variable outside that the function reads or sets, also in functions that it calls
    and that are closed over themselves, or stand in its own file."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
        yield from owned({f"argument_{index}": part for index, part in enumerate(parts)}, seen, "")
    elif isinstance(function, types.MethodType):
        yield from owned({"self": function.__self__, "function": function.__func__}, seen, "")
    elif isinstance(wrapped := getattr(function, "__wrapped__", None), types.FunctionType):
        yield from closed_over(wrapped, seen)
    elif isinstance(function, types.FunctionType):
        yield from variables_of(function, seen)
    elif not isinstance(function, CODE):
        yield {"self": function}, "self", function  # an object that can be called


def variables_of(function: types.FunctionType, seen: set[int]) -> Iterator[tuple[Any, str, Any]]:
    cells = Cells(function)
    filled = {name: cells[name] for name, cell in cells.cells.items() if cell != types.CellType()}
    yield from owned(filled, seen, "", cells)
    names = [name for name in global_names(function) if name in function.__globals__]
    values = {name: function.__globals__[name] for name in names}
    yield from owned(values, seen, function.__module__, function.__globals__)


def owned(values: dict[str, Any], seen: set[int], module: str, table: Any = None) -> Iterator[tuple[Any, str, Any]]:
    """Variables that hold something, and what the functions among them close over; all of them, or of one file."""
    for name, value in values.items():
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            if str(getattr(value, "__module__", "")).startswith("torch."):
                continue  # an operator, whose own variables (warnings that were given once) are none of the program's
            if not module or getattr(value, "__module__", module) == module:
                yield from closed_over(value, seen)
        elif not isinstance(value, CODE) and not name.startswith("__"):
            yield (values if table is None else table), name, value


def has_signature(function: Any) -> bool:
    try:
        inspect.signature(function)
    except ValueError:  # of a builtin, which does not say
        return False
    return True
