"""What a program's code reads beside tensors, and where it lies: attributes, what objects hold, variables outside.

A graph holds all of it as it was when it was captured. Read is what code names to which `forward` leads: methods and
properties of the program's own classes and of torch's layers (`p` of a dropout), functions of its files, hooks.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch

from graft.capture.function import FunctionModule
from graft.ir.program.own_code import VariablePlace, functions, global_names, methods, methods_of, places, reached
from graft.ir.snapshot import MISSING, MODULE_TABLES, NUMBERS, is_plain_object

Entry = tuple[Any, str, Any, str, str]  # table, key, what it holds, the path, and what that is
SIMPLE = (*NUMBERS, types.NoneType)
MOST_ITEMS = 64  # of a list that is compared before every call
LRU = type(lru_cache(int))
OWN_TABLES = MODULE_TABLES | {"training"}  # a mode is a variant
# What code asks about its surroundings, and what the graph takes for the answer
ANSWERS = {
    "is_grad_enabled": "no",
    "is_inference_mode_enabled": "no",
    "get_default_dtype": "the one that it was captured in",
}
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True)
class CellTable:
    """The variable of an enclosing function, as a table of one."""

    cell: types.CellType

    def get(self, _: str, default: Any) -> Any:
        return self.cell.cell_contents if self.cell != types.CellType() else default


@dataclass
class CodeReads:
    entries: list[Entry] = field(default_factory=list)  # each is that object
    contents: list[Entry] = field(default_factory=list)  # each equals what it was
    seen: set[int] = field(default_factory=set)
    configured: set[str] = field(default_factory=set)  # what any code of the program names: decorators read these

    def add(self, table: Any, key: str, value: Any, path: str, kind: str, names: set[str]) -> None:
        if is_simple(value) and not isinstance(value, (*SIMPLE, tuple)):
            self.contents.append((table, key, value.copy(), path, kind))
        else:
            self.entries.append((table, key, value, path, kind))
        self.look_into(value, path, names)

    def look_into(self, value: Any, path: str, names: set[str]) -> None:
        """What an object holds, where the program or the object's own methods name it."""
        configuration = type(value).__name__.endswith("Config") and isinstance(getattr(value, "__dict__", None), dict)
        if not (is_plain_object(value) or configuration) or id(value) in self.seen:
            return
        self.seen.add(id(value))
        names = names | (self.configured if configuration else names_of_object(type(value)))
        for name, item in list(vars(value).items()):
            if name in names:
                self.add(vars(value), name, item, f"{path}.{name}", "attribute", names)


def watched(module: torch.nn.Module) -> CodeReads:
    own = names_read([*methods(module), *hooks_of(module)])
    found = CodeReads(configured={name for function in functions(module) for name in global_names(function)})
    classes = {base for part in module.modules() for base in type(part).__mro__ if base is not torch.nn.Module}
    for path, part in module.named_modules():
        dot, known = f"{path}." if path else "", own
        if isinstance(part, FunctionModule):
            known = own | vars(part).keys()  # what it closes over
        names = known | names_of_layer(type(part))
        for name, value in vars(part).items():
            if name in OWN_TABLES or name not in names or isinstance(value, torch.nn.Module):
                continue
            if name in known or is_simple(value) or isinstance(value, FUNCTIONS):  # layers keep lists of weights
                found.add(vars(part), name, value, f"{dot}{name}", "attribute", own)
        for name in names & class_numbers(type(part)) - vars(part).keys():
            found.entries.append((vars(part), name, MISSING, f"{dot}{name}", "attribute"))
    for base in classes - {object}:
        for name in class_numbers(base) & vars(base).keys() & (own | names_of_layer(base)):
            found.entries.append((vars(base), name, vars(base)[name], f"{base.__name__}.{name}", "attribute"))
    for place in places(module):
        add_place(found, place, own)
    return found


def answers(module: torch.nn.Module) -> list[str]:
    """Notes on what the program's code asks about its surroundings, where the graph has one answer for all calls."""
    names = names_read([*methods(module), *hooks_of(module)])
    asked = [
        f"asked: forward asks for {n}(); in the graph the answer is {a}" for n, a in ANSWERS.items() if n in names
    ]
    own = {function.__module__ for function in functions(module)}
    return asked + [
        f"asked: {place.name} keeps what it gave (functools.lru_cache); the graph computes it anew at each call"
        for place in places(module)
        if type(place.value) is LRU and place.name in names and place.value.__wrapped__.__module__ in own
    ]


def add_place(found: CodeReads, place: VariablePlace, names: set[str]) -> None:
    """A variable outside of the functions that read it. A tensor is the one that the graph holds."""
    value, name = place.value, place.name
    if name not in names or name.startswith("__"):
        return
    if is_simple(value) or isinstance(value, (torch.Tensor, torch.nn.Module)):
        table = place.table if place.cell is None else CellTable(place.cell)
        found.add(table, name, value, name, "variable", names)
    elif is_plain_object(value):  # what registries hold (lists, dicts) changes as libraries are loaded
        numbers = ((key, item) for key, item in vars(value).items() if key in names and isinstance(item, SIMPLE))
        found.entries += ((vars(value), key, item, f"{name}.{key}", "attribute") for key, item in numbers)


def is_simple(value: Any) -> bool:
    """Numbers and texts, and what holds nothing else and few of them."""
    if isinstance(value, (list, tuple, set, frozenset, dict)) and type(value).__module__ == "builtins":
        items = chain(value, value.values()) if isinstance(value, dict) else value
        return len(value) <= MOST_ITEMS and all(map(is_simple, items))
    return isinstance(value, SIMPLE)


def hooks_of(module: torch.nn.Module) -> Iterable[tuple[str, types.FunctionType]]:
    tables = (vars(part)[name] for part in module.modules() for name in HOOKS)
    return [("forward", hook) for table in tables for hook in table.values() if isinstance(hook, types.FunctionType)]


def names_read(found: Iterable[tuple[str, types.FunctionType]]) -> set[str]:
    """All that code names to which `forward` leads, by names."""
    return {name for function in reached(found) for name in (*global_names(function), *function.__code__.co_freevars)}


@cache
def names_of_layer(kind: type) -> set[str]:
    """What the forward of torch's own layers reads of them; nothing of other classes."""
    classes = [base for base in kind.__mro__ if base.__module__.startswith("torch.") and base is not torch.nn.Module]
    return names_read([pair for base in classes for pair in methods_of(base)])


@cache
def names_of_object(kind: type) -> set[str]:
    classes = [base for base in kind.__mro__ if base.__module__ != "builtins"]
    return {name for base in classes for _, method in methods_of(base) for name in global_names(method)}


@cache
def class_numbers(kind: type) -> set[str]:
    """Numbers and texts that stand in a class: an object has them where it has none of its own."""
    classes = [base for base in kind.__mro__ if base not in (object, torch.nn.Module)]
    return {
        name for base in classes for name, value in vars(base).items()
        if isinstance(value, NUMBERS) and not name.startswith("__")
    }  # fmt: skip
