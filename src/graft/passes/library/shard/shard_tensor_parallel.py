"""shard_tensor_parallel: the part of a model that one of several ranks computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from graft.base.device_memory import size_text
from graft.base.errors import UsageError
from graft.ir.edit import Editor
from graft.ir.effects import storage_root
from graft.ir.nodes import calls, is_op, where
from graft.ir.patterns.match import Match, NearMiss, Refused
from graft.passes.base import Context, NumericChecker, TransformConfig
from graft.passes.library.shard.checking import check_ranks
from graft.passes.library.shard.experts import check_experts, write_experts
from graft.passes.library.shard.regions import (
    SplitRegion,
    attention_above,
    check_attention,
    find_region,
    linear_parts,
)
from graft.passes.library.shard.splits import ATTENTION, LINEARS
from graft.passes.library.shard.vocabulary import check_vocabulary, is_head, reads_tokens, write_embedding, write_head
from graft.passes.library.shard.weights import Shards
from graft.passes.library.shard.writing import Twins
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord
from graft.passes.rewriter import Rewriter, RewriteRun

aten, ops = torch.ops.aten, torch.ops.graft
EMBEDDING, EXPERTS = aten.embedding.default, ops.moe_experts.default
Kind = Literal["embedding", "head", "attention", "mlp", "experts"]


@dataclass(frozen=True)
class ShardConfig(TransformConfig):
    """world: how many ranks. rank: which of them this graph is for, counted from 0."""

    world: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise UsageError(
                f"shard_tensor_parallel: world must be at least 1 and rank below it, but they are {self.world} and"
                f" {self.rank}"
            )


@dataclass(frozen=True)
class ShardSite:
    """A call that ends what is split: a row-split linear layer, experts, the embedding or the output head."""

    anchor: Node
    kind: Kind


@dataclass(frozen=True)
class ShardMatch(Match):
    region: SplitRegion | None = None


@dataclass
class ShardRun(RewriteRun):
    """taken: linear layers that are split."""

    shards: Shards = field(kw_only=True)
    taken: set[Node] = field(default_factory=set)


@TransformRegistry.register("shard_tensor_parallel")
class ShardTensorParallel(Rewriter):
    """Each of `world` ranks computes its heads, its columns of an MLP and its tokens of the vocabulary.

    before:  %q = linear(%x, %wq, %bq);  …  %a = graft.attention(%q, %k, %v, …);  %y = linear(reshape(%a), %wo, %bo)
    after:   %q = linear(%x, %wq_2, %bq_2);  …  %a = graft.attention(…);  %p = linear(reshape(%a), %wo_2)
             %y = add(graft.all_reduce(%p, world), %bo)

    before:  %e = embedding(%w, %ids);  %logits = linear(%h, %w)
    after:   %e = graft.all_reduce(mul(embedding(%w_2, clamp(sub(%ids, first), 0, n - 1)), inside), world)
             %logits = graft.all_gather(linear(%h, %w_2), world)

    Column-split layers keep rows of their weights, the row-split layer behind them keeps columns, and one sum over
    the ranks ends each pair; its bias is added behind the sum. Which layers these are follows from the graph: from
    each linear layer upwards, through calls that work on each head or element by itself, to linear layers whose
    results nothing else reads. Merged weights are cut piece by piece. Key-value heads are repeated where there
    are more ranks than heads; a norm over all heads adds up its squares over the ranks; experts are cut by width.
    What cannot be split stays whole on every rank, with the reason. Numerics: the same dtype; sums run in
    another order, and parts of a sum are rounded to it before they are added.

    A walk: what lies between two layers varies, pieces of an axis have to be followed through reshapes, and the new
    weights are parts of the old ones.
    """

    config: ShardConfig  # pyrefly: ignore
    find_first = True
    lacking = "the graph has no linear layer that can be split"
    size = 3

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return ShardConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        if self.config.world == 1:
            return "one rank computes all of it; tensor_parallel_size=N (graft run --tensor-parallel N) makes it N"
        return None

    def start(self, gm: GraphModule, context: Context) -> ShardRun:
        editor = Editor(gm, self.name)
        return ShardRun(gm, context, editor, shards=Shards(editor, context.lazy))

    def candidates(self, run: ShardRun) -> Iterable[ShardSite]:
        """The embedding first: a tied head shares its part. Then attention: what leads to it is none of an MLP. The
        output head last: it ends no MLP."""
        graph = run.gm.graph
        linears = [node for node in calls(graph) if is_op(node, *LINEARS)]
        attention = [node for node in linears if attention_above(linear_parts(node)[0])]
        yield from (ShardSite(node, "embedding") for node in calls(graph) if is_op(node, EMBEDDING))
        yield from (ShardSite(node, "attention") for node in attention)
        yield from (ShardSite(node, "experts") for node in calls(graph) if is_op(node, EXPERTS))
        yield from (ShardSite(node, "mlp") for node in linears if node not in attention)
        yield from (ShardSite(node, "head") for node in linears if node not in run.taken and is_head(node))

    def find(self, run: ShardRun, site: ShardSite) -> ShardMatch | None:
        node, world = site.anchor, self.config.world
        if site.kind in ("embedding", "head"):
            if site.kind == "embedding" and not reads_tokens(node):
                raise Refused(node, f"{where(node)} is no embedding of the graph's tokens")
            check_vocabulary(run.gm, node, world)
        elif site.kind == "experts":
            check_experts(run.gm, node, world)
        elif node in run.taken:
            return None
        else:
            if site.kind == "attention":
                check_attention(node, world)
            region = find_region(run.gm, node, run.taken, self.config.rank, world)
            if region is None:
                return None
            run.taken |= {node, *region.columns}
            return ShardMatch(site.kind, {}, {}, (*region.calls, node), (node,), region=region)
        run.taken.add(node)
        return ShardMatch(site.kind, {}, {}, (node,), (node,))

    def check(self, run: ShardRun, match: ShardMatch) -> None:
        """Who else reads a value was asked of each (regions.py); here, who writes one or its weight."""
        for node in match.nodes:
            written = next((one for one in (node, *node.all_input_nodes) if storage_root(one) in run.mutated), None)
            if written is not None:
                raise Refused(node, f"{where(written)} is written in place, and a part of it would not see that")

    def write(self, run: ShardRun, match: ShardMatch) -> list[Node]:
        rank, world = self.config.rank, self.config.world
        if match.region is not None:
            return Twins(run.editor, run.shards, match.region, world).write()
        write: Any = {"embedding": write_embedding, "head": write_head, "experts": write_experts}[match.pattern]
        return write(run.editor, run.shards, match.anchor, rank, world)

    def own_check(self, context: Context) -> NumericChecker:
        """All ranks beside each other, as threads: one by itself gives nothing that could be compared."""

        def part_of(rank: int) -> Callable[[GraphModule], Sequence[MatchRecord]]:
            other = ShardTensorParallel(replace(self.config, rank=rank))
            return lambda gm: other.apply(gm, replace(context, outputs={}, notes=[])).matches

        own = self.config.rank
        return partial(
            check_ranks, others={rank: part_of(rank) for rank in range(self.config.world) if rank != own}, rank=own
        )

    def finish(self, run: ShardRun) -> None:
        told = {miss.name for miss in run.misses}
        for node in calls(run.gm.graph):
            made = node.meta.get("made_by") == self.name
            if is_op(node, *LINEARS, ATTENTION) and not made and node not in run.taken and node.name not in told:
                reason = f"{where(node)} stays whole: no split begins or ends with it"
                run.misses.append(NearMiss.at(self.name, node, node, reason, 1, self.size))
        if not run.records:
            return
        shards, state = run.shards, sum(p.nbytes for p in run.gm.parameters())
        after = sum(shards.cut.values())
        whole = state - after - shards.before
        run.context.outputs["sharded"] = tuple(shards.cut)
        if shards.widened:
            run.context.notes.append(
                f"shard_tensor_parallel: {len(shards.widened)} weights of the file are dequantised, because a part of"
                f" them begins or ends inside a block: {', '.join(shards.widened[:3])}"
                f"{' …' if len(shards.widened) > 3 else ''}"
            )
        run.context.notes.append(
            f"shard_tensor_parallel: rank {self.config.rank} of {self.config.world} has {size_text(after)} of"
            f" {size_text(shards.before)} in {len(shards.cut)} weights; {size_text(whole)} are whole on every rank"
        )
