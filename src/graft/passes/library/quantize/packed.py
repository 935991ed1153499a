"""Weights in tiles of the native backend: 8 or 4 bits with a scale each 32 columns, or a GGUF file's own blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor, attribute
from graft.ir.nodes import calls, is_op, tensor_of
from graft.ir.patterns.match import Match, Refused
from graft.ir.storage import identity, storage_id
from graft.passes.base import Context
from graft.passes.library.quantize.calls import (
    ADDMM,
    LATENT,
    LATENT_STAYS,
    MM,
    Quantizing,
    check_call,
    linear_calls,
    operands,
    others,
    parameters,
    put,
    put_linear,
    weight_match,
)
from graft.passes.library.quantize.quantization import (
    Quantized,
    WeightReaders,
    check_weight,
    pattern_fits,
    release,
    totals,
)
from graft.passes.library.quantize.stacked_experts import check_router
from graft.weights.pack_rows import KIND, pack_checked
from graft.weights.quantize import Saving
from graft.weights.tiles import in_graph

aten, ops = torch.ops.aten, torch.ops.graft
EMBEDDING = aten.embedding.default
FILE, HEAD = "file", "lm_head.weight"


@dataclass(frozen=True)
class Use:
    """A weight and the calls that read it: GEMMs, and lookups of its rows."""

    weight: Node
    readers: tuple[Node, ...]  # in the graph's order

    @property
    def gemms(self) -> list[Node]:
        return [node for node in self.readers if not is_op(node, EMBEDDING)]

    @property
    def pattern_name(self) -> str:
        """What patterns see: a weight that is multiplied with and looked up in is the output head's."""
        return HEAD if 0 < len(self.gemms) < len(self.readers) else str(self.weight.target)


class TiledWeights(Quantizing):
    """Packs what can be packed, one weight after another; the old one is freed where the engine owns it."""

    def __init__(
        self, gm: GraphModule, context: Context, on_error: str, skip: Sequence[str], format_of: Callable[[str], str]
    ) -> None:
        super().__init__(gm, context, on_error, skip)
        self.formats = format_of
        self.use_of = {node: use for use in uses(gm) for node in use.readers}
        self.parameters: dict[Use, tuple[Node, Node]] = {}

    def candidates(self) -> Iterable[Node]:
        return [*others(self.gm), *self.use_of]

    def format_of(self, name: str) -> str:
        return self.formats(name)

    def find(self, node: Node) -> Match | None:
        use = self.use_of.get(node)
        if use is None:
            if is_op(node, LATENT):
                raise Refused(node, LATENT_STAYS)
            return self.find_experts(node)
        if use in self.parameters:
            return weight_match(node, self.made[use.readers[0]][0].format)
        try:
            check_use(self.layers, use, self.skip, node)
            check_format(self, use, self.format_of(use.pattern_name), node)
            for reader in use.gemms:
                check_router(reader, self.routers, self.format_of(use.pattern_name))
        except Refused:
            if is_op(node, EMBEDDING):  # a table is no linear layer: leaving it is no miss
                return None
            raise
        made = packed_weight(self.gm, self.context, use, self.format_of(use.pattern_name))
        self.made |= dict.fromkeys(use.readers, (made,))
        return weight_match(node, made.format)

    def write(self, node: Node) -> list[Node]:
        if node not in self.use_of:
            return self.write_experts(node, KIND)
        use, (made,) = self.use_of[node], self.made[node]
        if use not in self.parameters:
            self.parameters[use] = parameters(self.editor, made, use.readers[0])
            self.done.append(made)
        q, scale = self.parameters[use]
        lookup = is_op(node, EMBEDDING)
        put_here = (
            put_lookup(self.editor, node, q, scale)
            if lookup
            else put_linear(self.editor, node, operands(node), made, q, scale)
        )
        if node is use.readers[-1]:
            self.give_up(made)
        return put_here

    def give_up(self, made: Quantized) -> None:
        if self.context.lazy is not None:
            self.context.lazy.drop(attribute(self.gm, made.name))
        if self.owned is not None and not made.stored:  # the others' memory was never written: they can wait
            release(self.gm, self.owned, made.name)

    def finish(self) -> None:
        if self.owned is not None:
            release(self.gm, self.owned, *(made.name for made in self.done if made.stored))
        if self.done:
            format = "+".join(dict.fromkeys(made.stored or made.format for made in self.done))
            self.context.outputs["quantized"] = Saving(format, sum(made.before - made.after for made in self.done))
            self.context.notes += totals(self.done, self.misses, self.kept, native=True)


