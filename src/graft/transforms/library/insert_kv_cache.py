"""insert_kv_cache: attention over whole sequences becomes attention over packed tokens and a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graft.errors import UnsupportedAttention
from graft.graph.edit import Editor, fake_mode
from graft.graph.nodes import args_of, calls, is_op, module_path, options_of, tensor_of, where
from graft.kvcache.layout import PAGED, cache_blocks, cache_names, declare
from graft.transforms.base import BaseTransform, Context, Outcome
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

ops = torch.ops.graft


@dataclass(frozen=True)
class LayerCache:
    """What one attention layer keeps: two tensors of [blocks, block_size, kv_heads, head_dim]."""

    kv_heads: int
    head_dim: int
    window: int | None
    dtype: torch.dtype


@TransformRegistry.register("insert_kv_cache")
class InsertKVCache(BaseTransform):
    """Attention over whole sequences becomes attention over packed tokens [1, T] and a paged cache.

    before:  %o = graft.attention(%q, %k, %v, None, scale, True, window, softcap, sinks)
    after:   %o = graft.paged_attention(%q, %k, %v, %k_cache_0, %v_cache_0, %slot_mapping, %token_to_seq,
                                        %block_tables, %cu_seqlens, %seq_lens, %lens_cpu, scale, window, softcap,
                                        sinks)

    New inputs: the layout of the batch (kvcache/layout.py), and two caches a layer that are written in place.
    Numerics: the same attention; sums may run in another order. A mask other than causal with a window cannot be kept
    over packed tokens and is refused.
    """

    unprovable = "what it reads depends on a cache that the graph did not have before"

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        if context.route != "decoder":
            return Outcome(reason="the module is not run by graft's engine; its caches are its own", skipped=True)
        layers = [node for node in calls(gm.graph) if is_op(node, ops.attention.default)]
        if not layers:
            return Outcome(reason="the graph has no graft::attention")
        editor = Editor(gm, self.name)
        layout = declare(editor, layers[0], PAGED)
        specs = [cache_spec(node) for node in layers]
        examples = cache_examples(specs, layers[0], context.block_size)
        records = [
            insert_cache(editor, node, index, examples[spec], layout)
            for index, (node, spec) in enumerate(zip(layers, specs, strict=True))
        ]
        context.outputs["kv_cache"] = tuple(specs)
        context.outputs["kv_cache_layers"] = tuple(module_path(node) for node in layers)
        return Outcome(tuple(records))


def cache_spec(node: Node) -> LayerCache:
    options = options_of(node)
    if options["mask"] is not None:
        raise UnsupportedAttention(
            module_path(node), f"{where(options['mask'])} is a mask of its own, not causal with a window"
        )
    if not options["is_causal"]:
        raise UnsupportedAttention(module_path(node), "it looks ahead (is_causal=False)")
    keys, values = tensor_of(options["k"]), tensor_of(options["v"])
    if keys.shape[-1] != values.shape[-1]:
        raise UnsupportedAttention(module_path(node), "keys and values have different head sizes")
    return LayerCache(keys.shape[1], keys.shape[-1], options["window"], keys.dtype)


def cache_examples(specs: list[LayerCache], like: Node, block_size: int) -> dict[LayerCache, torch.Tensor]:
    """The abstract value of a cache, [blocks, block_size, kv_heads, head_dim]; all layers have as many blocks."""
    blocks, device = cache_blocks(like), tensor_of(like).device
    with fake_mode(like):
        return {
            s: torch.empty((blocks, block_size, s.kv_heads, s.head_dim), dtype=s.dtype, device=device) for s in specs
        }


def insert_cache(
    editor: Editor, node: Node, index: int, example: torch.Tensor, layout: dict[str, Node]
) -> MatchRecord:
    caches = [editor.placeholder(name, example) for name in cache_names(index)]
    given = {**options_of(node), **dict(zip(("k_cache", "v_cache"), caches, strict=True)), **layout}
    target = ops.paged_attention.default
    paged = editor.call(target, args_of(target, given), before=node, like=node)
    record = MatchRecord(where(node), module_path(node), (node.name,), (paged.name, *(c.name for c in caches)))
    editor.replace(node, paged)
    editor.graph.erase_node(node)
    return record
