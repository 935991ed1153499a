"""How large sizes must be before a tensor that follows from sizes shows everything that it does.

A band, an offset or a fraction shows only in sizes beyond the numbers that it is made of. So the numbers of a
subgraph (arguments, lifted scalars, the numbers inside size expressions) are combined to a bound node by node: sums
where values are added or compared, products once anything multiplies or divides. Values that depend on a size other
than the asked-for ones are told apart: samples that hold that size fixed say nothing about them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from graft.ir.nodes import arg_values, is_op, leaves, static_int, tensor_of, tensor_val, val

aten = torch.ops.aten
ENDLESS = 1e30  # no position reaches it: the lowest float32 as a fill value, an open end
NO_VALUE = ("dim", "dims", "dim0", "dim1", "dtype", "layout", "pin_memory", "memory_format", "non_blocking", "copy")
NEUTRAL = (("alpha", 1), ("step", 1))
FILLED = (
    *(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.full.default, aten.full_like.default),
    *(aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf, aten.scalar_tensor.default),
    *(aten.new_full.default, aten.mul.Tensor),
)
# which arguments give values; what else they are given is a shape
SHAPED: dict[Any, tuple[int, ...]] = {
    aten.expand.default: (0,),
    aten.full.default: (1,),
    aten.full_like.default: (1,),
    aten.new_full.default: (2,),
    **dict.fromkeys((aten.ones.default, aten.zeros.default, aten.ones_like.default, aten.zeros_like.default), ()),
    **dict.fromkeys((aten.new_ones.default, aten.new_zeros.default), ()),
}
RESHAPES = (aten.reshape.default, aten.view.default)
ALONG_A_DIM = (
    *(aten.cumsum.default, aten.diff.default, aten.flip.default, aten.slice.Tensor, aten.select.int),
    aten.cat.default,
)
ALONG_ANY = (aten.index.Tensor, aten.repeat.default, aten.stack.default, aten.hstack.default, aten.eye.default)
EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.int8: 2**7, torch.uint8: 2**8, torch.int16: 2**15}


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def number_bounds(nodes: Sequence[Node], constants: Mapping[Node, torch.Tensor], sizes: Sequence[Any]) -> set[int]:
    """What the numbers of a subgraph, and of the sizes it is compared with, combine to; the largest bounds all."""
    expressions = [s.node.expr for s in (*sizes, *(val(n) for n in nodes)) if isinstance(s, torch.SymInt)]
    multiplied = any(map(multiplies, nodes)) or any(map(has_product, expressions))
    floating = tensor_of(nodes[-1]).dtype.is_floating_point
    bounds: dict[Node, float] = {}
    seen = {float(size_bound(size, multiplied)) for size in sizes}
    for node in nodes:
        if isinstance(val(node), (int, torch.SymInt)):
            bounds[node] = size_bound(val(node), multiplied)
        elif node in constants:
            value = constants[node].item()
            bounds[node] = magnitude(value, multiplied, lowest=floating and isinstance(value, float))
        else:
            own = own_numbers(node, multiplied, floating)
            inputs = [n for n in leaves((node.args, node.kwargs)) if isinstance(n, Node)]  # twice in x + x
            bounds[node] = together([*own, *(bounds[n] for n in inputs)], multiplied)
            seen.update(own)
        seen.add(bounds[node])
    total = together([bounds[nodes[-1]], *(size_bound(size, multiplied) for size in sizes)], multiplied)
    return {math.ceil(min(bound, ENDLESS)) for bound in (*seen, total)}


def together(bounds: Sequence[float], multiplied: bool) -> float:
    return math.prod(1 + b for b in bounds) - 1 if multiplied else sum(bounds)


def own_numbers(node: Node, multiplied: bool, floating: bool) -> list[float]:
    """The numbers among a node's arguments, and the last integer that its dtype counts to."""
    if is_op(node, aten.expand.default) or (is_op(node, *RESHAPES) and not lays_out_anew(node)):
        return []
    pairs = [(argument.name, value) for argument, value in arg_values(node) if argument.name not in NO_VALUE]
    given = [leaf for name, value in pairs if (name, value) not in NEUTRAL for leaf in leaves(value)]
    plain = [leaf for leaf in given if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)]
    found = [magnitude(n, multiplied, lowest=floating and is_op(node, *FILLED)) for n in plain]
    counted = is_op(node, aten.arange.default, aten.arange.start, aten.arange.start_step, aten.cumsum.default)
    narrowed = is_op(node, aten.to.dtype) and tensor_of(node.args[0]).dtype not in (torch.bool, tensor_of(node).dtype)
    return [*found, EXACT.get(tensor_of(node).dtype, 0)] if counted or narrowed else found


