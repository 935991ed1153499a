"""The variants of a function with words (ir/patterns/words.py), as canonical graphs from one trace.

A trace costs 8 ms before it has traced anything and 0.3 ms a call, so variants are traced one behind the other in one
graph, which is then cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from graft.base.errors import PatternError
from graft.ir.canonical.normal_form import canonicalize
from graft.ir.nodes import output_node, placeholders
from graft.ir.patterns.words import Path, deciding
from graft.ir.trace import raw_trace

VARIANT = "variant"  # in the meta of a traced node, until it is cut
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
            results.append(result)
            mark_calls(len(results) - 1)
        return results

    gm = raw_trace(run, examples)
    variants = [gm] if len(paths) == 1 else cut(gm)
    for variant in variants:
        canonicalize(variant)
    return list(zip(variants, paths, strict=True))


def mark_calls(variant: int) -> None:
    """What the trace at hand made since the last variant is of this one; what nobody reads, torch drops later."""
    mode = get_proxy_mode()
    assert mode is not None
    for node in reversed(mode.tracer.graph.nodes):
        if VARIANT in node.meta or node.op == "placeholder":
            break
        node.meta[VARIANT] = variant


def cut(gm: GraphModule) -> list[GraphModule]:
    """The calls of each variant, with all inputs."""
    results = output_node(gm.graph).args[0]
    made: list[list[Node]] = [[] for _ in results]
    for node in gm.graph.nodes:
        if node.op == "call_function":
            made[node.meta.pop(VARIANT)].append(node)
    return [GraphModule(gm, piece(gm.graph, nodes, result)) for nodes, result in zip(made, results, strict=True)]


def piece(whole: Graph, nodes: Sequence[Node], result: Any) -> Graph:
    graph = Graph()
    copies = {node: graph.node_copy(node) for node in placeholders(whole)}

    def copied(source: Node) -> Node:
        if source not in copies:  # an attribute that another variant read first
            copies[source] = graph.node_copy(source)
        return copies[source]

    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    graph.output(map_arg(result, copied))
    return graph
