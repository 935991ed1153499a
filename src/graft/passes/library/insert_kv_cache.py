"""insert_kv_cache: attention over whole sequences becomes attention over packed tokens and a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.base.errors import UnsupportedAttention
from graft.ir.edit import Editor, fake_mode
from graft.ir.nodes import calls, is_op, module_path, tensor_of, where
from graft.ir.patterns.match import Match
from graft.ir.patterns.words import constant
from graft.ops.layout import PAGED, cache_blocks, cache_names, declare
from graft.ops.paged_cache import rows_of
from graft.passes.base import Context
from graft.passes.patterns import PatternRun, PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry

ops = torch.ops.graft
ATTENTION, LATENT = ops.attention.default, ops.latent_attention.default


@dataclass(frozen=True)
class LayerCache:
    """What one attention layer keeps: tensors of [blocks, rows, kv_heads, head_dim] (ops/paged_cache.py), two, or one
    of latent rows."""

    kv_heads: int
    head_dim: int
    window: int | None
    dtype: torch.dtype
    tensors: int = 2


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool, window: int | None,
    softcap: float | None, sinks: Tensor | None, nan_rows: bool,
) -> Tensor:  # fmt: skip
    return ops.attention(q, k, v, mask, scale, is_causal, window, softcap, sinks, nan_rows)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, token_to_seq: Tensor,
    block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    layout = (slot_mapping, token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    width = v.shape[-1]
    if width == k.shape[-1]:
        return ops.paged_attention(q, k, v, k_cache, v_cache, *layout, scale, window, softcap, sinks)
    wide = F.pad(v, (0, k.shape[-1] - width))  # both caches have the keys' head size
    return ops.paged_attention(q, k, wide, k_cache, v_cache, *layout, scale, window, softcap, sinks)[..., :width]


def latent_attention(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, scale: float) -> Tensor:
    return ops.latent_attention(q, latent, rope, constant(weight), scale)


def paged_latent_attention(
    q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, latent_cache: Tensor, slot_mapping: Tensor,
    token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    layout = (slot_mapping, token_to_seq, block_tables, cu_seqlens, seq_lens, lens_cpu)
    return ops.paged_latent_attention(q, latent, rope, weight, latent_cache, *layout, scale)


@dataclass
class CacheRun(PatternRun):
    """The layers that have a cache so far."""

    layers: dict[Node, LayerCache] = field(default_factory=dict)
    blocks: torch.SymInt | int = 0  # of all caches


def add_caches(run: CacheRun, match: Match) -> dict[str, Node]:
    keys = tensor_of(match.tensors["k"])
    spec = LayerCache(keys.shape[1], keys.shape[-1], match.literals["window"], cache_dtype(run, keys))
    return new_inputs(run, match.anchor, spec, ("k_cache", "v_cache"))


def add_latent_cache(run: CacheRun, match: Match) -> dict[str, Node]:
    latent, rope = tensor_of(match.tensors["latent"]), tensor_of(match.tensors["rope"])
    spec = LayerCache(1, latent.shape[-1] + rope.shape[-1], None, cache_dtype(run, latent), tensors=1)
    return new_inputs(run, match.anchor, spec, ("latent_cache",))


def cache_dtype(run: CacheRun, rows: Tensor) -> torch.dtype:
    return run.context.kv_cache_dtype or rows.dtype


def new_inputs(run: CacheRun, layer: Node, spec: LayerCache, arguments: Sequence[str]) -> dict[str, Node]:
    """More inputs, which the op writes; the inputs that all layers read come before the first of them."""
    if not run.layers:
        run.shared, run.blocks = declare(run.editor, layer, PAGED), cache_blocks(layer)
    with fake_mode(layer):
        rows = rows_of(run.context.block_size, spec.head_dim, spec.dtype)
        size = (run.blocks, rows, spec.kv_heads, spec.head_dim)
        example = torch.empty(size, dtype=spec.dtype, device=tensor_of(layer).device)
    names = cache_names(len(run.layers), spec.tensors)
    run.layers[layer] = spec
    return {arg: run.editor.placeholder(name, example) for arg, name in zip(arguments, names, strict=True)}


def check_mask(match: Match) -> None:
    """Every layer, or none of the graph: one without a cache would be wrong, so it is an error."""
    layer, keys, values = match.anchor, tensor_of(match.tensors["k"]), tensor_of(match.tensors["v"])
    if "mask" in match.tensors:
        mask = match.tensors["mask"]
        raise UnsupportedAttention(
            module_path(layer), f"{where(mask)} is a mask of its own, not causal with a window"
        )
    if not match.literals["is_causal"]:
        raise UnsupportedAttention(module_path(layer), "it looks ahead (is_causal=False)")
    if keys.shape[-1] < values.shape[-1]:
        sizes = f"{keys.shape[-1]} and {values.shape[-1]}"
        raise UnsupportedAttention(module_path(layer), f"heads of keys are smaller than those of values, {sizes}")


SHAPES = {"q": "b h s d", "k": "b g s d", "v": "b g s w", "mask": "b 1 s s", "sinks": "h"}
LATENT_SHAPES = {"q": "b h s d", "latent": "b 1 s c", "rope": "b 1 s r", "weight": "n c"}
REWRITES = (
    Rewrite(attention, paged_attention, SHAPES, check_mask, needs=(ATTENTION,), make=add_caches),
    Rewrite(latent_attention, paged_latent_attention, LATENT_SHAPES, needs=(LATENT,), make=add_latent_cache),
)


@TransformRegistry.register("insert_kv_cache")
class InsertKVCache(PatternTransform):
    """Attention over whole sequences becomes attention over packed tokens [1, T] and a paged cache.

    before:  %o = graft.attention(%q, %k, %v, None, scale, True, window, softcap, sinks)
    after:   %o = graft.paged_attention(%q, %k, %v, %k_cache_0, %v_cache_0, %slot_mapping, %token_to_seq,
                                        %block_tables, %cu_seqlens, %seq_lens, %lens_cpu, scale, window, softcap,
                                        sinks)

    New inputs: the layout of the batch (ops/layout.py), and the caches of each layer, which are written in place, in
    the dtype of the keys, or in float8 (context.kv_cache_dtype): what is kept is rounded to 3 bits behind the first.
    graft.latent_attention becomes graft.paged_latent_attention, over one cache of latent rows: what all heads' keys
    and values are made of (absorb_latent_attention). Values with smaller heads than keys, where that did not apply,
    are filled up with zeros on the way in, and cut off on the way out: the two caches of a layer have one head size.
    Numerics: the same attention; sums may run in another order. A mask other than causal with a window cannot be kept
    over packed tokens and is refused.
    """

    uncheckable = "what it reads depends on a cache that the graph did not have before"
    lacking = "the graph has no graft::attention"

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return (
            None if context.route == "decoder" else "the module is not run by graft's engine; its caches are its own"
        )

    def start(self, gm: GraphModule, context: Context) -> CacheRun:
        return CacheRun(gm, context, Editor(gm, self.name))

    def rewrites(self) -> Sequence[Rewrite]:
        return REWRITES

    def finish(self, run: CacheRun) -> None:
        super().finish(run)
        left = next((node for node in calls(run.gm.graph) if is_op(node, ATTENTION)), None)
        if left is not None:
            reasons = (miss.reason for miss in run.misses if miss.name == left.name)
            raise UnsupportedAttention(module_path(left), next(reasons, f"{where(left)} has no cache"))
        if run.layers:
            run.context.outputs["kv_cache"] = tuple(run.layers.values())
            run.context.outputs["kv_cache_layers"] = tuple(module_path(node) for node in run.layers)
