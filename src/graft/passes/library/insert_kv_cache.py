"""insert_kv_cache: attention over whole sequences becomes attention over packed tokens and a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from graft.base.errors import UnsupportedAttention
from graft.ir.edit import Editor, fake_mode
from graft.ir.nodes import args_of, calls, is_op, module_path, options_of, tensor_of, where
from graft.ir.patterns.match import Match
from graft.ops.layout import PAGED, cache_blocks, cache_names, declare
from graft.passes.base import Context
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun

ops = torch.ops.graft


@dataclass(frozen=True)
class LayerCache:
    """What one attention layer keeps: two tensors of [blocks, block_size, kv_heads, head_dim]."""

    kv_heads: int
    head_dim: int
    window: int | None
    dtype: torch.dtype


@TransformRegistry.register("insert_kv_cache")
class InsertKVCache(Rewriter):
    """Attention over whole sequences becomes attention over packed tokens [1, T] and a paged cache.

    before:  %o = graft.attention(%q, %k, %v, None, scale, True, window, softcap, sinks)
    after:   %o = graft.paged_attention(%q, %k, %v, %k_cache_0, %v_cache_0, %slot_mapping, %token_to_seq,
                                        %block_tables, %cu_seqlens, %seq_lens, %lens_cpu, scale, window, softcap,
                                        sinks)

    New inputs: the layout of the batch (ops/layout.py), and two caches a layer that are written in place.
    Numerics: the same attention; sums may run in another order. A mask other than causal with a window cannot be kept
    over packed tokens and is refused.

    A walk: a pattern has no word for new inputs of the graph.
    """

    uncheckable = "what it reads depends on a cache that the graph did not have before"

    find_first = True
    lacking = "the graph has no graft::attention"

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return (
            None if context.route == "decoder" else "the module is not run by graft's engine; its caches are its own"
        )

    def start(self, gm: GraphModule, context: Context) -> CacheRun:
        return CacheRun(gm, context, Editor(gm, self.name))

    def candidates(self, run: CacheRun) -> list[Node]:
        return [node for node in calls(run.gm.graph) if is_op(node, ops.attention.default)]

    def find(self, run: CacheRun, node: Node) -> Match:
        """Every layer, or none of the graph: one without a cache would be wrong, so it is an error."""
        run.layers[node] = cache_spec(node)
        return Match("", {}, {}, (node,), (node,))

    def check(self, run: CacheRun, match: Match) -> None:
        """One call for another: nobody outside sees a difference."""

    def write(self, run: CacheRun, match: Match) -> list[Node]:
        node, editor, index = match.anchor, run.editor, len(run.caches)
        example, target = run.example(run.layers[node]), ops.paged_attention.default
        layout = run.layout  # the inputs of all layers come before their caches
        run.caches.append([editor.placeholder(name, example) for name in cache_names(index)])
        given = {**options_of(node), **dict(zip(("k_cache", "v_cache"), run.caches[-1], strict=True)), **layout}
        paged = editor.call(target, args_of(target, given), before=node, like=node)
        editor.replace(node, paged)
        return [paged, *run.caches[-1]]

    def finish(self, run: CacheRun) -> None:
        if run.layers:
            run.context.outputs["kv_cache"] = tuple(run.layers.values())
            run.context.outputs["kv_cache_layers"] = tuple(module_path(node) for node in run.layers)


@dataclass
class CacheRun(RewriteRun):
    """The layers that get a cache, and the inputs that all of them read."""

    layers: dict[Node, LayerCache] = field(default_factory=dict)
    caches: list[list[Node]] = field(default_factory=list)

    @cached_property
    def layout(self) -> dict[str, Node]:
        return declare(self.editor, next(iter(self.layers)), PAGED)

    @cached_property
    def blocks(self) -> torch.SymInt:
        """All layers have as many."""
        return cache_blocks(next(iter(self.layers)))

    def example(self, spec: LayerCache) -> torch.Tensor:
        """The abstract value of a cache, [blocks, block_size, kv_heads, head_dim]."""
        like = next(iter(self.layers))
        size = (self.blocks, self.context.block_size, spec.kv_heads, spec.head_dim)
        with fake_mode(like):
            return torch.empty(size, dtype=spec.dtype, device=tensor_of(like).device)


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
