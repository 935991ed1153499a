"""Symbolic sizes as text and back: the symbols of a graph with their ranges, and expressions over them."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graft.base.errors import DumpError
from graft.ir.nodes import SYMBOLIC, leaves


@dataclass(frozen=True)
class Symbol:
    """A size known at run time: what it was in the example (none for one that data decides) and what it may be."""

    name: str
    hint: int | None
    lower: int | None  # None: no bound
    upper: int | None
    positive: bool = True


def symbols_of(values: Iterable[Any]) -> tuple[Symbol, ...]:
    """The symbols in these abstract values, by name."""
    found: dict[str, Symbol] = {}
    for value in values:
        for leaf in leaves(value):
            for item in sizes_of(leaf) if is_dense(leaf) else [leaf]:
                if isinstance(item, SYMBOLIC):
                    env = item.node.shape_env
                    for symbol in item.node.expr.free_symbols:
                        if str(symbol) not in found:
                            found[str(symbol)] = read_symbol(symbol, env)
    return tuple(found[name] for name in sorted(found))


def sizes_of(value: torch.Tensor) -> list[Any]:
    """Those of its memory too: of an input that is a view, torch makes the whole that it views symbolic."""
    return [*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes()]


def is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def read_symbol(symbol: Any, env: Any) -> Symbol:
    known = hints(env).get(symbol)
    bounds = env.var_to_range.get(symbol)
    lower, upper = (finite(bounds.lower), finite(bounds.upper)) if bounds is not None else (None, None)
    return Symbol(str(symbol), None if known is None else int(known), lower, upper, bool(symbol.is_positive))


def hints(env: Any) -> dict[Any, Any]:
    """torch 2.12 renamed the table of example sizes."""
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


def finite(bound: Any) -> int | None:
    return int(bound) if getattr(bound, "is_Integer", isinstance(bound, int)) else None


def fresh_mode() -> Any:
    """A new FakeTensorMode with an empty shape environment; a symbolic trace is the public way to one."""
    traced = make_fx(lambda x: x, tracing_mode="symbolic")(torch.empty(7))
    return next(iter(traced.graph.nodes)).meta["val"].fake_mode


def declare(symbols: Iterable[Symbol], mode: Any) -> dict[str, torch.SymInt]:
    """Makes the symbols in the mode's shape environment, under their names."""
    env = mode.shape_env
    unbounded = next(iter(env.var_to_range.values())).upper  # of the size that fresh_mode traced
    add_hint = getattr(env, "add_backed_var_to_val", None) or env.add_var_to_val
    made = {}
    for entry in symbols:
        symbol = sympy.Symbol(entry.name, integer=True, positive=True if entry.positive else None)
        for table in (hints(env), env.var_to_range):  # the size that fresh_mode traced may have this name
            table.pop(symbol, None)
        if entry.hint is not None:
            add_hint(symbol, entry.hint)
        lower = -unbounded if entry.lower is None else entry.lower
        env.constrain_symbol_range(symbol, lower, unbounded if entry.upper is None else entry.upper)
        made[entry.name] = env.create_symintnode(symbol, hint=entry.hint)
        number = entry.name.lstrip("suzf")
        if number.isdigit():
            env.unique_ids.add(int(number))  # torch names new symbols by numbers that are not in there
    return made


def modular(base: Any, divisor: Any, modulus: Any) -> Any:
    return (base // divisor) % modulus


def ceil_div(base: Any, divisor: Any) -> Any:
    return -(-base // divisor)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": lambda *values: reduce(torch.sym_max, values),
    "Min": lambda *values: reduce(torch.sym_min, values),
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": ceil_div,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": modular,
    "PowByNatural": operator.pow,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": torch.sym_float,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "TruncToInt": math.trunc,
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Where": torch.sym_ite,
}
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.USub: operator.neg,
    ast.Invert: torch.sym_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression as torch prints it: `2*s0 + 1`, `(s0//2)`, `Max(1, s0)`. Nothing else is run.

    torch may simplify by ranges that were not known yet when it was printed: `PythonMod(s1, 4)` becomes `Mod(s1, 4)`.
    """
    try:
        return walk(ast.parse(text, mode="eval").body, names)
    except (SyntaxError, KeyError, TypeError) as error:
        raise DumpError(f"the size {text!r} cannot be read: {type(error).__name__}: {error}") from error


def walk(tree: ast.AST, names: Mapping[str, Any]) -> Any:
    match tree:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](walk(left, names), walk(right, names))
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)](walk(operand, names))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return OPERATORS[type(op)](walk(left, names), walk(right, names))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return FUNCTIONS[name](*(walk(argument, names) for argument in args))
    raise KeyError(ast.unparse(tree))


@lru_cache(maxsize=4096)
def check_readable(text: str) -> None:
    """Raises DumpError for an expression that `evaluate` would not understand."""
    tree = ast.parse(text, mode="eval").body
    for part in ast.walk(tree):
        called = part.func.id if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) else None
        operation = getattr(part, "op", None) or (part.ops[0] if isinstance(part, ast.Compare) else None)
        if (called and called not in FUNCTIONS) or (operation and type(operation) not in OPERATORS):
            raise DumpError(f"the size {text} uses {called or type(operation).__name__}, which cannot be stored")
