"""What a graph may be called with: its inputs, and what the program decided by their sizes while it was captured.

Sizes that were left dynamic are expressions over symbols (`s0`, `2*s0 + 1`). A call binds the symbols to its sizes;
the guards then say whether the graph is right for them. All of it is text and numbers, so that it can be stored.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil, floor, inf
from typing import Any

import torch
from torch.fx import GraphModule

from graft.base.errors import CaptureError, GuardFailed, UsageError
from graft.ir.edit import fake_mode
from graft.ir.io.literals import decode_literal, encode_literal
from graft.ir.io.symbols import finite
from graft.ir.nodes import placeholders, static_int, val
from graft.ir.program.zero_sizes import zero_guards

SYMBOL = re.compile(r"[A-Za-z_]\w*")
# what sympy and torch write in guards
FUNCTIONS: dict[str, Any] = {
    "Eq": lambda a, b: a == b,
    "Ne": lambda a, b: a != b,
    "And": lambda *items: all(items),
    "Or": lambda *items: any(items),
    "Not": lambda item: not item,
    "Max": max,
    "Min": min,
    "Abs": abs,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "ToFloat": float,
    "TruncToInt": int,
    "floor": floor,
    "FloorToInt": floor,
    "ceiling": ceil,
    "CeilToInt": ceil,
    "PowByNatural": lambda a, b: a**b,
    "Piecewise": lambda *cases: next(value for value, holds in cases if holds),
    "Where": lambda holds, a, b: a if holds else b,
    "Identity": lambda a: a,
    "True": True,
    "False": False,
    "int_oo": inf,
}


# what an expression may hold besides calls of these and numbers; `~` is not in it: of a truth value it is no negation
PLAIN = (
    *(ast.Expression, ast.Name, ast.Load, ast.Tuple, ast.BinOp, ast.Compare, ast.BoolOp, ast.UnaryOp),
    *(ast.operator, ast.cmpop, ast.boolop, ast.USub, ast.UAdd, ast.Not),
)


@dataclass(frozen=True)
class Leaf:
    """One input. A tensor has dtype, device and shape; anything else a `value`, fixed or (text) an expression."""

    name: str
    dtype: str | None = None
    device: str | None = None
    shape: tuple[int | str, ...] = ()
    value: Any = None
    symbolic: bool = False  # `value` is an expression over symbols
    contiguous: bool | None = None  # whether it was, where the program has asked
    strides: tuple[int, ...] | None = None  # those of a contiguous one follow from its sizes
    offset: int | None = None  # where it started in its storage, where the program has asked
    layout: str = "strided"
    counts: bool = False  # changes from call to call: another value takes another way, and is no mistake

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    def text(self) -> str:
        if self.is_tensor:
            return f"{self.dtype}[{', '.join(map(str, self.shape))}] on {self.device}"
        return str(self.value)


@dataclass(frozen=True)
class Signature:
    """The inputs of a graph in order, and the guards over their symbols."""

    leaves: tuple[Leaf, ...]
    guards: tuple[str, ...] = ()
    ranges: dict[str, tuple[int, int | None]] = field(default_factory=dict)  # symbol -> smallest, largest
    names: dict[str, str] = field(default_factory=dict)  # symbol -> the Dim that the caller gave for it

    def to_data(self) -> dict[str, Any]:
        """As JSON holds it."""
        leaves = [asdict(leaf) | {"value": encode_literal(leaf.value)} for leaf in self.leaves]
        return {"leaves": leaves, "guards": list(self.guards), "ranges": dict(self.ranges), "names": dict(self.names)}

    @staticmethod
    def from_data(data: dict[str, Any]) -> Signature:
        leaves = [
            Leaf(**entry | {"shape": tuple(entry["shape"]), "value": decode_literal(entry["value"])})
            for entry in data["leaves"]
        ]
        leaves = [replace(leaf, strides=leaf.strides and tuple(leaf.strides)) for leaf in leaves]
        ranges = {symbol: (low, high) for symbol, (low, high) in data["ranges"].items()}
        return Signature(tuple(leaves), tuple(data["guards"]), ranges, data.get("names", {}))

    @property
    def names_of_inputs(self) -> list[str]:
        return [leaf.name for leaf in self.leaves]

    @cached_property
    def code(self) -> dict[str, Any]:
        """Every expression, compiled."""
        dims = (dim for leaf in self.leaves for dim in leaf.shape if isinstance(dim, str))
        values = (leaf.value for leaf in self.leaves if leaf.symbolic)
        return {text: compile_expression(text) for text in (*self.guards, *dims, *values)}

    @cached_property
    def asks_offset(self) -> bool:
        """Whether the graph is for tensors that start where the example's did in their storages."""
        return any(leaf.offset is not None for leaf in self.leaves)

    @cached_property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        return tuple(getattr(torch, leaf.dtype) if leaf.dtype else None for leaf in self.leaves)

    def check(self, values: Sequence[Any]) -> None:
        """Raises UsageError for inputs that are none of the graph's, GuardFailed where another graph is needed."""
        self.check_guards(self.bind(values))

    def bind(self, values: Sequence[Any]) -> dict[str, int]:
        """The sizes of a call by symbol; raises as `check` does, guards aside."""
        bound: dict[str, int] = {}
        dependent: list[tuple[str, str, int]] = []
        for leaf, dtype, value in zip(self.leaves, self.dtypes, values, strict=True):
            problem = kind_problem(leaf, dtype, value)
            if problem:
                advice = "" if leaf.counts else "; compile again, with dynamic_shapes where sizes vary"
                raise (GuardFailed if leaf.counts else UsageError)(f"input {leaf.name} {problem}{advice}")
            if lies := layout_problem(leaf, value):
                raise GuardFailed(f"input {leaf.name} {lies}, which the program asks for")
            for location, expression, size in free_sizes(leaf, value):
                if SYMBOL.fullmatch(expression) and expression not in bound:
                    bound[expression] = size
                else:
                    dependent.append((location, expression, size))
        for location, expression, size in dependent:
            expected = self.code[expression](bound)
            if expected != size:
                raise GuardFailed(
                    f"{location} is {size}, but must be {expression} = {expected}, given the other inputs"
                )
        return bound

    def describe_sizes(self) -> dict[str, str]:
        """Symbol → where a call binds it, and to what: `dim 0 of x, from 1 to 64`."""
        return {symbol: f"{self.location(symbol)}, {range_text(*limits)}" for symbol, limits in self.ranges.items()}

    def check_guards(self, bound: dict[str, int]) -> None:
        for guard in self.guards:
            if not self.code[guard](bound):
                raise GuardFailed(f"{self.explain(guard, bound)} does not hold")
        for symbol, (low, high) in self.ranges.items():
            if symbol in bound and (bound[symbol] < low or (high is not None and bound[symbol] > high)):
                limits = range_text(low, high)
                # torch captures for 2 and more where it does not look at 0 and 1: those need a graph of their own
                error = GuardFailed if low == 2 and bound[symbol] in (0, 1) else UsageError
                raise error(f"{self.location(symbol)} is {bound[symbol]}, but the graph is for sizes {limits}")

    def explain(self, guard: str, bound: dict[str, int]) -> str:
        """`s0 > 1 (s0 = 1, dim 1 of input_ids)`."""
        used = [symbol for symbol in dict.fromkeys(SYMBOL.findall(guard)) if symbol in bound]
        return f"{guard} ({'; '.join(f'{s} = {bound[s]}, {self.location(s)}' for s in used)})"

    def location(self, symbol: str) -> str:
        for leaf in self.leaves:
            if symbol in leaf.shape:
                return f"dim {leaf.shape.index(symbol)} of {leaf.name}"
            if leaf.symbolic and leaf.value == symbol:
                return leaf.name
        return symbol


