"""fuse_rope_kv_write: rotation (and norm) of queries and keys and the write into the cache become one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import args_of, calls, is_op, options_of, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.passes.base import Context, TransformConfig
from graft.passes.library.matvec.linears import DecodeConfig, not_for
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun
from graft.passes.walk import unexpected

aten, ops = torch.ops.aten, torch.ops.graft
ROPE = ops.rope.default
HEADS_FIRST = (-3, -2)  # [b, s, h, d] ↔ [b, h, s, d]
NORM_OPTIONS = ("eps", "offset", "cast_last")
DEFAULTS: dict[str, Any] = {
    "interleaved": False, "q_norm": None, "k_norm": None, "eps": 0.0, "offset": 0.0, "cast_last": False,
}  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """Queries or keys on their way: what comes in, and the calls that turn it."""

    x: Node
    nodes: tuple[Node, ...]  # the rotation, then what is peeled off before it
    norm: Node | None = None  # the call that norms every head


@dataclass(frozen=True)
class TurnedPair(Match):
    queries: Heads
    keys: Heads


@TransformRegistry.register("fuse_rope_kv_write")
class FuseRoPEKVWrite(Rewriter):
    """Queries and keys are turned, and keys and values written into the paged cache, by one op; attention then reads.

    before:  %q = graft.rope(%q0, %cos, %sin);  %k = graft.rope(%k0, %cos, %sin)
             %o = graft.paged_attention(%q, %k, %v, %k_cache, %v_cache, %slot_mapping, %token_to_seq, …)
    after:   %q = graft.rope_kv_write(%q0, %k0, %v, %cos, %sin, %k_cache, %v_cache, %slot_mapping)
             %o = graft.cached_attention(%q, %k_cache, %v_cache, %token_to_seq, …)

    Also with a norm of every head before the rotation (graft.rope of graft.rms_norm); norms that differ in their
    options stay where they are. Only on the devices of the option `devices`. Numerics: the
    reference is those ops one after the other, bitwise; the kernel rounds where they do, sums of a norm run in
    another order.

    A walk: two norms that are there or not, and stay where they are if they differ.
    """

    config: DecodeConfig  # pyrefly: ignore
    uncheckable = "it needs a batch's layout in the cache, which made-up numbers are not"

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    lacking = "no attention of the graph reads turned queries and keys"
    find_first = True
    size = 3

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        layers = paged_layers(gm)
        return not_for(tensor_of(layers[0]).device.type, context, self.config.devices) if layers else None

    def reason(self, run: RewriteRun) -> str:
        return super().reason(run) if paged_layers(run.gm) else "the graph has no graft::paged_attention"

    def candidates(self, run: RewriteRun) -> list[Node]:
        return paged_layers(run.gm)

    def find(self, run: RewriteRun, paged: Node) -> TurnedPair | None:
        """Queries and keys that turn alike."""
        q, k, v = paged.args[:3]
        turning = [is_op(node, ROPE) for node in (q, k)]
        if not any(turning):
            return None
        if not all(turning):
            at, text = unexpected(k if turning[0] else q, paged, "graft.rope, as the others")
            raise Refused(at, f"{'keys' if turning[0] else 'queries'} do not turn: {text}")
        one, two = heads_alike(q, k)
        angles = options_of(q)
        tensors = {"q": one.x, "k": two.x, "v": v, "cos": angles["cos"], "sin": angles["sin"]}
        name = "plain" if one.norm is None else "norms of heads"
        return TurnedPair(name, tensors, {}, (*one.nodes, *two.nodes, paged), (paged,), one, two)

    def write(self, run: RewriteRun, match: TurnedPair) -> list[Node]:
        queries, keys, editor = match.queries, match.keys, run.editor
        paged, rope = match.nodes[-1], queries.nodes[0]
        given, made = options_of(paged), []
        heads = {}
        for name, side in (("q", queries), ("k", keys)):
            x = side.x
            if len(side.nodes) > 2:  # the norm is of the last dim alone, so the heads may come first before it
                x = editor.call(aten.transpose.int, (x, *HEADS_FIRST), before=paged, like=side.nodes[1])
                made.append(x)
            heads[name] = x
        turned = {**given, **match.tensors, **settings(rope, queries, keys), **heads}
        args = args_of(ops.rope_kv_write.default, turned, defaults=False)
        written = editor.call(ops.rope_kv_write.default, args, before=paged, like=rope)
        attended = args_of(ops.cached_attention.default, {**given, "q": written})
        read = editor.call(ops.cached_attention.default, attended, before=paged, like=paged)
        editor.replace(paged, read)
        return [*made, written, read]


def paged_layers(gm: GraphModule) -> list[Node]:
    return [node for node in calls(gm.graph) if is_op(node, ops.paged_attention.default)]


def heads_alike(q: Node, k: Node) -> tuple[Heads, Heads]:
    """Both sides, with their norms where these are alike too; Refused where they turn differently."""
    first, second = options_of(q), options_of(k)
    different = next((name for name in ("cos", "sin", "interleaved") if first[name] != second[name]), None)
    if different is not None:
        by = f"{different}: {first[different]}, {second[different]}"
        raise Refused(k, f"{where(q)} and {where(k)} turn by different {by}")
    one, two = heads_of(q), heads_of(k)
    if alike(one, two):
        return one, two
    return Heads(q.args[0], (q,)), Heads(k.args[0], (k,))  # the norms stay where they are


def heads_of(rope: Node) -> Heads:
    """A rotation with the norm of every head before it, where that has no other reader and keeps the dtype."""
    turned = rope.args[0]
    swapped = is_op(turned, aten.transpose.int) and turned.args[1:] == HEADS_FIRST
    norm = turned.args[0] if swapped else turned
    inside = (rope, turned, norm) if swapped else (rope, norm)
    alone = all(len(node.users) == 1 for node in inside[1:])
    if not is_op(norm, ops.rms_norm.default) or not alone or tensor_of(norm).dtype != tensor_of(norm.args[0]).dtype:
        return Heads(turned, (rope,))
    return Heads(norm.args[0], inside, norm)


def alike(one: Heads, two: Heads) -> bool:
    """Both without a norm, or with norms that have the same options."""
    if one.norm is None or two.norm is None:
        return one.norm is two.norm
    left, right = options_of(one.norm), options_of(two.norm)
    return all(left[name] == right[name] for name in NORM_OPTIONS)


def settings(rope: Node, queries: Heads, keys: Heads) -> dict[str, Any]:
    """What the op is told beyond its tensors."""
    told = {**DEFAULTS, "interleaved": options_of(rope)["interleaved"]}
    if queries.norm is not None and keys.norm is not None:
        options = options_of(queries.norm)
        told |= {name: options[name] for name in NORM_OPTIONS}
        told |= {"q_norm": options["weight"], "k_norm": options_of(keys.norm)["weight"]}
    return told
