"""The rules of the normal form: one spelling for each meaning.

`normalize_arguments` and `respell` rewrite a node in place; calls that change nothing are in shortcuts.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from graft.ir.effects import storage_root
from graft.ir.nodes import (
    OpOverload,
    arg_values,
    is_op,
    options_of,
    schema_of,
    static_int,
    tensor_val,
    val,
)

aten = torch.ops.aten
END = 2**63 - 1  # how export writes an open slice


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────────────


def normalize_arguments(node: Node) -> None:
    """Positional where the schema allows it, defaults left out, dims counted from the end."""
    schema = schema_of(node)
    assert schema is not None
    positional = [a for a in schema.arguments if not a.kwarg_only]
    values = list(node.args)
    for argument in positional[len(values) :]:
        values.append(node.kwargs.get(argument.name, argument.default_value))
    while len(values) and len(values) <= len(positional) and is_default(positional[len(values) - 1], values[-1]):
        values.pop()
    keyword = {a.name: a for a in schema.arguments if a.kwarg_only}
    kwargs = {k: v for k, v in node.kwargs.items() if k in keyword and not is_default(keyword[k], v)}
    args = tuple(values)
    if args != node.args or kwargs != node.kwargs:
        node.args, node.kwargs = args, kwargs
    count_dims_from_end(node)


def is_default(argument: torch.Argument, value: Any) -> bool:
    return (
        argument.has_default_value()
        and type(value) is type(argument.default_value)
        and value == argument.default_value
    )


@cache
def op_defaults(target: Any) -> tuple[Any, ...]:
    """The defaults of an op's positional arguments, None where there is none; read once: torch makes them anew."""
    schema = target._schema if isinstance(target, OpOverload) else None
    return tuple(a.default_value for a in schema.arguments if not a.kwarg_only) if schema is not None else ()


@cache
def op_argument_names(target: Any) -> tuple[str, ...]:
    schema = target._schema if isinstance(target, OpOverload) else None
    return tuple(a.name for a in schema.arguments if not a.kwarg_only) if schema is not None else ()


# where an op keeps its dims: (position, extra rank of the space they index)
DIMS: dict[Any, tuple[int, ...]] = {
    aten.mean.dim: (1,),
    aten.sum.dim_IntList: (1,),
    aten.var.correction: (1,),
    aten.std.correction: (1,),
    aten.linalg_vector_norm.default: (2,),
    aten.unbind.int: (1,),
    aten.cat.default: (1,),
    aten.slice.Tensor: (1,),
    aten.select.int: (1,),
    aten.squeeze.dim: (1,),
    aten.softmax.int: (1,),
    aten._softmax.default: (1,),
    aten.transpose.int: (1, 2),
    aten.cumsum.default: (1,),
    aten.index_select.default: (1,),
    aten.gather.default: (1,),
    aten.split.Tensor: (2,),
    aten.split_with_sizes.default: (2,),
    aten.chunk.default: (2,),
    aten.unsafe_split.Tensor: (2,),
    aten.unsafe_split_with_sizes.default: (2,),
    aten.unsafe_chunk.default: (2,),
    aten.unsqueeze.default: (1,),
}


def count_dims_from_end(node: Node) -> None:
    positions = DIMS.get(node.target)
    if positions is None:
        return
    tensor = tensor_val(node if node.target is aten.cat.default else node.args[0])
    if tensor is None:
        return
    rank = tensor.dim() + (1 if node.target is aten.unsqueeze.default else 0)
    args = list(node.args)
    for position in positions:
        if position >= len(args):
            args += [value for _, value in arg_values(node)[len(args) : position + 1]]
        args[position] = from_end(args[position], rank)
    if node.target is aten.transpose.int:
        args[1:3] = sorted(args[1:3])
    if tuple(args) != node.args:
        node.args = tuple(args)


