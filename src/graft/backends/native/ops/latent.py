"""Latent attention over a paged cache of latent rows: ops/paged_latent_attention/native.h.

graft.paged_latent_attention  →  latent_write; latent_attention
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graft.backends.native.ops.attention import heads_of
from graft.backends.native.plan import Planner, lowers
from graft.backends.native.program import CTYPES, NativeKernel, NotLowered, Text
from graft.ir.nodes import options_of, tensor_of

HEADER = "ops/paged_latent_attention/native.h"


@lowers(torch.ops.graft.paged_latent_attention.default)
def lower_paged_latent_attention(plan: Planner, node: Node) -> None:
    o = options_of(node)
    write_rows(plan, node, o)
    attend_rows(plan, node, o)


def write_rows(plan: Planner, node: Node, o: dict[str, Any]) -> None:
    kind = tensor_of(o["latent_cache"]).dtype
    cache = plan.pointer(o["latent_cache"], kind, written=True)
    kernel = NativeKernel(f"latent_write<{CTYPES[kind]}>", "LatentWriteArgs", HEADER, ("latent_cache",))
    plan.step(
        node, kernel, latent=heads_of(plan, o["latent"]), rope=heads_of(plan, o["rope"]), latent_cache=cache,
        slot_mapping=plan.pointer(o["slot_mapping"]), rows=Text("T"),
    )  # fmt: skip


def attend_rows(plan: Planner, node: Node, o: dict[str, Any]) -> None:
    """The weight is read as it lies: both of its parts stand in it row by row."""
    q, out = heads_of(plan, o["q"]), plan.new(node)
    rank, rope = plan.value(o["latent"]).layout.size, plan.value(o["rope"]).layout.size
    kind, weight = tensor_of(o["latent_cache"]).dtype, tensor_of(o["weight"])
    if weight.dtype not in CTYPES or not weight.is_contiguous():
        raise NotLowered(f"the weight is {weight.dtype}, or does not lie row by row")
    heads, size, wide = q.layout.heads, q.layout.size, out.layout.size
    name = f"latent_attention<{CTYPES[kind]}, {CTYPES[weight.dtype]}>"
    scratch = f"latent_scratch(T, {heads}, {rank}, {size}, {size - rope}, {wide})"
    shared = f"latent_shared(T, {heads}, {rank}, {rope})"
    plan.step(
        node, NativeKernel(name, "LatentArgs", HEADER, scratch=scratch, shared=shared), q=q,
        weight=plan.weight(o["weight"], "as_is"), latent_cache=plan.pointer(o["latent_cache"], kind),
        rank=rank, rope=rope, block=int(tensor_of(o["latent_cache"]).shape[1]),
        block_tables=plan.pointer(o["block_tables"]), table_width=plan.size(o["block_tables"], 1),
        cu_seqlens=plan.pointer(o["cu_seqlens"]), seq_lens=plan.pointer(o["seq_lens"]),
        sequences=plan.size(o["seq_lens"], 0), scale=float(o["scale"]), out=out, shared=Text("call.shared"),
    )  # fmt: skip
    plan.bind(node, out)
