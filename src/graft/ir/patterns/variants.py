"""The variants of a function with words (ir/patterns/words.py), as canonical graphs from one trace.

A trace costs 8 ms before it has traced anything and 0.3 ms a call, so variants are traced one behind the other in one
graph, which is then cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graft.base.errors import PatternError
from graft.ir.canonical.normal_form import canonicalize
from graft.ir.nodes import output_node, placeholders
from graft.ir.patterns.words import Path, deciding
from graft.ir.trace import raw_trace

MOST = 64  # variants of one pattern; each is looked for in every graph


def trace_variants(
    function: Callable[..., Any], examples: Sequence[torch.Tensor], decided: tuple[int, ...] | None = None
) -> list[tuple[GraphModule, Path]]:
    """Every variant of `function` with how its words were decided; only that one where they are `decided`."""
    paths: list[Path] = []

    def run(*tensors: torch.Tensor) -> Any:
        results: list[Any] = []
        decisions = decided or ()
        while decisions is not None:
            with deciding(Path(decisions, found=decided is not None)) as path:
                result = function(*tensors)
            path.constant_inputs = tuple(i for i, t in enumerate(tensors) if any(t is c for c in path.constants))
            paths.append(path)
            decisions = path.following() if decided is None else None
            if len(paths) == 1 and decisions is None:
                return result
            if len(paths) > MOST:
                raise PatternError(f"its words stand for more than {MOST} variants; make it two patterns")
            results.append((result, torch.empty(0, device="meta")))  # its node says where the variant ends
        return results

    gm = raw_trace(run, examples)
    variants = [gm] if len(paths) == 1 else cut(gm)
    for variant in variants:
        canonicalize(variant)
    return list(zip(variants, paths, strict=True))


def cut(gm: GraphModule) -> list[GraphModule]:
    """The calls of each variant, between the ends of the one before it and its own, with all inputs."""
    nodes = iter([node for node in gm.graph.nodes if node.op not in ("placeholder", "output")])
    return [GraphModule(gm, piece(gm.graph, nodes, *variant)) for variant in output_node(gm.graph).args[0]]


def piece(whole: Graph, nodes: Iterator[Node], result: Any, end: Node) -> Graph:
    graph = Graph()
    copies = {node: graph.node_copy(node) for node in placeholders(whole)}

    def copied(source: Node) -> Node:
        if source not in copies:  # an attribute that another variant read first
            copies[source] = graph.node_copy(source)
        return copies[source]

    for node in iter(lambda: next(nodes), end):
        copies[node] = graph.node_copy(node, copied)
    graph.output(map_arg(result, copied))
    return graph
