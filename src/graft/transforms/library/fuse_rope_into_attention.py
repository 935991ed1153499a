"""fuse_rope_into_attention: rotation and cache write go into the attention that follows."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import NearMiss
from graft.graph.memory import mutated_args, storage_root
from graft.graph.nodes import args_of, calls, is_op, module_path, options_of, where
from graft.transforms.base import BaseTransform, Context, Outcome, TransformConfig, no_match_reason
from graft.transforms.decode import DecodeConfig, device_of, not_for
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

ops = torch.ops.graft


@TransformRegistry.register("fuse_rope_into_attention")
class FuseRoPEIntoAttention(BaseTransform):
    """Queries and keys are turned, and the cache is written, by the kernel that attends: one launch a layer less.

    before:  %q = graft.rope_kv_write(%q0, %k0, %v, %cos, %sin, %k_cache, %v_cache, %slot_mapping)
             %o = graft.cached_attention(%q, %k_cache, %v_cache, %token_to_seq, %block_tables, %cu_seqlens, %seq_lens,
                                         %lens_cpu, …)
    after:   %o = graft.rope_attention(%q0, %k0, %v, %cos, %sin, %k_cache, %v_cache, %slot_mapping, %token_to_seq,
                                       %block_tables, %cu_seqlens, %seq_lens, %lens_cpu, …)

    The op runs as one kernel for sequences that decode, and as the two it replaces otherwise.
    Numerics: the reference is the two references, bitwise; the kernel rounds where they do.
    """

    unprovable = "it needs a batch's layout in the cache, which made-up numbers are not"

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        assert isinstance(self.config, DecodeConfig)
        if reason := not_for(device_of(gm), context, self.config.devices):
            return Outcome(reason=reason, skipped=True)
        layers = [node for node in calls(gm.graph) if is_op(node, ops.cached_attention.default)]
        if not layers:
            return Outcome(reason="the graph has no graft::cached_attention")
        editor = Editor(gm, self.name)
        records, misses = [], []
        for attention in layers:
            problem = why_not(attention)
            if problem is None:
                records.append(fuse(editor, attention))
            else:
                misses.append(NearMiss(self.name, where(attention), f"%{attention.name}", problem, 1, 2))
        return Outcome(tuple(records), tuple(misses), "" if records else no_match_reason(misses))


def why_not(attention: Node) -> str | None:
    """None where the queries come from the write into the very caches that are read, nobody else reads them, and
    nothing in between would see that the write comes later."""
    write = attention.args[0]
    if not is_op(write, ops.rope_kv_write.default):
        return f"its queries come from {where(write)}, not from graft.rope_kv_write"
    if caches_of(write) != caches_of(attention):
        return f"{where(write)} writes other caches than those it reads"
    other = next((user for user in write.users if user is not attention), None)
    return disturbed(write, attention) if other is None else f"{where(other)} reads the turned queries too"


def disturbed(write: Node, attention: Node) -> str | None:
    """What stands in between and reads or writes the caches, or writes what the write reads."""
    read = {storage_root(node) for node in write.all_input_nodes}
    caches = {storage_root(node) for node in caches_of(write)}
    node = write.next
    while node is not attention:
        if any(storage_root(argument) in caches for argument in node.all_input_nodes):
            return f"{where(node)} in between needs the caches as they are then"
        if any(storage_root(argument) in read for argument in mutated_args(node)):
            return f"{where(node)} in between writes what {where(write)} reads"
        node = node.next
    return None


def caches_of(node: Node) -> list[Node]:
    options = options_of(node)
    return [options["k_cache"], options["v_cache"]]


def fuse(editor: Editor, attention: Node) -> MatchRecord:
    write = attention.args[0]
    turn, read = options_of(write), options_of(attention)
    given = {**read, **turn}  # both have q and the caches: the queries are those that are not turned yet
    args = args_of(ops.rope_attention.default, given, defaults=False)
    whole = editor.call(ops.rope_attention.default, args, before=attention, like=attention)
    record = MatchRecord(where(attention), module_path(attention), (write.name, attention.name), (whole.name,))
    editor.replace(attention, whole)
    editor.graph.erase_node(attention)
    editor.graph.erase_node(write)
    return record
