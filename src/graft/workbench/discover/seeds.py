"""Pieces that graft's own walks find: rotary embeddings, attention and experts run through views, which growing does
not follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from graft.ir.edit import second_module
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.workbench.discover.calls import is_free, is_graft

if TYPE_CHECKING:
    from graft.workbench.discover.regions import Kind

WALKS: dict[str, Kind] = {
    "fuse_moe": "experts",
    "fuse_rope": "attention_neighbour",
    "fuse_attention": "attention_neighbour",
}


@dataclass(frozen=True)
class FoundWalk:
    """One site that a walk of the library takes: its nodes, the ops it puts there, and how often they launch."""

    transform: str
    kind: Kind
    nodes: tuple[Node, ...]
    ops: tuple[Any, ...]
    launches: int


def walked(gm: GraphModule) -> list[FoundWalk]:
    """Every such site; none overlaps another."""
    config, twin = load_config(), second_module(gm)
    chosen = {n: replace(s, enabled=n in WALKS, on_error="skip") for n, s in config.transforms.items()}
    report = run_pipeline(twin, replace(config, transforms=chosen, verify="structure"), Context())
    nodes, made = ({node.name: node for node in graph.nodes} for graph in (gm.graph, twin.graph))
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    found: list[FoundWalk] = []
    taken: set[Node] = set()
    for name, record in report.transforms.items():
        for match in record.matches:
            own = [nodes[one] for one in match.replaced if one in nodes]
            whole = len(own) == len(match.replaced) and not taken & set(own)
            if whole and sum(not is_free(node) for node in own) > 1:
                taken |= set(own)
                new = [made[one] for one in match.made if one in made and not is_free(made[one])]
                ops = tuple(dict.fromkeys(node.target for node in new if is_graft(node.target)))
                ordered = tuple(sorted(own, key=order.__getitem__))
                found.append(FoundWalk(name, WALKS[name], ordered, ops, len(new)))
    return found
