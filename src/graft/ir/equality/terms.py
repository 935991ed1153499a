"""What an element of a result is, as a term: the operations that make it, in order, down to elements of the inputs.

    (x * w).transpose(1, 2)        at (i0, i1, i2):  mul(x[i0, i2, i1], w[i1])

Views disappear into indices (indices.py). Operations that give the same bits wherever an element lies (EXACT) are
taken element by element, the two operands of a sum or a multiplication in either order. Every other call is a whole:
it equals only the same call on the same tensors with the same recorded strides, since a kernel may round otherwise in
another layout. Nothing is reassociated, distributed or left out; a cast is an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import sympy
import torch
from torch.fx import Node

from graft.ir.equality.indices import Expr, Extents, Index, reshaped, sizes_of, variables
from graft.ir.evaluate import RecordedCall
from graft.ir.nodes import OpOverload, leaves, static_int, tensor_of, tensor_val, val

aten = torch.ops.aten
EXACT = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "relu", "sign", "floor", "ceil", "trunc"),
        *("where", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_and", "logical_or", "logical_not"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "masked_fill", "maximum", "minimum"),
    )
)
COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor})
CASTS = frozenset({"aten::to", "aten::_to_copy", "aten::type_as"})
# deterministic functions of their arguments, which a kernel may round otherwise in another layout
WHOLE = frozenset(
    f"aten::{name}"
    for name in (
        *("silu", "gelu", "sigmoid", "tanh", "exp", "log", "sin", "cos", "erf", "rsqrt", "reciprocal", "pow"),
        *("square", "softplus", "mish", "hardswish", "leaky_relu", "elu", "clamp", "clamp_min", "clamp_max"),
        *("round", "div", "add", "sub", "softmax", "_softmax", "log_softmax", "mean", "sum", "amax", "amin", "var"),
        *("layer_norm", "rms_norm", "embedding", "index_select", "gather", "arange", "full", "zeros", "ones"),
        *("scalar_tensor", "full_like", "zeros_like", "ones_like", "stack", "tril", "triu", "flip", "roll", "repeat"),
        *("split", "chunk"),
    )
)


class NotProved(Exception):
    """Why two pieces were not proved equal. They may be, all the same."""


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph in which nodes mean something. leaf: what a node is called that comes from outside; None where a call
    makes it. outer: where the inputs of an op's reference come from. expand: the results of a call by what it is
    made of."""

    call: Callable[[Node], RecordedCall]
    leaf: Callable[[Node], Hashable | None]
    outer: Callable[[Node], tuple[Scope, Any] | None] = lambda _: None
    expand: Callable[[Scope, Node, RecordedCall], tuple[Scope, list[Any]] | None] = lambda *_: None


