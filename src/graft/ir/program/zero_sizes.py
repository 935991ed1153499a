"""What a program decides by a size being 0, which torch does not ask: it takes its symbols of sizes for positive.

    if x.shape[0] == 0: …       torch: False, for every size, and no guard       here: a guard `Ne(s77, 0)`

Comparisons that nothing but that assumption decides are answered by the example's sizes, and kept as guards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import sympy
from sympy.logic.boolalg import BooleanAtom
from torch.fx.experimental.sym_node import SymNode

from graft.ir.io.symbols import hints
from graft.ir.nodes import TORCH

COMPARISONS = {"eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge}
ASKS = ("guard_bool", "expect_true")
KEPT = "graft_zero_guards"  # on an environment of sizes
BETWEEN = ("torch/__init__.py", "sym_node.py", "symbolic_shapes.py")  # what torch puts between a program and a size
OPEN = "graft_open_at_zero"  # on a node: the comparison, over symbols that may be 0


@contextmanager
def zero_sizes_asked() -> Iterator[None]:
    """Within it, answers that hold for positive sizes alone are kept with the sizes' environment."""
    own = {name: getattr(SymNode, name) for name in (*COMPARISONS, *ASKS)}
    for name, relation in COMPARISONS.items():
        setattr(SymNode, name, comparing(own[name], relation))
    for name in ASKS:
        setattr(SymNode, name, asking(own[name]))
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(SymNode, name, method)


def comparing(method: Callable[..., Any], relation: Any) -> Callable[..., Any]:
    def compare(left: Any, right: Any) -> Any:
        result = method(left, right)
        if isinstance(getattr(result, "expr", None), BooleanAtom) and isinstance(right, SymNode):
            setattr(result, OPEN, open_at_zero(relation, left.expr, right.expr))
        return result

    return compare


def open_at_zero(relation: Any, left: Any, right: Any) -> Any:
    """The comparison over symbols that may be 0; None where it is decided all the same."""
    if not any(symbol.is_positive for symbol in left.free_symbols | right.free_symbols):
        return None
    found = relation(widened(left), widened(right))
    return None if isinstance(found, BooleanAtom) else found


def widened(expression: Any) -> Any:
    """Over symbols of the same names that may be 0."""
    positive = [symbol for symbol in expression.free_symbols if symbol.is_positive]
    return expression.xreplace({s: sympy.Symbol(s.name, integer=True, nonnegative=True) for s in positive})


def asking(method: Callable[..., Any]) -> Callable[..., Any]:
    def ask(node: Any, file: str, line: int) -> bool:
        comparison = getattr(node, OPEN, None)
        if comparison is None or not asked_by_program():
            return method(node, file, line)
        known = {widened(symbol): size for symbol, size in hints(node.shape_env).items()}
        answer = comparison.xreplace(known)
        if not isinstance(answer, BooleanAtom):  # a size that is known at run time alone
            return method(node, file, line)
        kept = vars(node.shape_env).setdefault(KEPT, {})
        kept[comparison if answer else sympy.Not(comparison)] = None
        return bool(answer)

    return ask


def asked_by_program() -> bool:
    """By the program, or a layer of torch's: operators ask for reasons of their own, and give the same for 0."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(BETWEEN):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return not file.startswith(TORCH) or file.startswith(f"{TORCH}nn/")


def zero_guards(environment: Any) -> list[Any]:
    """The guards that were kept, over the symbols that are left."""
    found = []
    for guard in getattr(environment, KEPT, ()):
        left = {widened(symbol): widened(environment.replace(expr=symbol)) for symbol in hints(environment)}
        found.append(guard.xreplace(left))
    return found
