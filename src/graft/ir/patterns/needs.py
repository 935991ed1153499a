"""What a pattern needs to fit at all: calls of an op, a call that reads another's result, or any of several.

A graph that lacks one need not be searched, and the pattern, which costs 10 to 20 ms to trace, not be traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from graft.ir.io.text import target_text

DROPOUT = torch.ops.aten.dropout.default
Need = Any  # an op, a pair (an op that reads, one whose result it reads), or any_of(…)


def any_of(*needs: Need) -> frozenset[Need]:
    """One of these is enough: alternatives of a pattern each call another."""
    return frozenset(needs)


def calls_and_reads(nodes: Iterable[Node]) -> set[Need]:
    """Every op that these nodes call, and every pair, also through a dropout, which is told as a near miss."""
    nodes = list(nodes)
    pairs = {(node.target, undropped(source).target) for node in nodes for source in node.all_input_nodes}
    return {node.target for node in nodes} | pairs


def undropped(node: Node) -> Node:
    return node.args[0] if node.target is DROPOUT and isinstance(node.args[0], Node) else node


def is_met(need: Need, present: set[Need]) -> bool:
    return not need.isdisjoint(present) if isinstance(need, frozenset) else need in present


def ops_of(need: Need) -> Iterator[Any]:
    if isinstance(need, (tuple, frozenset)):
        for one in need:
            yield from ops_of(one)
    else:
        yield need


def need_text(need: Need) -> str:
    """`aten.silu`, `aten.add.Tensor of aten.to.dtype`, or `aten.gelu or aten.silu`."""
    if isinstance(need, frozenset):
        return " or ".join(sorted(map(need_text, need)))
    return " of ".join(map(target_text, ops_of(need)))
