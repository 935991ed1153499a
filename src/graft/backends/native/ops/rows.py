"""Embeddings, plain and packed, and chosen rows: backends/native/rows.h and ops/packed_embedding/native.h."""

from __future__ import annotations

import torch
from torch.fx import Node

from graft.backends.native.ops.linear import tiles
from graft.backends.native.plan import ROWS_HEADER, Planner, lowers
from graft.backends.native.program import CTYPES, Kernel, NotLowered, Text
from graft.graph.nodes import options_of, tensor_of
from graft.ops.fused_linear.native_packing import CPP

aten, ops = torch.ops.aten, torch.ops.graft


@lowers(aten.embedding.default)
def lower_embedding(plan: Planner, node: Node) -> None:
    """A table is read as it is: the token embedding, or cosines and sines of tabulate_rope."""
    table, ids = node.args[:2]
    layout = plan.layout(node)
    if layout.order != "flat":
        raise NotLowered("its ids are not one a row")
    out = plan.new(node)
    plan.step(
        node, Kernel(f"embedding<{CTYPES[tensor_of(table).dtype]}>", "EmbeddingArgs", ROWS_HEADER),
        table=plan.weight(table, "as_is"), entries=int(tensor_of(table).shape[0]), ids=plan.pointer(ids),
        rows=plan.rows(layout), out=out, problem=Text("call.problem"), step=Text("{step}"),
    )  # fmt: skip
    plan.bind(node, out)


@lowers(ops.packed_embedding.default)
def lower_packed_embedding(plan: Planner, node: Node) -> None:
    """The rows are those that the output head multiplies with."""
    o = options_of(node)
    layout = plan.layout(node)
    if layout.order != "flat":
        raise NotLowered("its ids are not one a row")
    pointer, form = tiles(plan, o["weight"], o["columns"])
    if form not in (CPP["q8"], CPP["q4"]):
        raise NotLowered("the table is packed as floats")
    out = plan.new(node)
    plan.step(
        node, Kernel(f"packed_embedding<{form}>", "PackedEmbeddingArgs", "ops/packed_embedding/native.h"),
        table=pointer, entries=int(tensor_of(o["scale"]).shape[0]), columns=o["columns"],
        ids=plan.pointer(o["indices"]), rows=plan.rows(layout), out=out,
        problem=Text("call.problem"), step=Text("{step}"),
    )  # fmt: skip
    plan.bind(node, out)


@lowers(aten.index_select.default)
def lower_index_select(plan: Planner, node: Node) -> None:
    x, dim, index = node.args
    rank = tensor_of(x).dim()
    value, layout = plan.value(x), plan.layout(node)
    if value.layout.order == "heads" or dim % rank != (rank - 2 if value.layout.order == "flat" else rank - 3):
        raise NotLowered("it does not choose rows")
    out = plan.new(node)
    plan.step(
        node, Kernel("select_rows", "SelectArgs", ROWS_HEADER), x=value, **{"from": plan.rows(value.layout)},
        index=plan.pointer(index), rows=plan.rows(layout), out=out, problem=Text("call.problem"), step=Text("{step}"),
    )  # fmt: skip
    plan.bind(node, out)