@dataclass
class Terms:
    """Terms by number: equal ones have the same. Both sides are written into one table."""

    numbers: dict[Hashable, int] = field(default_factory=dict)
    elements: dict[Hashable, int] = field(default_factory=dict)
    tensors: dict[tuple[Scope, Node], int] = field(default_factory=dict)

    def number(self, term: Hashable) -> int:
        return self.numbers.setdefault(term, len(self.numbers))

    def tensor(self, scope: Scope, node: Node) -> int:
        """A whole tensor: its sizes, dtype and the term of its element at (i0, i1, …)."""
        if (scope, node) not in self.tensors:
            value = tensor_val(node)
            if value is None:
                raise NotProved(f"%{node.name} is not one tensor")
            shape = sizes_of(value.shape)
            index, extents = variables(shape)
            found = self.element(scope, node, index, extents)
            self.tensors[scope, node] = self.number(("tensor", shape, value.dtype, str(value.device), found))
        return self.tensors[scope, node]

    def element(self, scope: Scope, node: Node, index: Index, extents: Extents) -> int:
        key = scope, node, index, tuple(extents.items())
        if key not in self.elements:
            self.elements[key] = self.made(scope, node, index, extents)
        return self.elements[key]

    def made(self, scope: Scope, node: Node, index: Index, extents: Extents) -> int:
        outside = scope.outer(node)
        if outside is not None:
            return self.element(*outside, index, extents)
        name = scope.leaf(node)
        if name is not None:
            return self.number(("input", name, index))
        call = scope.call(node)
        inside = opened(scope, node, call)
        if inside is not None:
            return self.element(*inside, index, extents)
        if call.target is getitem:
            return self.number(("item", self.whole(scope, call.args[0]), call.args[1], index))
        op = checked_op(node, call)
        if op in CASTS:
            return self.cast(scope, node, call.args[0], index, extents)
        if op in VIEWS and tensor_of(node).dtype is source_value(call).dtype:
            return self.element(scope, call.args[0], VIEWS[op](call, node, index, extents), extents)
        if op == "aten::cat":
            return self.concatenated(scope, node, named(call), index, extents)
        if op in EXACT and is_plain(call, node):
            return self.pointwise(scope, node, call, index, extents)
        return self.number(("element", self.whole(scope, node), index))

    def cast(self, scope: Scope, node: Node, source: Any, index: Index, extents: Extents) -> int:
        given, made = tensor_val(source), tensor_val(node)
        if given is None or made is None or given.device != made.device:
            raise NotProved(f"%{node.name} moves between devices")
        inner = self.element(scope, source, index, extents)
        return inner if given.dtype is made.dtype else self.number(("cast", made.dtype, inner))

    def pointwise(self, scope: Scope, node: Node, call: RecordedCall, index: Index, extents: Extents) -> int:
        """With the dtypes, and which operands have no dims: both decide in what dtype it computes."""
        made = tensor_of(node)
        operands = [self.operand(scope, given, made, index, extents) for given in call.args]
        if call.target in COMMUTATIVE:
            operands = sorted(operands, key=repr)
        return self.number(("op", str(call.target), made.dtype, tuple(operands)))

    def operand(self, scope: Scope, given: Any, made: torch.Tensor, index: Index, extents: Extents) -> Hashable:
        value = tensor_val(given) if isinstance(given, Node) else None
        if value is None:
            return ("literal", self.literal(scope, given))
        inner = self.element(scope, given, broadcast(value, made, index), extents)
        return value.dim() == 0, value.dtype, inner

    def concatenated(self, scope: Scope, node: Node, given: dict[str, Any], index: Index, extents: Extents) -> int:
        """The piece that the index lies in, where that is known for all of its values; else the whole."""
        pieces, rank = given["tensors"], len(index)
        dim = given["dim"] % rank
        values = [tensor_of(piece) for piece in pieces]
        if any(v.dim() != rank or v.dtype is not tensor_of(node).dtype for v in values):
            raise NotProved(f"%{node.name} joins tensors of several kinds")
        bounds, start = static_range(index[dim], extents), 0
        for piece, value in zip(pieces, values, strict=True):
            size = static_int(value.shape[dim])
            if size is None or bounds is None:
                break
            if start <= bounds[0] and bounds[1] < start + size:
                inner = (*index[:dim], sympy.expand(index[dim] - start), *index[dim + 1 :])
                return self.element(scope, piece, normal(inner, value), extents)
            start += size
        parts = tuple(self.tensor(scope, piece) for piece in pieces)
        return self.number(("cat", dim - rank, parts, index))

    def whole(self, scope: Scope, node: Node) -> int:
        """A call that is not looked into: its op, literals, and tensors with their recorded strides."""
        outside = scope.outer(node)
        if outside is not None:
            return self.whole(*outside)
        if scope.leaf(node) is not None:
            return self.number(("input", scope.leaf(node)))
        call = scope.call(node)
        inside = opened(scope, node, call)
        if inside is not None:
            return self.whole(*inside)
        op = checked_op(node, call)
        if op not in WHOLE:  # a view or a sum as an operand of a call that gives several results
            raise NotProved(f"%{node.name} calls {call.target}, of which nothing is known")
        given = self.literal(scope, call.args), self.literal(scope, call.kwargs)
        return self.number(("call", str(call.target), *given, str(tensor_kinds(node))))

    def literal(self, scope: Scope, given: Any) -> Hashable:
        if isinstance(given, Node):
            value = val(given)
            if isinstance(value, torch.SymInt):
                return "size", str(value.node.expr)
            if isinstance(value, torch.Tensor):
                return self.tensor(scope, given), layout_text(value)
            if isinstance(value, (bool, int, float)):
                return type(value).__name__, repr(value)
            raise NotProved(f"%{given.name} is neither a tensor nor a number")
        if isinstance(given, (list, tuple)):
            return tuple(self.literal(scope, item) for item in given)
        if isinstance(given, dict):
            return tuple((key, self.literal(scope, item)) for key, item in sorted(given.items()))
        return type(given).__name__, repr(given)


