"""Mixtures of experts: ops/moe_route and moe_experts/native.h."""

from __future__ import annotations

import torch
from torch.fx import Node

from graft.backends.native.plan import Planner, lowers
from graft.backends.native.program import CTYPES, HeadLayout, NativeKernel, Text
from graft.ir.nodes import options_of, tensor_of

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
    _, d, f = (int(size) for size in tensor_of(o["down"]).shape)
    kind = tensor_of(o["down"]).dtype
    hidden = plan.new(node, HeadLayout(x.layout.rows, 1, f * ids.layout.size, "flat"), "_hidden")
    common = {
        "x": x, "weights": weights, "ids": ids, "f": f, "d": d, "rows": plan.rows(x.layout), "hidden": hidden,
        "act": Text(f"Act::{o['activation']}"),
    }  # fmt: skip
    for kernel, name, writes in (("experts_up", "gate_up", ("hidden",)), ("experts_down", "down", ("out",))):
        matrix = plan.weight(o[name], "as_is")
        plan.step(
            node, NativeKernel(f"{kernel}<{CTYPES[kind]}>", "ExpertsArgs", "ops/moe_experts/native.h", writes=writes),
            matrix=matrix, **common, **({"out": out} if name == "down" else {}),
        )  # fmt: skip
    plan.bind(node, out)
