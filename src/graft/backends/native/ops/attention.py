"""Rotation, cache write and attention: ops/rope, rope_kv_write and cached_attention/native.h.

graft.rope_attention   →  kv_write; attention        (attention rotates the queries it reads)
graft.paged_attention  →  kv_write; attention        (nothing rotates)
graft.rope_kv_write    →  kv_write; rope
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graft.backends.native.plan import Planner, lowers
from graft.backends.native.program import CTYPES, Argument, NativeKernel, NotLowered, Text, Value
from graft.ir.nodes import options_of, tensor_of

ops = torch.ops.graft


@lowers(ops.rope.default)
def lower_rope(plan: Planner, node: Node) -> None:
    o = options_of(node)
    rotate_rows(plan, node, o["x"], rotate(plan, o, None))


@lowers(ops.rope_kv_write.default)
def lower_rope_kv_write(plan: Planner, node: Node) -> None:
    o = options_of(node)
    write(plan, node, o)
    rotate_rows(plan, node, o["q"], rotate(plan, o, o["q_norm"]))


@lowers(ops.paged_attention.default, ops.rope_attention.default)
def lower_rope_attention(plan: Planner, node: Node) -> None:
    o = options_of(node)
    write(plan, node, o)
    attend(plan, node, o)


@lowers(ops.cached_attention.default)
def lower_cached_attention(plan: Planner, node: Node) -> None:
    attend(plan, node, options_of(node))


def rotate(plan: Planner, o: dict[str, Any], norm: Any) -> dict[str, Argument]:
    """The fields of C++'s Turn."""
    fields: dict[str, Argument] = {
        "rotation__norm": plan.vector_or_null(norm),
        "rotation__eps": float(o.get("eps", 0.0)),
        "rotation__offset": float(o.get("offset", 0.0)),
        "rotation__rotates": "cos" in o,
        "rotation__interleaved": bool(o.get("interleaved", False)),
    }
    if "cos" in o:
        cos, sin = plan.value(o["cos"]), plan.value(o["sin"])
        if cos.layout.heads != 1 or cos.layout != sin.layout:
            raise NotLowered("cos and sin are not one angle for all heads of a token")
        fields |= {"rotation__cos": cos, "rotation__sin": sin}
    return fields


def rotate_rows(plan: Planner, node: Node, x: Any, rotated: dict[str, Argument]) -> None:
    out = plan.new(node)
    plan.step(
        node, NativeKernel("rope", "RopeArgs", "ops/rope/native.h"), x=heads_of(plan, x), **rotated,
        rows=plan.rows(out.layout), out=out,
    )  # fmt: skip
    plan.bind(node, out)


def heads_of(plan: Planner, x: Any) -> Value:
    value = plan.value(x)
    if value.layout.rows != "tokens":
        raise NotLowered(f"%{x.name} is not rows of tokens")
    return value


def cache_type(o: dict[str, Any]) -> torch.dtype:
    return tensor_of(o["k_cache"]).dtype


def write(plan: Planner, node: Node, o: dict[str, Any]) -> None:
    kind = cache_type(o)
    k, v = heads_of(plan, o["k"]), heads_of(plan, o["v"])
    caches = {name: plan.pointer(o[name], kind, written=True) for name in ("k_cache", "v_cache")}
    name, header = f"kv_write<{CTYPES[kind]}>", "ops/rope_kv_write/native.h"
    plan.step(
        node, NativeKernel(name, "KvWriteArgs", header, tuple(caches), scratch=str(k.layout.size)), k=k, v=v,
        **rotate(plan, o, o.get("k_norm")), **caches, slot_mapping=plan.pointer(o["slot_mapping"]), rows=Text("T"),
    )  # fmt: skip


def attend(plan: Planner, node: Node, o: dict[str, Any]) -> None:
    kind, q, out = cache_type(o), heads_of(plan, o["q"]), plan.new(node)
    _, block, kv, size = tensor_of(o["k_cache"]).shape
    wide = out.layout.size
    scratch = f"attention_scratch({q.layout.heads // int(kv)}, {int(size)}, {wide})"
    shared = f"attention_shared({q.layout.heads}, {wide})"
    caches = {name: plan.pointer(o[name], kind) for name in ("k_cache", "v_cache")}
    name, header = f"attention<{CTYPES[kind]}>", "ops/cached_attention/native.h"
    plan.step(
        node, NativeKernel(name, "AttentionArgs", header, scratch=scratch, shared=shared),
        q=q, **rotate(plan, o, o.get("q_norm")), **caches, kv=int(kv), block=int(block),
        block_tables=plan.pointer(o["block_tables"]), table_width=plan.size(o["block_tables"], 1),
        cu_seqlens=plan.pointer(o["cu_seqlens"]), seq_lens=plan.pointer(o["seq_lens"]),
        sequences=plan.size(o["seq_lens"], 0),
        scale=float(o["scale"]), window=int(o["window"] or 0), softcap=float(o["softcap"] or 0.0),
        sinks=plan.vector_or_null(o["sinks"]), out=out, shared=Text("call.shared"),
    )  # fmt: skip
    plan.bind(node, out)