def opened(scope: Scope, node: Node, call: RecordedCall) -> tuple[Scope, Any] | None:
    """What a call, or an item of its results, is made of."""
    source = call.args[0] if call.target is getitem else node
    if call.target is getitem and (scope.outer(source) is not None or scope.leaf(source) is not None):
        return None
    inside = scope.expand(scope, source, scope.call(source))
    if inside is None:
        return None
    inner, results = inside
    return inner, results[call.args[1] if call.target is getitem else 0]


def checked_op(node: Node, call: RecordedCall) -> str:
    """The name of an op of ATen that is a function of its arguments alone."""
    if not isinstance(call.target, OpOverload) or call.target.namespace != "aten":
        raise NotProved(f"%{node.name} calls {call.target}, which is not one of torch's ops")
    name, tags = call.target._schema.name, call.target.tags
    if call.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        raise NotProved(f"%{node.name} calls {call.target}, which is no function of its arguments alone")
    if not (name in EXACT or name in WHOLE or name in CASTS or name in VIEWS or name == "aten::cat"):
        raise NotProved(f"%{node.name} calls {call.target}, of which nothing is known")
    if any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in leaves(val(node))):
        raise NotProved(f"%{node.name} is complex")
    return name


def is_plain(call: RecordedCall, node: Node) -> bool:
    """An elementwise call without a factor or a rounding mode of its own."""
    several = call.target in (aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor)
    plain = not call.kwargs and (len(call.args) <= 2 or several)
    return plain and torch.Tag.pointwise in call.target.tags and tensor_val(node) is not None


def layout_text(value: torch.Tensor) -> str:
    return f"{[str(stride) for stride in value.stride()]}+{value.storage_offset()}"


def tensor_kinds(node: Node) -> list[str]:
    found = [leaf for leaf in leaves(val(node)) if isinstance(leaf, torch.Tensor)]
    return [f"{[str(size) for size in leaf.shape]} {leaf.dtype} {leaf.device}" for leaf in found]


def broadcast(value: torch.Tensor, made: torch.Tensor, index: Index) -> Index:
    """Of an operand: a size of 1 is repeated, any other is the result's own."""
    given, wanted = sizes_of(value.shape), sizes_of(made.shape)
    if len(given) > len(wanted):
        raise NotProved("an operand has more dims than the result")
    for size, whole in zip(given, wanted[len(wanted) - len(given) :], strict=True):
        if size != 1 and size != whole:
            raise NotProved(f"a size of {size} stands beside one of {whole}")
    return normal(index[len(index) - value.dim() :], value)


def normal(index: Index, value: torch.Tensor) -> Index:
    """A dim of size 1 has the index 0 alone."""
    return tuple(sympy.Integer(0) if size == 1 else i for i, size in zip(index, sizes_of(value.shape), strict=True))


def static_range(index: Expr, extents: Extents) -> tuple[int, int] | None:
    """From where to where an index goes: a number, or a number and a variable with a fixed extent."""
    names = index.free_symbols
    if not names:
        return (int(index), int(index)) if index.is_Integer else None
    sizes = {name: extents.get(name) for name in names}
    terms = index.as_coefficients_dict()
    linear = all(term == 1 or term in sizes for term in terms)
    if not linear or any(size is None or not size.is_Integer for size in sizes.values()):
        return None
    low = high = int(terms.get(sympy.Integer(1), 0))
    for name, size in sizes.items():
        reach = int(terms[name]) * (int(size) - 1) if size is not None else 0
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high


