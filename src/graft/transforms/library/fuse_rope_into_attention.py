"""fuse_rope_into_attention: rotation and cache write go into the attention that follows."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graft.graph.match import Match, Refused
from graft.graph.memory import mutated_args, storage_root
from graft.graph.nodes import args_of, calls, is_op, options_of, where
from graft.transforms.base import Context, TransformConfig
from graft.transforms.decode import DecodeConfig, device_of, not_for
from graft.transforms.registry import TransformRegistry
from graft.transforms.rewriter import Rewriter, Run

ops = torch.ops.graft


@TransformRegistry.register("fuse_rope_into_attention")
class FuseRoPEIntoAttention(Rewriter):
    """Queries and keys are turned, and the cache is written, by the kernel that attends: one launch a layer less.

    before:  %q = graft.rope_kv_write(%q0, %k0, %v, %cos, %sin, %k_cache, %v_cache, %slot_mapping)
             %o = graft.cached_attention(%q, %k_cache, %v_cache, %token_to_seq, %block_tables, %cu_seqlens, %seq_lens,
                                         %lens_cpu, …)
    after:   %o = graft.rope_attention(%q0, %k0, %v, %cos, %sin, %k_cache, %v_cache, %slot_mapping, %token_to_seq,
                                       %block_tables, %cu_seqlens, %seq_lens, %lens_cpu, …)

    The op runs as one kernel for sequences that decode, and as the two it replaces otherwise.
    Numerics: the reference is the two references, bitwise; the kernel rounds where they do.

    A walk: the cache is written later than before, so everything in between is asked whether it sees that.
    """

    config: DecodeConfig  # pyrefly: ignore
    unprovable = "it needs a batch's layout in the cache, which made-up numbers are not"

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return DecodeConfig

    lacking = "the graph has no graft::cached_attention"

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        return not_for(device_of(gm), context, self.config.devices)

    def candidates(self, run: Run) -> list[Node]:
        return [node for node in calls(run.gm.graph) if is_op(node, ops.cached_attention.default)]

    def find(self, run: Run, attention: Node) -> Match | None:
        """Where the queries come from the write into the very caches that are read, and nobody else reads them."""
        write = attention.args[0]
        if not is_op(write, ops.rope_kv_write.default):
            raise Refused(attention, f"its queries come from {where(write)}, not from graft.rope_kv_write")
        if caches_of(write) != caches_of(attention):
            raise Refused(attention, f"{where(write)} writes other caches than those it reads")
        other = next((user for user in write.users if user is not attention), None)
        if other is not None:
            raise Refused(attention, f"{where(other)} reads the turned queries too")
        return Match("", {}, {}, (write, attention), (attention,))

    def check(self, run: Run, match: Match) -> None:
        """Nothing in between may see that the cache is written later; the match writes to it itself."""
        write, attention = match.nodes
        read = {storage_root(node) for node in write.all_input_nodes}
        caches = {storage_root(node) for node in caches_of(write)}
        node = write.next
        while node is not attention:
            if any(storage_root(argument) in caches for argument in node.all_input_nodes):
                raise Refused(attention, f"{where(node)} in between needs the caches as they are then")
            if any(storage_root(argument) in read for argument in mutated_args(node)):
                raise Refused(attention, f"{where(node)} in between writes what {where(write)} reads")
            node = node.next

    def write(self, run: Run, match: Match) -> list[Node]:
        write, attention = match.nodes
        turn, read = options_of(write), options_of(attention)
        given = {**read, **turn}  # both have q and the caches: the queries are those that are not turned yet
        args = args_of(ops.rope_attention.default, given, defaults=False)
        whole = run.editor.call(ops.rope_attention.default, args, before=attention, like=attention)
        run.editor.replace(attention, whole)
        return [whole]


def caches_of(node: Node) -> list[Node]:
    options = options_of(node)
    return [options["k_cache"], options["v_cache"]]
