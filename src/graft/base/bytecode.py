"""What a function's code holds, for those who write it down to tell it from other code."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any


def code_text(code: types.CodeType, constant: Callable[[Any], str]) -> str:
    """Its instructions, names and constants, and those of the functions inside it."""
    consts = [code_text(c, constant) if isinstance(c, types.CodeType) else constant(c) for c in code.co_consts]
    shape = (code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_varnames, code.co_freevars)
    return f"code({code.co_code.hex()} {code.co_names} {shape} {consts})"


def names_in(code: types.CodeType) -> Iterator[str]:
    """Of globals and attributes, those of the functions inside it too."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from names_in(const)


def cell_value(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return "empty"
