"""What a module and the arguments of a call hold in Python, so that a trace can be undone and what changed be named.

A container is one dict, list, set or deque with a copy of its items: the attributes of a module, its table of
buffers, a list that it holds, the attributes of an object that it holds. A tensor is an item: only which tensor it is
counts.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

MODULE_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
STATE_TABLES = ("_buffers", "_parameters", "_modules")
NUMBERS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
MISSING = object()
# Objects of these packages are machinery (graphs, loggers, locks), not state of a model; `types` has SimpleNamespace.
MACHINERY = (sys.stdlib_module_names | {"torch", "graft"}) - {"types", "__main__"}


class Noted:
    """Base class of objects that a forward fills on purpose, for whoever traces it."""


@dataclass(frozen=True)
class SavedContainer:
    path: str
    items: Any  # the dict, list, set or deque itself
    saved: Any  # a copy of it
    owner: torch.nn.Module | None = None  # where the items are attributes or buffers of a module
    refused: bool = True  # whether a change is lost; torch's own tables are only put back

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """(key, old, new) of each item that is another than before; MISSING where there is none."""
        old, new = pairs(self.saved), pairs(self.items)
        for key in {**old, **new}:
            if self.owner is not None and self.items is vars(self.owner) and key in MODULE_TABLES:
                continue
            before, now = old.get(key, MISSING), new.get(key, MISSING)
            if before is MISSING and self.owner is not None:
                before = getattr(type(self.owner), str(key), MISSING)
            if not equal(before, now):
                yield key, before, now

    def put_back(self) -> None:
        if same_items(self.saved, self.items):
            return
        self.items.clear()
        (self.items.extend if isinstance(self.items, (list, deque)) else self.items.update)(self.saved)


@dataclass
class ModuleSnapshot:
    containers: list[SavedContainer] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)  # by id; the objects, so that no id is used twice
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)  # those that are neither parameters nor buffers

    def add_module(self, module: torch.nn.Module) -> None:
        for prefix, part in module.named_modules():
            self.seen[id(part)] = part
            dot = f"{prefix}." if prefix else ""
            for name in MODULE_TABLES:
                table = vars(part).get(name)
                if isinstance(table, (dict, set)):
                    state = name in STATE_TABLES
                    self.containers.append(
                        SavedContainer(dot, table, table.copy(), part if state else None, refused=state)
                    )
            self.containers.append(SavedContainer(dot, vars(part), dict(vars(part)), part))
            for name, value in list(vars(part).items()):
                if name not in MODULE_TABLES:
                    self.add(f"{dot}{name}", value)

    def add(self, path: str, value: Any) -> None:
        """Goes into containers and plain objects, however deep. Modules have places of their own."""
        if isinstance(value, Tensor):
            self.tensors.append((path, value))
        if isinstance(value, (Tensor, *NUMBERS, *SIZES)) or value is None or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if isinstance(value, (dict, list, deque, set)):
            self.containers.append(SavedContainer(path, value, value.copy()))
        if isinstance(value, (dict, list, deque, tuple)):
            for key, item in pairs(value).items():
                self.add(f"{path}[{key!r}]", item)
        if is_plain_object(value):
            state = vars(value)
            self.containers.append(SavedContainer(f"{path}.", state, dict(state)))
            for name, item in list(state.items()):
                self.add(f"{path}.{name}", item)

    def put_back(self) -> None:
        for container in self.containers:
            container.put_back()


def pairs(items: Any) -> dict[Any, Any]:
    if isinstance(items, dict):
        return items
    return {item: item for item in items} if isinstance(items, set) else dict(enumerate(items))


def same_items(left: Any, right: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    old, new = list(pairs(left).items()), list(pairs(right).items())
    return len(old) == len(new) and all(k == j and a is b for (k, a), (j, b) in zip(old, new, strict=True))


def is_plain_object(value: Any) -> bool:
    """Whether `value` may hold state in its attributes: neither code, nor a configuration, nor machinery."""
    if isinstance(
        value, (torch.nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, Enum, Noted)
    ):
        return False
    kind = type(value)
    machinery = kind.__module__.partition(".")[0] in MACHINERY
    return (
        not machinery and not kind.__name__.endswith("Config") and isinstance(getattr(value, "__dict__", None), dict)
    )


def equal(old: Any, new: Any) -> bool:
    """Whether putting `old` back for `new` loses nothing that can be told. A tensor equals only itself."""
    if old is new or (old is MISSING and isinstance(new, bool)):  # a flag of something that is done once
        return True
    if isinstance(old, (list, tuple, deque, dict)) and type(old) is type(new):
        left, right = pairs(old), pairs(new)
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(old, (*NUMBERS, set, frozenset)) and type(old) is type(new):
        return bool(old == new) or (old != old and new != new)
    return not (holds_state(old) or holds_state(new))


def holds_state(value: Any) -> bool:
    """Whether `value` is a tensor, a number, a string, or something with one of them in it."""
    if isinstance(value, (Tensor, torch.nn.Module, *NUMBERS, *SIZES, dict, list, deque, set, frozenset)):
        return True
    if isinstance(value, tuple):
        return any(map(holds_state, value))
    return is_plain_object(value) and any(
        isinstance(item, (Tensor, *NUMBERS, *SIZES)) for item in vars(value).values()
    )


def describe(value: Any) -> str:
    if value is MISSING:
        return "taken away"
    if value is None:
        return "None"
    name = "tensor" if isinstance(value, Tensor) else type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
