"""Weights in tiles of the native backend: 8 or 4 bits with a scale each 32 columns, or a GGUF file's own blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor, attribute
from graft.graph.match import NearMiss
from graft.graph.nodes import calls, is_op, tensor_of
from graft.graph.storage import identity, storage_id
from graft.ops.fused_linear.pack_rows import KIND, pack_checked
from graft.ops.fused_linear.tiles import in_graph
from graft.transforms.base import Context, Outcome
from graft.transforms.quantization import Layers, Quantized, Saving, pattern_fits, release, totals, weight_problem
from graft.transforms.quantized_calls import (
    ADDMM,
    EXPERTS_STAY,
    MM,
    call_problem,
    experts,
    linear_calls,
    near_miss,
    operands,
    parameters,
    put,
    put_product,
)
from graft.transforms.report import MatchRecord

aten, ops = torch.ops.aten, torch.ops.graft
EMBEDDING = aten.embedding.default
FILE, HEAD = "file", "lm_head.weight"


@dataclass(frozen=True)
class Use:
    """A weight and the calls that read it: products, and lookups of its rows."""

    weight: Node
    readers: tuple[Node, ...]  # in the graph's order

    @property
    def products(self) -> list[Node]:
        return [node for node in self.readers if not is_op(node, EMBEDDING)]

    @property
    def pattern_name(self) -> str:
        """What patterns see: a weight that is multiplied with and looked up in is the output head's."""
        return HEAD if 0 < len(self.products) < len(self.readers) else str(self.weight.target)


def pack_layers(
    gm: GraphModule,
    context: Context,
    layers: Layers,
    format_of: Callable[[str], str],
    skip: Sequence[str],
    owned: torch.nn.Module | None,
    kept: str,
) -> Outcome:
    """Packs what can be packed, one weight after another; the old one is given up where the engine owns it."""
    editor, records, done = Editor(gm, "quantize_linear"), [], []
    misses = [near_miss(node, EXPERTS_STAY) for node in experts(gm)]
    for use in uses(gm):
        name = str(use.weight.target) if use.weight.op == "get_attr" else ""
        problem = use_problem(layers, use, skip)
        made = None if problem else packed_weight(gm, context, use, format_of(use.pattern_name))
        if isinstance(made, str) or made is None:
            misses += near_misses(use, problem or str(made))
            continue
        records += rewrite_use(editor, use, made)
        done.append(made)
        if context.held is not None:
            context.held.drop(attribute(gm, name))
        if owned is not None and not made.stored:  # the others' memory was never written: they can wait
            release(gm, owned, name)
    if owned is not None:
        release(gm, owned, *(made.name for made in done if made.stored))
    if not done:
        reasons = list(dict.fromkeys(miss.reason for miss in misses))
        return Outcome((), tuple(misses), "; ".join(reasons[:3]) or "the graph has no linear layer")
    format = "+".join(dict.fromkeys(made.stored or made.format for made in done))
    context.outputs["quantized"] = Saving(format, sum(made.before - made.after for made in done))
    context.notes += totals(done, misses, kept, native=True)
    return Outcome(tuple(records), tuple(misses))


def uses(gm: GraphModule) -> list[Use]:
    """Every weight of a product, and every table of an embedding, with all calls that read the same memory."""
    readers: dict[Any, list[Node]] = {}
    weights: dict[Any, Node] = {}
    products = set(linear_calls(gm))
    for node in calls(gm.graph):
        if node not in products and not is_op(node, EMBEDDING):
            continue
        weight = operands(node)["weight"] if node in products else node.args[0]
        key: Any = weight
        if isinstance(weight, Node) and weight.op == "get_attr":
            key = identity(attribute(gm, str(weight.target)))
        weights.setdefault(key, weight)
        readers.setdefault(key, []).append(node)
    return [Use(weights[key], tuple(found)) for key, found in readers.items() if isinstance(weights[key], Node)]


def near_misses(use: Use, reason: str) -> list[NearMiss]:
    """Tables are no linear layers: leaving them is no miss."""
    return [near_miss(node, reason) for node in use.products]


def use_problem(layers: Layers, use: Use, skip: Sequence[str]) -> str | None:
    problem = next(filter(None, map(call_problem, use.products)), None)
    problem = problem or weight_problem(layers, use.weight, skip, may_be_tied=True)
    if problem is None and use.pattern_name == HEAD:
        pattern = next((pattern for pattern in skip if pattern_fits(pattern, HEAD)), None)
        problem = pattern and f"{use.weight.target} is the output head's too, which is skipped ({pattern!r})"
    if problem:
        return problem
    tensor = attribute(layers.gm, str(use.weight.target))
    there = layers.readers.get(storage_id(tensor), ())
    others = [user for node in there for user in node.users if user not in use.readers]
    if others or any(reads_twice(node, there) for node in use.readers):
        return f"{use.weight.target} is tied: something else than products and lookups reads it too"
    if len({(is_op(node, MM, ADDMM), gated(node)) for node in use.readers}) > 1:
        return f"{use.weight.target} is read in several ways, by one product turned or gated and by another not"
    if any(is_op(node, EMBEDDING) and len(node.args) + len(node.kwargs) > 3 for node in use.readers):
        return f"{use.weight.target} is looked up with options of training"
    return None


def reads_twice(node: Node, weights: Sequence[Node]) -> bool:
    return sum(arg in weights for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, Node)) > 1


def gated(node: Node) -> bool:
    return not is_op(node, EMBEDDING) and operands(node)["activation"] != "none"


def packed_weight(gm: GraphModule, context: Context, use: Use, format: str) -> Quantized | str:
    """The weight in tiles, or why it stays."""
    name = str(use.weight.target)
    weight, turned, twice = attribute(gm, name).detach(), is_op(use.readers[0], MM, ADDMM), gated(use.readers[0])
    held = context.held is not None and weight in context.held
    if context.held is not None and held and format == FILE:
        parts = context.held.of(weight)
        if parts[0].turned != turned:
            return f"{name} is stored turned in the file, and the product reads it the other way"
        packed = context.held.packed(weight, twice)
        stored = "+".join(context.held.quants(weight))
        return Quantized(name, packed.kind, *in_graph(packed), None, weight.nbytes, stored=stored)
    if format == FILE or not use.products:
        return f"{name} has floats in the file" if format == FILE else f"{name} is a table"
    if context.held is not None and held:
        context.held.fill(weight)
    rows = weight.t() if turned else weight
    packed, rounding = pack_checked(rows, KIND[format], twice, name)
    return Quantized(name, packed.kind, *in_graph(packed), rounding, weight.nbytes)


def rewrite_use(editor: Editor, use: Use, made: Quantized) -> list[MatchRecord]:
    q, scale = parameters(editor, made, use.readers[0])
    return [
        rewrite_lookup(editor, node, made, q, scale)
        if is_op(node, EMBEDDING)
        else put_product(editor, node, operands(node), made, q, scale)
        for node in use.readers
    ]


def rewrite_lookup(editor: Editor, node: Node, made: Quantized, q: Node, scale: Node) -> MatchRecord:
    value = tensor_of(node)
    args = (q, scale, node.args[1], int(value.shape[-1]), value.dtype)
    new = editor.call(ops.packed_embedding.default, args, before=node, like=node)
    return put(editor, node, new, (q, scale), made)