def magnitude(value: float, multiplied: bool, *, lowest: bool) -> float:
    """lowest: the number may be what a mask closes with, which float16 has among the sizes of tensors."""
    size = abs(value)
    if not math.isfinite(size) or size >= ENDLESS or (isinstance(value, int) and size >= 2**62):
        return 0.0
    if lowest and value == torch.finfo(torch.float16).min:
        return 0.0
    return max(size, 1 / size) if multiplied and size else size


def multiplies(node: Node) -> bool:
    if is_op(node, *RESHAPES):
        return lays_out_anew(node)
    return is_op(node, aten.mul.Tensor, aten.cumsum.default, aten.repeat.default, aten.linspace.default) or any(
        argument.name == "alpha" and value != 1 for argument, value in arg_values(node)
    )


def lays_out_anew(node: Node) -> bool:
    """Whether a reshape does more than add or drop dims of size one."""
    before, after = ([str(s) for s in tensor_of(n).shape if static_int(s) != 1] for n in (node.args[0], node))
    return before != after


def size_bound(size: Any, multiplied: bool) -> float:
    return float(abs(size)) if isinstance(size, int) else expression_bound(size.node.expr, multiplied)


def expression_bound(expression: Any, multiplied: bool) -> float:
    if expression.is_Symbol:
        return 0.0
    if expression.is_Number:
        parts = (abs(int(expression.p)), int(expression.q)) if expression.is_Rational else (ENDLESS,)
        return float(max(parts) if expression != 0 else 0)
    return together([expression_bound(e, multiplied) for e in expression.args], multiplied)


def has_product(expression: Any) -> bool:
    """Whether anything but sums, signs, minima and maxima of symbols and numbers stands in a size."""
    if expression.is_Symbol or expression.is_Number:
        return False
    if expression.is_Mul:
        factors = [f for f in expression.args if f != -1]
        return len(factors) > 1 or any(map(has_product, factors))
    known = expression.is_Add or type(expression).__name__ in ("Min", "Max")
    return not known or any(map(has_product, expression.args))


# ── other sizes ─────────────────────────────────────────────────────────────────────────────────────────────────


def values_depend_on(nodes: Sequence[Node], symbols: Collection[Any]) -> bool:
    """Whether a value, and not only a shape, of the last node follows from one of the symbols."""
    reached: set[Node] = set()
    for node in nodes:
        if isinstance(val(node), (int, torch.SymInt)):
            depends = has_symbol([val(node)], symbols)
        elif node.op != "call_function":
            depends = False
        elif node.target in SHAPED:
            given = [value for _, value in arg_values(node)]
            depends = any(given[index] in reached for index in SHAPED[node.target] if isinstance(given[index], Node))
        elif is_op(node, aten.index.Tensor):
            depends = node.args[0] in reached or picks_by(node, reached, symbols)
        else:
            depends = any(n in reached for n in node.all_input_nodes) and not spreads(node, reached)
            depends = depends or runs_along(node, symbols)
        if depends:
            reached.add(node)
    return nodes[-1] in reached


def picks_by(node: Node, reached: Collection[Node], symbols: Collection[Any]) -> bool:
    """Whether chosen_dims are picked by such a value. Along a dim of such a size what is not reached is one value
    repeated, because anything else that makes such a dim is reached; there it does not matter what is picked."""
    source, chosen_dims = node.args[:2]
    chosen = [dim for dim, indexed in enumerate(chosen_dims) if indexed in reached]
    return any(not has_symbol([tensor_of(source).shape[dim]], symbols) for dim in chosen)


def spreads(node: Node, reached: Collection[Node]) -> bool:
    """A reshape that only adds or drops dims of size one, told its sizes by nodes; its values stay what they were."""
    return is_op(node, *RESHAPES) and not lays_out_anew(node) and node.args[0] not in reached


def runs_along(node: Node, symbols: Collection[Any]) -> bool:
    """Whether a node moves or sums values along a dim of such a size."""
    shapes = [tensor.shape for n in (node, *node.all_input_nodes) if (tensor := tensor_val(n)) is not None]
    if is_op(node, aten.tril.default, aten.triu.default):
        return any(has_symbol(shape[-2:], symbols) for shape in shapes)
    if is_op(node, *ALONG_ANY) or (is_op(node, *RESHAPES) and lays_out_anew(node)):
        return any(has_symbol(shape, symbols) for shape in shapes)
    if is_op(node, *ALONG_A_DIM):
        dims = [d for argument, v in arg_values(node) if argument.name in ("dim", "dims") for d in leaves(v)]
        chosen_dims = [shape[d] for shape in shapes for d in dims or [0] if -len(shape) <= d < len(shape)]
        return has_symbol(chosen_dims, symbols)
    return False


def has_symbol(sizes: Sequence[Any], symbols: Collection[Any]) -> bool:
    return any(isinstance(s, torch.SymInt) and s.node.expr.free_symbols & set(symbols) for s in sizes)