def range_text(low: int, high: int | None) -> str:
    return f"from {low} to {high}" if high is not None else f"of at least {low}"


def kind_problem(leaf: Leaf, dtype: torch.dtype | None, value: Any) -> str | None:
    if not leaf.is_tensor:
        if leaf.symbolic:
            number = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
            return None if number else f"is {value!r}, but was a number"
        same = type(value) is type(leaf.value) and same_value(value, leaf.value)
        return None if same or value is leaf.value else f"is {value!r}, but {leaf.value!r} is fixed in the graph"
    if not isinstance(value, torch.Tensor):
        return f"is {type(value).__name__}, but was a tensor"
    if value.dtype != dtype or str(value.device) != leaf.device:
        return f"is {value.dtype} on {value.device}, but was torch.{leaf.dtype} on {leaf.device}"
    if str(value.layout) != f"torch.{leaf.layout}":
        return f"is {value.layout}, but was torch.{leaf.layout}"
    sizes = [size for size in leaf.shape if isinstance(size, int)]
    fixed = [size for size, known in zip(value.shape, leaf.shape, strict=False) if isinstance(known, int)]
    if value.dim() != len(leaf.shape) or sizes != fixed:
        return f"has the shape {tuple(value.shape)}, but was captured as {leaf.text()}"
    return None