# ── views ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def named(call: RecordedCall) -> dict[str, Any]:
    """Every argument of an op call by name, defaults included."""
    arguments = call.target._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, call.args, strict=False)} | dict(call.kwargs)
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | given


def source_value(call: RecordedCall) -> torch.Tensor:
    value = tensor_val(call.args[0]) if call.args else None
    if value is None:
        raise NotProved(f"{call.target} reads something that is not one tensor")
    return value


def as_is(call: RecordedCall, node: Node, index: Index, extents: Extents) -> Index:  # noqa: ARG001
    return index


def reshape_index(call: RecordedCall, node: Node, index: Index, extents: Extents) -> Index:
    return reshaped(index, sizes_of(tensor_of(node).shape), sizes_of(source_value(call).shape), extents)


def permute_index(call: RecordedCall, node: Node, index: Index, extents: Extents) -> Index:  # noqa: ARG001
    found = list(index)
    for at, dim in zip(index, dim_order(call, len(index)), strict=True):
        found[dim] = at
    return tuple(found)


def dim_order(call: RecordedCall, rank: int) -> list[int]:
    """Which dim of the source each dim of the result is."""
    given = named(call)
    if "dims" in given:
        return [dim % rank for dim in given["dims"]]
    order = list(range(rank))
    one, other = (given["dim0"] % rank, given["dim1"] % rank) if "dim0" in given else (0, rank - 1)
    if rank:
        order[one], order[other] = other, one
    return order


def expand_index(call: RecordedCall, node: Node, index: Index, extents: Extents) -> Index:  # noqa: ARG001
    return broadcast(source_value(call), tensor_of(node), index)


def slice_index(call: RecordedCall, node: Node, index: Index, extents: Extents) -> Index:  # noqa: ARG001
    """Where it ends is in the recorded size."""
    value, given = source_value(call), named(call)
    dim, step = given["dim"] % value.dim(), given["step"]
    if not isinstance(step, int):
        raise NotProved(f"%{node.name} has a step that is computed")
    start = slice_start(given["start"], value.shape[dim])
    moved = (*index[:dim], sympy.expand(start + step * index[dim]), *index[dim + 1 :])
    return normal(moved, value)


def slice_start(start: Any, size: Any) -> int:
    """As a number within the size; beyond an open size nothing is left to compare."""
    whole = static_int(size)
    if start is None or (isinstance(start, int) and start >= 0):
        return start or 0
    if isinstance(start, int) and whole is not None:
        return max(start + whole, 0)
    raise NotProved(f"a slice begins at {start} of the size {size}")


def select_index(call: RecordedCall, node: Node, index: Index, extents: Extents) -> Index:  # noqa: ARG001
    value, given = source_value(call), named(call)
    dim, at = given["dim"] % value.dim(), given["index"]
    whole = static_int(value.shape[dim])
    if not isinstance(at, int) or (at < 0 and whole is None):
        raise NotProved(f"%{node.name} selects at an index that is computed")
    position = at + whole if at < 0 and whole is not None else at
    return (*index[:dim], sympy.Integer(position), *index[dim:])


SAME = ("contiguous", "clone", "alias", "detach", "lift_fresh", "lift_fresh_copy")
RESHAPES = (
    *("reshape", "view", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"),
)
View = Callable[[RecordedCall, Node, Index, Extents], Index]
RULES: dict[tuple[str, ...], View] = {
    SAME: as_is,
    RESHAPES: reshape_index,
    ("transpose", "permute", "t"): permute_index,
    ("expand",): expand_index,
    ("slice",): slice_index,
    ("select",): select_index,
}
VIEWS: dict[str, View] = {f"aten::{name}": rule for names, rule in RULES.items() for name in names}
