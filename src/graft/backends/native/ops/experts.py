"""Mixtures of experts: ops/moe_route and moe_experts/native.h, of packed ones native_packed.h."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from graft.backends.native.plan import Planner, lowers
from graft.backends.native.program import CTYPES, HeadLayout, NativeKernel, Text, Value
from graft.ir.nodes import options_of, tensor_of
from graft.weights.native_tiles import CPP
from graft.weights.tiles import kind_of

ops = torch.ops.graft


@lowers(ops.moe_route.default)
def lower_moe_route(plan: Planner, node: Node) -> None:
    o = options_of(node)
    logits = plan.flat(o["logits"])
    chosen = HeadLayout(logits.layout.rows, 1, int(o["top_k"]), "flat")
    weights, ids = plan.new(node, chosen, "_weights"), plan.new(node, chosen, "_ids")
    kernel = NativeKernel(
        "moe_route", "MoeRouteArgs", "ops/moe_route/native.h", writes=("weights", "ids"),
        scratch=str(2 * logits.layout.size + int(o["groups"])),
    )  # fmt: skip
    plan.step(
        node, kernel, logits=logits, top_k=int(o["top_k"]), normalize=bool(o["normalize"]),
        select_first=bool(o["select_first"]), sigmoid=o["scoring"] == "sigmoid", bias=plan.vector_or_null(o["bias"]),
        groups=int(o["groups"]), top_groups=int(o["top_groups"]), group_best=int(o["group_best"]),
        eps=float(o["eps"]), scale=float(o["scale"]), rows=plan.rows(chosen), weights=weights, ids=ids,
    )  # fmt: skip
    plan.bind(node, (weights, ids))


@lowers(ops.moe_experts.default)
def lower_moe_experts(plan: Planner, node: Node) -> None:
    """Two steps: what the experts hold inside is read by all threads."""
    o = options_of(node)
    x, weights, ids, out = plan.flat(o["x"]), plan.flat(o["weights"]), plan.ids(o["ids"]), plan.new(node)
    f, d = int(tensor_of(o["gate_up_scale" if packed(o) else "gate_up"]).shape[1]) // 2, x.layout.width
    hidden = plan.new(node, HeadLayout(x.layout.rows, 1, f * ids.layout.size, "flat"), "_hidden")
    common = {
        "x": x, "weights": weights, "ids": ids, "f": f, "d": d, "rows": plan.rows(x.layout), "hidden": hidden,
    }  # fmt: skip
    if packed(o):
        put_packed(plan, node, o, common, out)
    else:
        put_floats(plan, node, o, common | {"act": Text(f"Act::{o['activation']}")}, out)
    plan.bind(node, out)


def packed(options: Mapping[str, Any]) -> bool:
    return options["gate_up_scale"] is not None


def put_floats(plan: Planner, node: Node, o: Mapping[str, Any], common: dict[str, Any], out: Value) -> None:
    kind = CTYPES[tensor_of(o["down"]).dtype]
    for kernel, name, writes in (("experts_up", "gate_up", ("hidden",)), ("experts_down", "down", ("out",))):
        matrix = plan.weight(o[name], "as_is")
        plan.step(
            node, NativeKernel(f"{kernel}<{kind}>", "ExpertsArgs", "ops/moe_experts/native.h", writes=writes),
            matrix=matrix, **common, **({"out": out} if name == "down" else {}),
        )  # fmt: skip


def put_packed(plan: Planner, node: Node, o: Mapping[str, Any], common: dict[str, Any], out: Value) -> None:
    experts, pairs = int(tensor_of(o["down"]).shape[0]), f"{common['rows'].text} * {common['ids'].layout.size}"
    clamped = o["activation"] == "clamped_swiglu"
    for kernel, name, columns, writes in (
        ("packed_up", "gate_up", common["d"], ("hidden",)), ("packed_down", "down", common["f"], ("out",))
    ):  # fmt: skip
        form = CPP[kind_of(int(tensor_of(o[name]).shape[2]), columns)]
        bias = o[f"{name}_bias"]
        made = NativeKernel(
            f"{kernel}<{form}>", "PackedExpertsArgs", "ops/moe_experts/native_packed.h", writes=writes,
            scratch=f"experts_scratch<{form}>({pairs}, {columns}, {experts})",
            shared=f"experts_shared<{form}>({pairs}, {columns})",
        )  # fmt: skip
        plan.step(
            node, made, matrix=plan.weight(o[name], "as_is"), **common, experts=experts,
            bias=Text("nullptr") if bias is None else plan.weight(bias, "float32", "float"),
            act=Text("Act::none" if clamped else f"Act::{o['activation']}"), clamped=clamped,
            weigh_input=bool(o["weigh_input"]), shared=Text("call.shared"),
            **({"out": out} if name == "down" else {}),
        )  # fmt: skip
