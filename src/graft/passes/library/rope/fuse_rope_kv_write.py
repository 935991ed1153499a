"""fuse_rope_kv_write: rotation (and norm) of queries and keys and the write into the cache become one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.ir.nodes import is_op, options_of, where
from graft.ir.patterns.match import Refused
from graft.ir.patterns.words import choice
from graft.passes.base import Context, TransformConfig
from graft.passes.library.attention.fuse_rope_into_attention import SHAPES as ATTENTION
from graft.passes.library.matvec.linears import DecodeConfig, device_of, not_for
from graft.passes.patterns import PatternRun, PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry
from graft.passes.walk import unexpected

ops = torch.ops.graft
ROPE, PAGED = ops.rope.default, ops.paged_attention.default
HEADS_FIRST = (-3, -2)  # [b, s, h, d] ↔ [b, h, s, d]


def paged(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    lens_cpu: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    interleaved: bool, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0, cast_last: bool = False,
) -> Tensor:  # fmt: skip
    def normed(transposed: bool) -> tuple[Tensor, Tensor]:
        """A norm of every head; it is of the last dim alone, so that heads may come first before it or after it."""
        heads = (ops.rms_norm(x, g, eps, offset, cast_last) for x, g in ((q, q_norm), (k, k_norm)))
        first, second = (x.transpose(*HEADS_FIRST) if transposed else x for x in heads)
        return first, second

    # two norms that differ in their options stay where they are: then the last fits
    heads = choice("heads", transposed=lambda: normed(True), normed=lambda: normed(False), plain=lambda: (q, k))
    rotated = (ops.rope(x, cos, sin, interleaved) for x in heads)
    caches, layout = (k_cache, v_cache, slot_mapping), (token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    return ops.paged_attention(*rotated, v, *caches, *layout, scale, window, softcap, sinks)


def written_then_cached(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    lens_cpu: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    interleaved: bool, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, offset: float, cast_last: bool,
    heads: str,
) -> Tensor:  # fmt: skip
    if heads == "transposed":
        q, k = q.transpose(*HEADS_FIRST), k.transpose(*HEADS_FIRST)
    norms = (interleaved, q_norm, k_norm, eps, offset, cast_last)
    rotated = ops.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, *norms)
    layout = (token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    return ops.cached_attention(rotated, k_cache, v_cache, *layout, scale, window, softcap, sinks)


REWRITES = (Rewrite(paged, written_then_cached, ATTENTION, needs=(ROPE, PAGED), origin="cos"),)


@TransformRegistry.register("fuse_rope_kv_write")
class FuseRoPEKVWrite(PatternTransform):
    """One op rotates queries and keys and writes keys and values into the paged cache; attention then reads.

    before:  %q = graft.rope(%q0, %cos, %sin);  %k = graft.rope(%k0, %cos, %sin)
             %o = graft.paged_attention(%q, %k, %v, %k_cache, %v_cache, %slot_mapping, %token_to_seq, …)
    after:   %q = graft.rope_kv_write(%q0, %k0, %v, %cos, %sin, %k_cache, %v_cache, %slot_mapping)
             %o = graft.cached_attention(%q, %k_cache, %v_cache, %token_to_seq, …)

    Also with a norm of every head before the rotation (graft.rope of graft.rms_norm); norms that differ in their
    options stay where they are. Only on the devices of the option `devices`. Numerics: the
    reference is those ops one after the other, bitwise; the kernel rounds where they do, sums of a norm run in
    another order.
    """

    config: DecodeConfig  # pyrefly: ignore
    uncheckable = "it needs a batch's layout in the cache, which made-up numbers are not"
    lacking = "no attention of the graph reads rotated queries and keys"
    explained = (PAGED,)
    size = 3

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        layer = next((node for node in gm.graph.nodes if is_op(node, PAGED)), None)
        return not_for(device_of(gm), context, self.config.devices) if layer is not None else None

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def reason(self, run: PatternRun) -> str:
        return super().reason(run) if run.absent((PAGED,)) is None else "the graph has no graft::paged_attention"

    def explain(self, node: Node) -> None:
        """Queries or keys that are rotated alone, or differently; where neither is, there is nothing to say."""
        q, k = node.args[:2]
        rotates = [is_op(side, ROPE) for side in (q, k)]
        if rotates == [True, True]:
            first, second = options_of(q), options_of(k)
            different = next((name for name in ("cos", "sin", "interleaved") if first[name] != second[name]), None)
            if different is not None:
                by = f"{different}: {first[different]}, {second[different]}"
                raise Refused(k, f"{where(q)} and {where(k)} rotate by different {by}")
        elif any(rotates):
            at, text = unexpected(k if rotates[0] else q, node, "graft.rope, as the others")
            raise Refused(at, f"{'keys' if rotates[0] else 'queries'} are not rotated: {text}")
