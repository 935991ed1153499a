"""What around a call decides what a program computes: the modes of its modules, and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType

import torch

from graft.base.errors import AutocastRefused, UsageError
from graft.ir.program.own_code import global_names

Modes = tuple[bool, ...]


class ModeParts:
    """The modules whose code asks for `training`, or calls a function of its file that does; and those with hooks."""

    def __init__(self, module: torch.nn.Module) -> None:
        # what torch.compile gives has no mode of its own, but that of the module in it
        own = ((path, part) for path, part in module.named_modules() if "training" in vars(part))
        parts = [(path, part) for path, part in own if asks(part)]
        self.paths = tuple(path for path, _ in parts)
        self._tables = [vars(part) for _, part in parts]

    def now(self) -> Modes:
        return tuple(table["training"] for table in self._tables)


def asks(part: torch.nn.Module) -> bool:
    if part._forward_hooks or part._forward_pre_hooks:
        return True
    return any("training" in global_names(found) for function in own_code(part) for found in with_helpers(function))


def own_code(part: torch.nn.Module) -> Iterator[FunctionType]:
    classes = [base for base in type(part).__mro__ if base not in (torch.nn.Module, object)]
    values = [value for base in classes for value in vars(base).values()]
    for value in (*values, vars(part).get("forward")):
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        if isinstance(value, FunctionType):
            yield value


def with_helpers(function: FunctionType) -> Iterable[FunctionType]:
    table = function.__globals__
    named = [table.get(name) for name in global_names(function)]
    return [function, *(f for f in named if isinstance(f, FunctionType) and f.__module__ == function.__module__)]


def mode_text(paths: tuple[str, ...], now: Modes, known: Modes) -> str:
    """What is against a graph that was captured in modes `known`."""
    path, mode = next((p, a) for p, a, b in zip(paths, now, known, strict=True) if a != b)
    name = f"the module {path}" if path else "the module"
    return f"{name} is in {'training' if mode else 'evaluation'} mode, and the graph was captured in the other"


def refuse_autocast(kinds: Iterable[str]) -> None:
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            raise AutocastRefused(kind, torch.get_autocast_dtype(kind))


def refuse_mode(mode: bool, variants: Iterable[Modes | None]) -> None:
    """Of a module that cannot be captured again."""
    listed = list(variants)
    known = [modes for modes in listed if modes is not None]
    if mode and None in listed:
        raise UsageError("an exported program computes what it did when it was exported; export it in training mode")
    if not known or any(all(flag is mode for flag in modes) for modes in known):
        return
    name, other = ("training", "evaluation") if mode else ("evaluation", "training")
    raise UsageError(
        f"the graph was captured in {other} mode, and a loaded module or an exported program cannot be captured in"
        f" {name} mode; call the compiled module in both before saving, or compile the module"
    )
