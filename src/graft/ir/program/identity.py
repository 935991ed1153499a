"""Programs that ask whether two of their tensors are one object: `if key is query`.

A trace gives every input an object of its own, so a graph holds the answer for different ones.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from graft.base.errors import UsageError
from graft.ir.program.own_code import methods, reached

HELD = ("LOAD_FAST", "LOAD_DEREF", "BINARY_SUBSCR")  # what a tensor may come from; `is None` compares a constant


def line_that_compares(module: torch.nn.Module) -> str:
    """The first line of the program's own code that compares two objects by `is`; empty where none does."""
    lines = (
        f"{Path(f.__code__.co_filename).name}:{line}"
        for f in reached(methods(module))
        for line in compared(f.__code__)
    )
    return next(lines, "")


def compared(code: CodeType) -> Iterator[int]:
    before, line = ["", ""], code.co_firstlineno
    for one in dis.get_instructions(code):
        line = one.starts_line if type(one.starts_line) is int else getattr(one, "line_number", None) or line
        if one.opname == "IS_OP" and all(name.startswith(HELD) for name in before):
            yield line
        before = [before[1], one.opname] if "_LOAD_" not in one.opname else [one.opname] * 2
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from compared(inner)


def refuse_one_tensor_twice(values: Sequence[Any], names: Sequence[str], line: str) -> None:
    """`line`: where the program compares objects."""
    seen: dict[int, str] = {}
    for value, name in zip(values, names, strict=True):
        if isinstance(value, torch.Tensor) and seen.setdefault(id(value), name) != name:
            raise UsageError(
                f"{seen[id(value)]} and {name} are one tensor, and the program compares objects by `is` ({line}), of"
                f" which a graph has the answer for different ones; pass {name}.view_as({name}), or compile a"
                " function of one argument"
            )
