"""insert_kv_cache: attention over whole sequences becomes attention over packed tokens and a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graft.errors import UnsupportedAttention
from graft.graph.edit import Editor, fake_mode, symbolic_sizes
from graft.graph.nodes import calls, is_op, module_path, options_of, tensor_of, where
from graft.transforms.base import BaseTransform, Context, Outcome
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

ops = torch.ops.graft
LAYOUT = ("slots", "rows", "block_tables", "starts", "lengths", "spans")


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
    after:   %o = graft.paged_attention(%q, %k, %v, %k_cache_0, %v_cache_0, %slots, %rows, %block_tables, %starts,
                                        %lengths, %spans, scale, window, softcap, sinks)

    New inputs: the layout of the batch (slots, rows, block_tables, starts, lengths, and spans on the CPU), and two
    caches a layer that are written in place. Numerics: the same attention; sums may run in another order. A mask
    other than causal with a window cannot be kept over packed tokens and is refused.
    """

    unprovable = "what it reads depends on a cache that the graph did not have before"

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        if context.route != "decoder":
            return Outcome(reason="the module is not run by graft's engine; its caches are its own", skipped=True)
        layers = [node for node in calls(gm.graph) if is_op(node, ops.attention.default)]
        if not layers:
            return Outcome(reason="the graph has no graft::attention")
        editor = Editor(gm, self.name)
        layout = add_layout(editor, layers[0])
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


def add_layout(editor: Editor, like: Node) -> list[Node]:
    """The inputs that describe a batch of packed tokens. T tokens, n sequences, m blocks in the longest."""
    tokens = tensor_of(like.args[0]).shape[2]
    sequences, blocks, edges = symbolic_sizes(like, 3)
    sizes: dict[str, tuple[int | torch.SymInt, ...]] = {
        "slots": (tokens,), "rows": (tokens,), "block_tables": (sequences, blocks), "starts": (edges,),
        "spans": (sequences, 2),
    }  # fmt: skip
    device = tensor_of(like.args[0]).device
    nodes = []
    for name in LAYOUT:
        with fake_mode(like):
            place = "cpu" if name == "spans" else device  # the one that says sizes to the host
            value = torch.empty(sizes.get(name, (sequences,)), dtype=torch.int64, device=place)
        nodes.append(editor.placeholder(name, value))
    return nodes


def cache_examples(specs: list[LayerCache], like: Node, block_size: int) -> dict[LayerCache, torch.Tensor]:
    """The abstract value of a cache, [blocks, block_size, kv_heads, head_dim]; all layers have as many blocks."""
    (blocks,) = symbolic_sizes(like, 1)
    device = tensor_of(like).device
    with fake_mode(like):
        return {
            s: torch.empty((blocks, block_size, s.kv_heads, s.head_dim), dtype=s.dtype, device=device) for s in specs
        }


def insert_cache(editor: Editor, node: Node, index: int, example: torch.Tensor, layout: list[Node]) -> MatchRecord:
    options = options_of(node)
    caches = [editor.placeholder(f"{name}_{index}", example) for name in ("k_cache", "v_cache")]
    args = (*node.args[:3], *caches, *layout, *(options[k] for k in ("scale", "window", "softcap", "sinks")))
    paged = editor.call(ops.paged_attention.default, args, before=node, like=node)
    record = MatchRecord(where(node), module_path(node), (node.name,), (paged.name, *(c.name for c in caches)))
    editor.replace(node, paged)
    editor.graph.erase_node(node)
    return record