def from_end(dim: Any, rank: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [from_end(d, rank) for d in dim]
    return dim - rank if isinstance(dim, int) and dim >= 0 else dim


# ── spelling ────────────────────────────────────────────────────────────────────────────────────────────────────


def respell(node: Node, mutated: Collection[Node]) -> None:
    """`mutated`: storage that is written to; views of it are not respelled into other views."""
    if node.target in RESHAPES:
        as_reshape(node, mutated)
    elif node.target in SPELLINGS:
        SPELLINGS[node.target](node)


def spell(node: Node, target: Any, *args: Any, **kwargs: Any) -> None:
    if (node.target, node.args, node.kwargs) != (target, args, kwargs):
        node.target, node.args, node.kwargs = target, args, kwargs


def as_cast(node: Node) -> None:
    """Every conversion that changes dtype alone is `aten.to.dtype(x, dtype)`."""
    source, result = tensor_val(node.args[0]), tensor_val(node)
    if source is None or result is None or source.device != result.device:
        return
    options = options_of(node)
    wants_copy = options.get("copy") is True or node.target is aten._to_copy.default
    if options.get("memory_format") is not None or (wants_copy and source.dtype == result.dtype):
        return  # a fresh tensor, or another layout, was asked for: not a mere cast
    spell(node, aten.to.dtype, node.args[0], result.dtype)


def as_reshape(node: Node, mutated: Collection[Node]) -> None:
    """view, reshape, flatten, unflatten… are `aten.reshape(x, sizes)`, with every static size written out."""
    source, result = node.args[0], tensor_val(node)
    if result is None or tensor_val(source) is None:
        return
    if mutated and storage_root(source) in mutated:
        return  # whether a reshape copies decides who sees a write
    while is_op(source, aten.reshape.default) and tensor_val(source.args[0]) is not None:
        source = source.args[0]
    sizes = [static_int(size) for size in result.shape]
    given = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else None
    if given is not None and len(given) == len(sizes):
        full = [size if size is not None else item for size, item in zip(sizes, given, strict=True)]
    elif sizes.count(None) <= 1:
        full = [-1 if size is None else size for size in sizes]
    else:
        return
    spell(node, aten.reshape.default, source, full)


def as_slice(node: Node) -> None:
    """Bounds as non-negative numbers within the size, where the size is known; an open end stays open otherwise."""
    tensor = tensor_val(node.args[0])
    args = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    source, dim, start, end, step = args
    if tensor is None or not isinstance(dim, int) or step != 1:
        return
    size = static_int(tensor.shape[dim])
    start = 0 if start is None else start
    if size is not None and isinstance(start, int) and (end is None or isinstance(end, int)):
        end = size if end is None else end
        start, end = (min(max(bound + size if bound < 0 else bound, 0), size) for bound in (start, end))
        spell(node, aten.slice.Tensor, source, dim, start, max(start, end))
    elif end is None or end == END:
        spell(node, aten.slice.Tensor, source, dim, start, END)


def as_piece(node: Node) -> None:
    """`getitem(split/chunk(x), i)` is a slice of x, `getitem(unbind(x), i)` a select."""
    parts, index = node.args
    if is_op(parts, aten.unbind.int) and len(parts.args) == 2:
        spell(node, aten.select.int, *parts.args, index)
    if not is_op(parts, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
        return
    sizes = [static_int(piece.shape[parts.args[2]]) for piece in val(parts)]
    pieces = [size for size in sizes if size is not None]
    if len(pieces) < len(sizes):
        return
    start = sum(pieces[:index])
    spell(node, aten.slice.Tensor, parts.args[0], parts.args[2], start, start + pieces[index])


def as_transpose(node: Node) -> None:
    """`t`, `mT` and a permutation that swaps two dims are `transpose`."""
    tensor = tensor_val(node.args[0])
    if tensor is None:
        return
    rank = tensor.dim()
    if node.target is aten.permute.default:
        order = [d % rank for d in node.args[1]]
    else:
        order = [*range(rank - 2), rank - 1, rank - 2]
    moved = [i for i, d in enumerate(order) if i != d]
    if rank >= 2 and len(order) == rank and len(moved) == 2:
        spell(node, aten.transpose.int, node.args[0], moved[0] - rank, moved[1] - rank)


def as_square(node: Node) -> None:
    source = tensor_val(node.args[0])
    if source is not None and source.dtype is torch.bool:
        return  # pow counts, so it gives whole numbers
    if node.target is aten.square.default or (
        len(node.args) == 2 and node.args[0] is node.args[1] and isinstance(node.args[0], Node)
    ):
        spell(node, aten.pow.Tensor_Scalar, node.args[0], 2)


ROOTS = {-0.5: aten.rsqrt.default, 0.5: aten.sqrt.default, -1: aten.reciprocal.default}


def as_root(node: Node) -> None:
    """The powers for which `pow` calls the kernel of rsqrt, sqrt or reciprocal; in float16 on a CPU it does not."""
    tensor, power = tensor_val(node.args[0]), node.args[1]
    wide = tensor is not None and tensor.dtype in (torch.float32, torch.float64)
    if wide and isinstance(power, (int, float)) and power in ROOTS:
        spell(node, ROOTS[power], node.args[0])


def as_correction(target: Any) -> Callable[[Node], None]:
    """`var(x, dims, unbiased, keepdim)` says n - 1 or n as `correction` 1 or 0, as does a correction left out."""

    def rule(node: Node) -> None:
        options = options_of(node)
        correction = options["correction"] if "correction" in options else int(options["unbiased"])
        keywords = {"correction": 1 if correction is None else correction}
        if options["keepdim"]:
            keywords["keepdim"] = True
        if options["dim"] is not None:
            spell(node, target, node.args[0], options["dim"], **keywords)

    return rule


def without_cudnn_flag(node: Node) -> None:
    """`layer_norm` takes a flag that it ignores; export records what the machine had."""
    spell(node, aten.layer_norm.default, *node.args[:5])


def other_name(target: Any) -> Callable[[Node], None]:
    """The same call under another name, or with a number where a tensor may stand; alpha is by name there."""

    def rule(node: Node) -> None:
        args, kwargs = node.args, dict(node.kwargs)
        if node.target in (aten.add.Scalar, aten.sub.Scalar) and len(args) == 3:
            args, kwargs = args[:2], {"alpha": args[2]}
        spell(node, target, *args, **kwargs)

    return rule


def with_index_row(node: Node) -> None:
    """`index_add` at a 0-d index is the one at `[index]`: Inductor takes only that apart rightly."""
    into, _, index = node.args[:3]
    known, chosen = tensor_val(into), tensor_val(index)
    if known is None or chosen is None or chosen.dim() or not known.dim():
        return
    with node.graph.inserting_before(node):
        row = node.graph.call_function(aten.unsqueeze.default, (index, -1))
    row.meta = {**node.meta, "val": chosen.unsqueeze(-1)}
    node.update_arg(2, row)


def as_resize(node: Node) -> None:
    """`resize_as_` is `resize_` to the sizes of another tensor; that one torch.compile runs as eager does."""
    template = tensor_val(node.args[1])
    if template is None or node.kwargs:
        return  # a layout was asked for
    sizes: list[Any] = []
    for dim, size in enumerate(template.shape):
        if static_int(size) is None:
            with node.graph.inserting_before(node):
                sizes.append(node.graph.call_function(aten.sym_size.int, (node.args[1], dim)))
            sizes[-1].meta = {**node.meta, "val": size}
        else:
            sizes.append(static_int(size))
    spell(node, aten.resize_.default, node.args[0], sizes)


RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
}
SPELLINGS: dict[Any, Callable[[Node], None]] = {
    **{op: as_cast for op in (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other)},
    **{
        op: as_cast
        for op in (aten.type_as.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default)
    },
    **{op: as_transpose for op in (aten.t.default, aten.mT.default, aten.permute.default)},
    **{op: other_name(aten.transpose.int) for op in (aten.swapaxes.default, aten.swapdims.default)},
    **{op: as_square for op in (aten.square.default, aten.mul.Tensor)},
    **{op: as_correction(aten.var.correction) for op in (aten.var.dim, aten.var.correction)},
    **{op: as_correction(aten.std.correction) for op in (aten.std.dim, aten.std.correction)},
    aten.pow.Tensor_Scalar: as_root,
    aten.layer_norm.default: without_cudnn_flag,
    aten.add.Scalar: other_name(aten.add.Tensor),
    **{op: other_name(aten.mul.Tensor) for op in (aten.mul.Scalar, aten.multiply.Tensor)},
    **{op: other_name(aten.sub.Tensor) for op in (aten.sub.Scalar, aten.subtract.Tensor)},
    **{op: other_name(aten.div.Tensor) for op in (aten.div.Scalar, aten.divide.Tensor, aten.true_divide.Tensor)},
    # their schemas deny that the parts are views, and Inductor believes it
    aten.unsafe_split.Tensor: other_name(aten.split.Tensor),
    aten.unsafe_split_with_sizes.default: other_name(aten.split_with_sizes.default),
    aten.unsafe_chunk.default: other_name(aten.chunk.default),
    aten.slice.Tensor: as_slice,
    **{op: with_index_row for op in (aten.index_add.default, aten.index_add_.default)},
    aten.resize_as_.default: as_resize,
    operator.getitem: as_piece,
}