def layout_problem(leaf: Leaf, value: Any) -> str | None:
    if leaf.contiguous is not None and value.is_contiguous() != leaf.contiguous:
        return "is contiguous" if value.is_contiguous() else "is not contiguous"
    if leaf.strides is not None and value.stride() != leaf.strides:
        return f"has the strides {value.stride()}"
    if leaf.offset is not None and value.storage_offset() != leaf.offset:
        return f"starts at {value.storage_offset()} of its storage"
    return None


def same_value(left: Any, right: Any) -> bool:
    """Floats by their text: nan is nan, and -0.0 is not 0.0."""
    return repr(left) == repr(right) if isinstance(left, float) else left == right


def free_sizes(leaf: Leaf, value: Any) -> Iterable[tuple[str, str, int]]:
    """What a leaf leaves open, as (location, expression, size in this call)."""
    if leaf.is_tensor:
        for dim, expression in enumerate(leaf.shape):
            if isinstance(expression, str):
                yield f"dim {dim} of {leaf.name}", expression, value.shape[dim]
    elif leaf.symbolic:
        yield leaf.name, leaf.value, value


def compile_expression(text: str) -> Callable[[dict[str, int]], Any]:
    """Arithmetic, comparisons and FUNCTIONS over symbols. Anything else is refused: the text may come from a file."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise CaptureError(f"the expression {text!r} cannot be read: {error.msg}") from error
    for node in ast.walk(tree):
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        number = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
        if not (call or number or isinstance(node, PLAIN)):
            raise CaptureError(f"the expression {text!r} of a size is not understood; make the size static")
    code = compile(tree, "<size>", "eval")
    return lambda bound: eval(code, {"__builtins__": {}, **FUNCTIONS}, bound)


def read_signature(gm: GraphModule, given: Sequence[Any], names: Sequence[str]) -> Signature:
    """The signature of a captured graph, from the abstract values of its inputs."""
    nodes = placeholders(gm.graph)
    if len(nodes) != len(given):
        raise CaptureError("inputs in containers other than list, tuple and dict cannot be checked; pass tensors")
    leaves = tuple(read_leaf(name, val(n), value) for n, name, value in zip(nodes, names, given, strict=True))
    symbols = set(SYMBOL.findall(" ".join(str(dim) for leaf in leaves for dim in (*leaf.shape, leaf.value))))
    environment = environment_of(gm)
    if environment is None:
        return Signature(leaves)
    ranges = {
        str(symbol): (finite(limits.lower) or 0, finite(limits.upper))
        for symbol, limits in environment.var_to_range.items()
        if str(symbol) in symbols
    }
    return Signature(leaves, tuple(guards_over(symbols, guard_texts(gm))), ranges)


def environment_of(gm: GraphModule) -> Any:
    inputs = placeholders(gm.graph)
    return next((mode.shape_env for n in inputs if (mode := fake_mode(n)) is not None and mode.shape_env), None)


def guard_texts(gm: GraphModule) -> list[str]:
    """What was decided by sizes, and what has to hold of them for ops to be possible."""
    environment = environment_of(gm)
    if environment is None:
        return []
    asserts = [item.expr for items in environment.deferred_runtime_asserts.values() for item in items]
    exprs = [environment.simplify(expr) for expr in (*(guard.expr for guard in environment.guards), *asserts)]
    exprs += zero_guards(environment)
    return [guard for guard in dict.fromkeys(map(str, exprs)) if guard != "True"]


def fixed_size(size: Any, guards: Iterable[str]) -> int | None:
    """The number that a size is or, by one of the guards, has to be."""
    if (number := static_int(size)) is not None:
        return number
    for guard in guards:
        found = re.fullmatch(rf"Eq\({size}, (\d+)\)|Eq\((\d+), {size}\)", guard)
        if found:
            return int(found[1] or found[2])
    return None


def guards_over(symbols: set[str], guards: Iterable[str]) -> Iterable[str]:
    """The guards over symbols of inputs; a function that is not understood is an error, not a guard less."""
    for guard in guards:
        names = set(SYMBOL.findall(guard)) - set(FUNCTIONS)
        if names <= symbols:
            yield guard
        elif not all(re.fullmatch(r"[su]\d+", name) for name in names - symbols):
            raise CaptureError(f"the guard {guard} of the captured sizes is not understood; make the size static")


def read_leaf(name: str, recorded: Any, given: Any) -> Leaf:
    if isinstance(given, torch.Tensor):
        shape = tuple(number if (number := static_int(s)) is not None else str(s) for s in recorded.shape)
        layout = str(given.layout).removeprefix("torch.")
        return Leaf(name, str(given.dtype).removeprefix("torch."), str(given.device), shape, layout=layout)
    if isinstance(recorded, torch.SymInt) and static_int(recorded) is None:
        return Leaf(name, value=str(recorded), symbolic=True)
    return Leaf(name, value=given)
