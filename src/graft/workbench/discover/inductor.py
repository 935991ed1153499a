"""Patterns of Inductor, read as text from the installed torch, each as a function that can be tried on a piece."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from graft.workbench.discover.aten import addmm
from graft.workbench.discover.known import Known

# Patterns that Inductor writes as trees of calls and not as functions: file, symbol, the same as a function.
TREES: tuple[tuple[str, str, Callable[..., Any], int], ...] = (
    ("post_grad.py", "addmm", addmm, 3),
    ("post_grad.py", "mm_plus_mm", lambda a, b, c, d: F.linear(a, b) + F.linear(c, d), 4),
)


@cache
def inductor_patterns() -> tuple[Known, ...]:
    """Inductor's pattern files, read as text: functions that are patterns, and trees that the table above spells."""
    folder = Path(torch.__file__).parent / "_inductor" / "fx_passes"
    found: list[Known] = []
    for file in (path for path in (folder / "fuse_attention.py", folder / "post_grad.py") if path.is_file()):
        tree = ast.parse(file.read_text())
        defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        origin = f"torch/_inductor/fx_passes/{file.name}"
        for name, symbol, call, tensors in TREES:
            if name == file.name and symbol in defined:
                found.append(Known("inductor", symbol, origin, call, tensors))
        if file.name == "fuse_attention.py":
            found += attention_patterns([n for n in defined.values() if n.name.startswith("_sfdp_pattern")], origin)
    return tuple(found)


def attention_patterns(functions: list[ast.FunctionDef], origin: str) -> Iterator[Known]:
    """Patterns that are plain functions of tensors and at most one scale; dropout is 0 in a captured graph."""
    space: dict[str, Any] = {"torch": torch, "math": math, "aten": torch.ops.aten}
    for node in functions:
        node.decorator_list, node.returns = [], None
    exec(compile(ast.Module(list(functions), []), origin, "exec"), space)
    note = "Inductor replaces it by scaled_dot_product_attention"
    for name in (node.name for node in functions):
        names = list(inspect.signature(space[name]).parameters)
        scales = [one for one in names if "scale" in one]
        plain = [one for one in names if one not in scales and one != "dropout_p"]
        if len(scales) < 2:
            call = partial(call_pattern, space[name], [*plain, *scales], "dropout_p" in names)
            yield Known("inductor", name, origin, call, len(plain), len(scales), note, heads=True)


def call_pattern(function: Callable[..., Any], names: list[str], dropout: bool, *given: Any) -> Any:
    return function(**dict(zip(names, given, strict=True)), **({"dropout_p": 0.0} if dropout else {}))
