"""fuse_rope_into_attention: rotation and cache write go into the attention that follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from graft.passes.base import Context, TransformConfig
from graft.passes.library.matvec.linears import DecodeConfig, device_of, not_for
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft


def write_then_attend(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    lens_cpu: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    interleaved: bool, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, offset: float, cast_last: bool,
) -> Tensor:  # fmt: skip
    norms = (interleaved, q_norm, k_norm, eps, offset, cast_last)
    rotated = ops.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, *norms)
    layout = (token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    return ops.cached_attention(rotated, k_cache, v_cache, *layout, scale, window, softcap, sinks)


def rope_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    lens_cpu: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    interleaved: bool, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, offset: float, cast_last: bool,
) -> Tensor:  # fmt: skip
    caches, layout = (k_cache, v_cache, slot_mapping), (token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    options = (scale, window, softcap, sinks, interleaved, q_norm, k_norm, eps, offset, cast_last)
    return ops.rope_attention(q, k, v, cos, sin, *caches, *layout, *options)


CACHE, TOKENS, BATCH = "n p g d", "t : int64", "b : int64"
SHAPES = {
    "q": "1 h t d", "k": "1 g t d", "v": "1 g t d", "cos": "1 1 t d", "sin": "1 1 t d", "k_cache": CACHE,
    "v_cache": CACHE, "slot_mapping": TOKENS, "token_to_seq": TOKENS, "block_tables": "b m : int64",
    "cu_seqlens": "b+1 : int64", "seq_lens": BATCH, "lens_cpu": "b 2 : int64", "sinks": "h", "q_norm": "d",
    "k_norm": "d",
}  # fmt: skip
REWRITES = (Rewrite(write_then_attend, rope_attention, SHAPES, needs=(ops.cached_attention.default,), near=1),)


@TransformRegistry.register("fuse_rope_into_attention")
class FuseRoPEIntoAttention(PatternTransform):
    """Queries and keys are rotated, and the cache is written, by the kernel that attends: one launch a layer less.

    before:  %q = graft.rope_kv_write(%q0, %k0, %v, %cos, %sin, %k_cache, %v_cache, %slot_mapping)
             %o = graft.cached_attention(%q, %k_cache, %v_cache, %token_to_seq, %block_tables, %cu_seqlens, %seq_lens,
                                         %lens_cpu, …)
    after:   %o = graft.rope_attention(%q0, %k0, %v, %cos, %sin, %k_cache, %v_cache, %slot_mapping, %token_to_seq,
                                       %block_tables, %cu_seqlens, %seq_lens, %lens_cpu, …)

    The op runs as one kernel for sequences that decode, and as the two it replaces otherwise.
    Numerics: the reference is the two references, bitwise; the kernel rounds where they do.
    The cache is written later than before: the matcher refuses where anything in between would see that.
    """

    config: DecodeConfig  # pyrefly: ignore
    uncheckable = "it needs a batch's layout in the cache, which made-up numbers are not"
    lacking = "the graph has no graft::cached_attention"

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return not_for(device_of(gm), context, self.config.devices)

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES
