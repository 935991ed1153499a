"""absorb_latent_attention: keys and values that are made of one latent row are not kept; the row is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import (
    calls,
    is_op,
    is_weight,
    options_of,
    same_sizes,
    slice_args,
    static_int,
    tensor_of,
    where,
)
from graft.ir.patterns.match import Match, Refused
from graft.passes.base import Context, TransformConfig
from graft.passes.library.attention.operands import permutation
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun
from graft.passes.walk import GraphWalk, expect, require
from graft.weights.quantize import FP8

aten, ops = torch.ops.aten, torch.ops.graft
CAT, SLICE, EXPAND, LINEAR = aten.cat.default, aten.slice.Tensor, aten.expand.default, aten.linear.default
RESHAPES = (aten.reshape.default, aten.view.default)
HEADS_FIRST = (0, 2, 1, 3)  # [b, s, h, d] → [b, h, s, d]


@dataclass(frozen=True)
class LatentConfig(TransformConfig):
    """gpu: also on a GPU, where no measurement says yet that it pays."""

    gpu: bool = False


@dataclass(frozen=True)
class LatentMatch(Match):
    """row: numbers a token that are kept; instead_of: those of keys and values."""

    row: int
    instead_of: int


@TransformRegistry.register("absorb_latent_attention")
class AbsorbLatentAttention(Rewriter):
    """DeepSeek's multi-head latent attention, so that the cache keeps what keys and values are made of:

    before:  %kv = transpose(reshape(linear(%latent, %kv_b), [b, s, heads, nope + v]), 1, 2)
             %k = cat([slice(%kv, -1, 0, nope), expand(%rope, [-1, heads, -1, -1])], -1)
             %o = graft.attention(%q, %k, slice(%kv, -1, nope, nope + v), None, scale)
    after:   %o = graft.latent_attention(%q, %latent, %rope, %kv_b, scale)

    insert_kv_cache makes of it graft.paged_latent_attention, over one cache with a row of latent and rope numbers a
    token. A token that decodes is multiplied with kv_b's part for keys, attends over the rows as they are, and what
    comes out is multiplied with the part for values; prompts expand keys and values, where that is less work.

    Numerics: (q · W) · latent in place of q · (W · latent): sums in another order, and other roundings in 16 bits.
    kv_b's weight stays in the model's dtype: quantize_linear does not find it.

    A walk: where the row stands among the dims, and how heads are laid out, differs, and reasons name the step.
    """

    config: LatentConfig  # pyrefly: ignore
    lacking = "no attention reads keys that are joined of a projection and a part for all heads"
    size = 8

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return LatentConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return (
            None if context.route == "decoder" else "the module is not run by graft's engine; its caches are its own"
        )

    def candidates(self, run: RewriteRun) -> list[Node]:
        return [node for node in calls(run.gm.graph) if is_op(node, ops.attention.default)]

    def find(self, run: RewriteRun, attention: Node) -> Match | None:
        given = options_of(attention)
        q, keys, values = given["q"], given["k"], given["v"]
        if not is_op(keys, CAT) or len(keys.args[0]) != 2 or not is_op(values, SLICE):
            return None
        check_plain(attention)
        walk = GraphWalk()
        walk.take(attention)
        walk.take(keys)
        require(joins_last(keys), keys, f"{where(keys)} does not join parts of a head")
        own, shared = keys.args[0]
        rope = shared_part(walk, shared)
        heads, nope = projected(walk, own, values, tensor_of(q).shape)
        linear = walk.call(heads.args[0], heads, LINEAR)
        latent = latent_of(linear, heads)
        _, count, _, width = tensor_of(q).shape
        rank, rotated = int(tensor_of(latent).shape[-1]), int(tensor_of(rope).shape[-1])
        require(nope + rotated == width, keys, f"{where(keys)} has heads of {nope + rotated}, queries of {width}")
        row, instead_of = rank + rotated, 2 * int(count) * int(width)
        require(row < instead_of, linear, f"{where(linear)}: a row of {row} is no less than keys and values")
        weight = linear.args[1]
        self.check_device(attention, run.context)
        tensors = {"q": q, "latent": latent, "rope": rope, "weight": weight}
        kinds = {tensor_of(node).dtype for node in tensors.values()}
        require(len(kinds) == 1, linear, f"queries, rows and weight differ in dtype: {', '.join(map(str, kinds))}")
        return LatentMatch(
            "", tensors, {"scale": given["scale"]}, tuple(walk.nodes), (attention,), row=row, instead_of=instead_of
        )

    def check_device(self, attention: Node, context: Context) -> None:
        if tensor_of(attention).device.type == "cpu":
            return
        switch = "transforms.absorb_latent_attention.gpu=true switches it on"
        require(self.config.gpu, attention, f"on a GPU its kernel has not been measured yet; --set {switch}")
        float8 = context.kv_cache_dtype is FP8
        require(not float8, attention, "on a GPU its kernel reads no float8 cache; keys and values are kept")

    def write(self, run: RewriteRun, match: LatentMatch) -> list[Node]:
        q, latent, rope, weight = (match.tensors[name] for name in ("q", "latent", "rope", "weight"))
        made = []
        if tensor_of(latent).dim() == 3:
            latent = run.editor.call(aten.unsqueeze.default, (latent, 1), before=match.anchor, like=match.anchor)
            made.append(latent)
        args = (q, latent, rope, weight, match.literals["scale"])
        made.append(run.editor.call(ops.latent_attention.default, args, before=match.anchor, like=match.anchor))
        run.editor.replace(match.anchor, made[-1])
        run.context.outputs.setdefault("latent_rows", []).append((match.row, match.instead_of))
        return made

    def finish(self, run: RewriteRun) -> None:
        rows = run.context.outputs.get("latent_rows", [])
        if rows:
            kept, instead_of = (sum(each) for each in zip(*rows, strict=True))
            run.context.notes.append(
                f"key-value cache: {len(rows)} layers keep latent rows, {kept:,} numbers a token together and not"
                f" {instead_of:,}; their kv_b weights stay in the model's dtype"
            )


def check_plain(attention: Node) -> None:
    """The op has causal attention and no more."""
    given = options_of(attention)
    for name, what in (("mask", "a mask"), ("window", "a window"), ("softcap", "a soft cap"), ("sinks", "sinks")):
        require(given[name] is None, attention, f"{where(attention)} has {what}, which latent attention has not")
    require(given["is_causal"], attention, f"{where(attention)} looks ahead (is_causal=False)")


def joins_last(cat: Node) -> bool:
    return options_of(cat)["dim"] % tensor_of(cat).dim() == tensor_of(cat).dim() - 1


def shared_part(walk: GraphWalk, part: Node) -> Node:
    """[b, 1, s, rope], which all heads of [b, h, s, rope] are."""
    if not is_op(part, EXPAND):
        raise Refused(part, f"{where(part)}, the second part of the keys, is not shared by all heads")
    source = part.args[0]
    require(
        tensor_of(source).dim() == 4 and static_int(tensor_of(source).shape[1]) == 1, part,
        f"{where(part)} repeats something else than one head",
    )  # fmt: skip
    walk.take(part)
    return source


def projected(walk: GraphWalk, own: Node, values: Node, like: torch.Size) -> tuple[Node, int]:
    """The reshape [b, s, h, nope + v] that keys take the first numbers of each head of, and values the rest."""
    walk.take(expect(own, values, SLICE))
    walk.take(values)
    source = own.args[0]
    require(
        values.args[0] is source, values, f"{where(values)} takes values of something else than {where(own)} keys"
    )
    (dim, start, end, step), (dim_v, start_v, end_v, step_v) = slice_args(own), slice_args(values)
    whole = static_int(tensor_of(source).shape[-1])
    fits = dim == dim_v == 3 and step == step_v == 1 and start == 0 and end == start_v and end_v == whole
    require(fits, values, f"{where(own)} and {where(values)} are not the first part of each head, and the rest")
    require(permutation(source) == HEADS_FIRST, source, f"{where(source)} does not put heads before tokens")
    heads = walk.call(walk.take(source).args[0], source, *RESHAPES)
    b, count, s, _ = like
    wanted = (b, s, count, whole)
    require(same_sizes(tensor_of(heads).shape, wanted), heads, f"{where(heads)} is not [batch, tokens, heads, …]")
    return heads, int(end or 0)


def latent_of(linear: Node, heads: Node) -> Node:
    """What is projected: [b, 1, s, rank] or [b, s, rank]; nothing else reads it."""
    latent, weight, *bias = linear.args
    require(not bias or bias[0] is None, linear, f"{where(linear)} has a bias, which a row does not hold")
    require(is_weight(weight), linear, f"the weight of {where(linear)} is computed")
    b, s, *_ = tensor_of(heads).shape
    lead = tensor_of(latent).shape[:-1]
    require(
        same_sizes(lead, (b, 1, s)) or same_sizes(lead, (b, s)), linear, f"{where(latent)} is not one row a token"
    )
    row, reader = latent, linear
    while True:
        other = next((user for user in row.users if user is not reader), None)
        require(other is None, row, f"the latent row {where(row)} is read by {where(other or row)} too")
        if not is_op(row, *RESHAPES):
            return latent
        row, reader = row.args[0], row