def uses(gm: GraphModule) -> list[Use]:
    """Every weight of a GEMM, and every table of an embedding, with all calls that read the same memory."""
    readers: dict[Any, list[Node]] = {}
    weights: dict[Any, Node] = {}
    gemms = set(linear_calls(gm))
    for node in calls(gm.graph):
        if node not in gemms and not is_op(node, EMBEDDING):
            continue
        weight = operands(node)["weight"] if node in gemms else node.args[0]
        key: Any = weight
        if isinstance(weight, Node) and weight.op == "get_attr":
            key = identity(attribute(gm, str(weight.target)))
        weights.setdefault(key, weight)
        readers.setdefault(key, []).append(node)
    return [Use(weights[key], tuple(found)) for key, found in readers.items() if isinstance(weights[key], Node)]


def check_use(layers: WeightReaders, use: Use, skip: Sequence[str], reader: Node) -> None:
    """Refused, at one reader, where all that read the weight cannot read it packed."""
    for node in use.gemms:
        check_call(node)
    check_weight(layers, reader, use.weight, skip, may_be_tied=True)
    name = use.weight.target
    if use.pattern_name == HEAD:
        pattern = next((pattern for pattern in skip if pattern_fits(pattern, HEAD)), None)
        if pattern:
            raise Refused(reader, f"{name} is the output head's too, which is skipped ({pattern!r})")
    tensor = attribute(layers.gm, str(name))
    there = layers.readers.get(storage_id(tensor), ())
    others = [user for node in there for user in node.users if user not in use.readers]
    if others or any(reads_twice(node, there) for node in use.readers):
        raise Refused(reader, f"{name} is tied: something else than GEMMs and lookups reads it too")
    if len({(is_op(node, MM, ADDMM), gated(node)) for node in use.readers}) > 1:
        raise Refused(reader, f"{name} is read in several ways, by one GEMM transposed or gated and by another not")
    if any(is_op(node, EMBEDDING) and len(node.args) + len(node.kwargs) > 3 for node in use.readers):
        raise Refused(reader, f"{name} is looked up with options of training")


def reads_twice(node: Node, weights: Sequence[Node]) -> bool:
    return sum(arg in weights for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, Node)) > 1


def gated(node: Node) -> bool:
    if is_op(node, EMBEDDING):
        return False
    given = operands(node)
    return given["activation"] != "none" and given["glu"]


def check_format(run: TiledWeights, use: Use, format: str, reader: Node) -> None:
    """Refused where the weight has no such form."""
    name, lazy = str(use.weight.target), run.context.lazy
    weight = attribute(run.gm, name).detach()
    if lazy is not None and weight in lazy and format == FILE:
        if lazy.of(weight)[0].transposed != is_op(use.readers[0], MM, ADDMM):
            raise Refused(reader, f"{name} is stored transposed in the file, and the GEMM reads it the other way")
    elif format == FILE:
        raise Refused(reader, f"{name} has floats in the file")
    elif not use.gemms:
        raise Refused(reader, f"{name} is a table")


def packed_weight(gm: GraphModule, context: Context, use: Use, format: str) -> Quantized:
    """The weight in tiles."""
    name, lazy = str(use.weight.target), context.lazy
    weight, transposed, twice = attribute(gm, name).detach(), is_op(use.readers[0], MM, ADDMM), gated(use.readers[0])
    if lazy is not None and weight in lazy:
        if format == FILE:
            packed = lazy.packed(weight, twice)
            stored = "+".join(lazy.quants(weight))
            return Quantized(name, packed.kind, *in_graph(packed), None, weight.nbytes, stored=stored)
        lazy.fill(weight)
    rows = weight.t() if transposed else weight
    packed, rounding = pack_checked(rows, KIND[format], twice, name)
    return Quantized(name, packed.kind, *in_graph(packed), rounding, weight.nbytes)


def put_lookup(editor: Editor, node: Node, q: Node, scale: Node) -> list[Node]:
    value = tensor_of(node)
    args = (q, scale, node.args[1], int(value.shape[-1]), value.dtype)
    return put(editor, node, editor.call(ops.packed_embedding.default, args, before=node, like=node), q, scale)
