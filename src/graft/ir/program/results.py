"""Which tensor objects a program returns: its caller's own, or new ones over the same memory.

    before:  %v = aten.view(%x, [2, 2])                 after:  %a = aten.alias(%x)
             return %v                                          return %a

Canonicalizing drops views that change nothing, which is right for values and wrong for objects: `compiled(x) is x`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.ir.edit import abstract_call
from graft.ir.effects import alias_sources, is_mutating
from graft.ir.nodes import leaves, outlives_call, output_node, val

Object = Node | str  # what made the object; an attribute by its name


def result_objects(graph: Graph) -> list[Any]:
    """The object that each result is in eager, of a graph that was not canonicalized yet."""
    return [object_of(leaf) if isinstance(leaf, Node) else leaf for leaf in leaves(output_node(graph).args)]


def object_of(node: Node) -> Object:
    """Follows calls that return their argument itself: `x.mul_(2)`, `x.contiguous()` of a contiguous x."""
    while (sources := alias_sources(node)) and returns_itself(node, sources[0]):
        node = sources[0]
    return str(node.target) if node.op == "get_attr" else node


def returns_itself(node: Node, source: Node) -> bool:
    if is_mutating(node):
        return True
    return isinstance(val(source), torch.Tensor) and abstract_call(node) is val(source)


def keep_results_apart(graph: Graph, objects: list[Any]) -> None:
    """Results that were objects of their own are that again."""
    output = output_node(graph)
    results = list(leaves(output.args))
    owners: dict[Node, Object] = {}
    aliases: dict[tuple[Node, Object], Node] = {}
    for index, (thing, new) in enumerate(zip(objects, results, strict=True)):
        if not isinstance(new, Node) or not isinstance(val(new), torch.Tensor):
            continue
        if outlives_call(new):
            owners[new] = str(new.target) if new.op == "get_attr" else new
        if owners.setdefault(new, thing) == thing:
            continue
        if (new, thing) not in aliases:
            with graph.inserting_before(output):
                alias = aliases[new, thing] = graph.call_function(torch.ops.aten.alias.default, (new,))
            alias.meta = dict(new.meta)
        results[index] = aliases[new, thing]
    output.args = rebuilt(output.args, iter(results))


def rebuilt(structure: Any, results: Iterator[Any]) -> Any:
    """`structure` with its leaves replaced, in the order of `leaves`."""
    if isinstance(structure, (list, tuple)):
        return type(structure)(rebuilt(item, results) for item in structure)
    if isinstance(structure, dict):
        return {key: rebuilt(item, results) for key, item in structure.items()}
    return next(results)
