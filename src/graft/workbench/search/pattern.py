"""What is looked for: a function of a file, or a line of ops that read one another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from graft.base.errors import UsageError
from graft.ops import OPS
from graft.workbench.scaffold.body import body_of_functions, functions_of, read_shapes


@dataclass(frozen=True)
class SearchPattern:
    """function: with the shapes that it is traced with; None where it is a line of `ops`."""

    text: str
    ops: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    shapes: Mapping[str, str] = field(default_factory=dict)


def read_pattern(text: str, shapes: str | None = None) -> SearchPattern:
    """`FILE.py:function`, or `relu pow mul`; arrows and commas between ops are fine."""
    path, colon, name = text.rpartition(":")
    if colon and name.isidentifier() and (path.endswith(".py") or Path(path).exists()):
        body = body_of_functions(text, None, None if shapes is None else read_shapes(shapes))
        return SearchPattern(text, (), functions_of(body)[0], dict(body.shapes))
    if shapes is not None:
        raise UsageError("--shapes belongs to a pattern FILE.py:function; a line of ops has none")
    ops = tuple(part for part in re.split(r"[\s,]+|->|→", text.strip()) if part)
    if not ops:
        raise UsageError("the pattern is empty; write FILE.py:function, or a line of ops: 'relu pow mul'")
    for op in ops:
        check_op(op)
    return SearchPattern(text, ops)


def check_op(name: str) -> None:
    known = {*OPS, *(op.partition(".")[0].partition("::")[2] for op in torch._C._dispatch_get_all_op_names())}
    if name not in known:
        like = get_close_matches(name, sorted(known), 2)
        meant = f"; did you mean {' or '.join(map(repr, like))}?" if like else "."
        raise UsageError(f"no op is named {name!r}{meant} Ops are named as in a dump, without `aten.`")
