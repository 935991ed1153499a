"""Embeddings, plain and packed, and chosen rows: backends/native/rows.h and ops/packed_embedding/native.h."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graft.backends.native.ops.linear import matrix, tiles
from graft.backends.native.plan import ROWS_HEADER, Planner, lowers
from graft.backends.native.program import CTYPES, HeadLayout, NativeKernel, NotLowered, Text, WeightPointer
from graft.ir.nodes import is_op, options_of, tensor_of

aten, ops = torch.ops.aten, torch.ops.graft


@lowers(aten.embedding.default)
def lower_embedding(plan: Planner, node: Node) -> None:
    """A table is read as it is (cosines and sines of tabulate_rope, an embedding of its own), or out of the tiles
    of the output head that it is tied to, which keep bfloat16 but for numbers that are nothing beside others
    of their tile (native_f16.h)."""
    table, ids = node.args[:2]
    entries, columns = map(int, tensor_of(table).shape)
    if isinstance(table, Node) and any(multiplies_with(user, table) for user in table.users if user in plan.native):
        pointer, form = matrix(plan, table, transposed=False, gated=False)
        return put_rows(plan, node, pointer, form, entries, columns, ids)
    layout = rows_layout(plan, node)
    out = plan.new(node)
    plan.step(
        node, NativeKernel(f"embedding<{CTYPES[tensor_of(table).dtype]}>", "EmbeddingArgs", ROWS_HEADER),
        table=plan.weight(table, "as_is"), entries=entries, ids=plan.pointer(ids),
        rows=plan.rows(layout), out=out, problem=Text("call.problem"), step=Text("{step}"),
    )  # fmt: skip
    plan.bind(node, out)


@lowers(ops.packed_embedding.default)
def lower_packed_embedding(plan: Planner, node: Node) -> None:
    """The rows are those that the output head multiplies with."""
    o = options_of(node)
    pointer, form = tiles(plan, o["weight"], o["columns"])
    put_rows(plan, node, pointer, form, int(tensor_of(o["scale"]).shape[0]), o["columns"], o["indices"])


def put_rows(
    plan: Planner, node: Node, table: WeightPointer, form: str, entries: int, columns: int, ids: Any
) -> None:  # fmt: skip
    layout = rows_layout(plan, node)
    out = plan.new(node)
    plan.step(
        node, NativeKernel(f"packed_embedding<{form}>", "PackedEmbeddingArgs", "ops/packed_embedding/native.h"),
        table=table, entries=entries, columns=columns, ids=plan.pointer(ids), rows=plan.rows(layout), out=out,
        problem=Text("call.problem"), step=Text("{step}"),
    )  # fmt: skip
    plan.bind(node, out)


def rows_layout(plan: Planner, node: Node) -> HeadLayout:
    layout = plan.layout(node)
    if layout.order != "flat":
        raise NotLowered("its ids are not one a row")
    return layout


def multiplies_with(user: Node, weight: Node) -> bool:
    """As [n, k], row by row: neither transposed nor gated."""
    if is_op(user, ops.fused_linear.default):
        o = options_of(user)
        return o["weight"] is weight and o["scale"] is None and o["activation"] == "none"
    return is_op(user, aten.linear.default, ops.linear.default) and user.args[1] is weight


@lowers(aten.index_select.default)
def lower_index_select(plan: Planner, node: Node) -> None:
    x, dim, index = node.args
    rank = tensor_of(x).dim()
    value, layout = plan.value(x), plan.layout(node)
    if value.layout.order == "heads" or dim % rank != (rank - 2 if value.layout.order == "flat" else rank - 3):
        raise NotLowered("it does not choose rows")
    out = plan.new(node)
    plan.step(
        node, NativeKernel("select_rows", "SelectArgs", ROWS_HEADER), x=value, **{"from": plan.rows(value.layout)},
        index=plan.pointer(index), rows=plan.rows(layout), out=out, problem=Text("call.problem"), step=Text("{step}"),
    )  # fmt: skip
    plan.bind(node, out)
