"""The numeric proof of each match: what was replaced and what replaced it, run side by side.

Both run on the same made-up inputs of the recorded shapes and dtypes: random, small, zeros, large, subnormal. What
was replaced also runs in float64. The replacement may be as far from float64 as its dtype and the longest reduction
allow, or twice as far as the original was, whichever is more. A match that fails takes its whole transform back.

Matches are independent: a value that another match replaced is an input here, the same on both sides. Every change of
the graph is covered; a node that reads something else without a match to account for it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from graft.base.errors import ProofError
from graft.ir.canonical.normal_form import is_random
from graft.ir.edit import attribute
from graft.ir.effects import alias_sources
from graft.ir.evaluate import INPUT_KINDS, Inputs, RecordedCall, Subprogram
from graft.ir.nodes import OpOverload, leaves, tensor_val, val, where
from graft.ir.verify import GraphSnapshot
from graft.ops import OPS
from graft.ops.cases import UNIT, tolerance
from graft.passes.report import MatchRecord, Proof


def prove_matches(gm: GraphModule, before: GraphSnapshot, records: Sequence[MatchRecord]) -> tuple[MatchRecord, ...]:
    """The records with the proof of each; the first replacement that computes something else is a ProofError.

    A transform that changes numbers on purpose brings its own proof, of what it may change.
    """
    sides = Sides.of(gm, before, records)
    sides.check_rewiring()
    return tuple(record if record.proof else replace(record, proof=prove(sides, record)) for record in records)


@dataclass(frozen=True)
class Sides:
    """The graph before and after, and which node took the place of which."""

    gm: GraphModule
    state: Mapping[str, torch.Tensor]
    old: Mapping[Node, RecordedCall]
    new: Mapping[Node, RecordedCall]
    successors: Mapping[Node, Node]  # old node → what its readers read now
    owners: Mapping[Node, MatchRecord]  # old node with a successor → the match that replaced it
    # computed on both sides: what follows from sizes alone (a made-up arange would be no arange), and views (two of
    # one value, each made up for itself, would be strangers)
    computed: Set[Node]

    @staticmethod
    def of(gm: GraphModule, before: GraphSnapshot, records: Sequence[MatchRecord]) -> Sides:
        old = {
            node: RecordedCall(op, target, args, kwargs, i)
            for i, (node, _, op, target, args, kwargs, _) in enumerate(before.nodes)
        }
        new = {
            node: RecordedCall(node.op, node.target, node.args, node.kwargs, i)
            for i, node in enumerate(gm.graph.nodes)
        }
        names, present = {node.name: node for node in old}, {node.name: node for node in new}
        step = dict(pair for record in records for pair in record.successors)
        successors, owners = {}, {}
        for record in records:
            for name, _ in record.successors:
                last = name
                while last in step:
                    last = step[last]
                if name in names and last in present:
                    if name not in record.replaced:
                        raise ProofError(f"{where(names[name])} was replaced by %{last}, but no match says so")
                    successors[names[name]] = present[last]
                    owners[names[name]] = record
        computed = {node for graph in (old, new) for node in (*fixed_values(graph), *views(graph))}
        return Sides(gm, before.state, old, new, successors, owners, computed)

    def check_rewiring(self) -> None:
        """Nodes that are in both graphs call what they called, on what took the place of what they read."""
        for node in self.old.keys() & self.new.keys():
            was, now = self.old[node], self.new[node]
            expected = [map_arg(given, lambda n: self.successors.get(n, n)) for given in (was.args, was.kwargs)]
            if was.target is not now.target or expected != [now.args, now.kwargs]:
                raise ProofError(
                    f"{where(node)} was changed although no match replaced it, so nothing proves it right"
                )

    def pieces(self, record: MatchRecord) -> tuple[Subprogram, Subprogram]:
        """The nodes that a match replaced, and those that took their place, cut at nodes that both graphs share."""
        inside = {*record.replaced, *(node.name for node in self.computed)}
        outputs = [node for node, owner in self.owners.items() if owner is record]
        others = {new for old, new in self.successors.items() if self.owners[old] is not record}

        def old_boundary(node: Node) -> Node | None:
            if node.name in inside:
                return None
            return self.successors.get(node) or (node if node in self.new and is_value(node) else None)

        def new_boundary(node: Node) -> Node | None:
            kept = node in self.old and node.name not in inside and is_value(node)
            return node if kept or node in others else None

        old = Subprogram(tuple(outputs), self.old, self.state.__getitem__, old_boundary)
        successors = tuple(self.successors[node] for node in outputs)
        return old, Subprogram(successors, self.new, partial(attribute, self.gm), new_boundary)


def fixed_values(graph: Mapping[Node, RecordedCall]) -> set[Node]:
    """The tensors that a graph makes from numbers and sizes alone: masks, positions, angles."""
    fixed: set[Node] = set()
    for node, made in graph.items():
        sources = [leaf for leaf in leaves((made.args, made.kwargs)) if isinstance(leaf, Node)]
        settled = all(source in fixed or isinstance(val(source), (int, torch.SymInt)) for source in sources)
        if made.op == "call_function" and settled and tensor_val(node) is not None and not is_random(node):
            fixed.add(node)
    return fixed


def views(graph: Mapping[Node, RecordedCall]) -> set[Node]:
    return {node for node, made in graph.items() if made.op == "call_function" and alias_sources(node)}


def is_value(node: Node) -> bool:
    """Attributes are read from the module on each side; everything else can be an input of a proof."""
    return node.op != "get_attr"


def prove(sides: Sides, record: MatchRecord) -> Proof:
    """The worst of all kinds of inputs."""
    old, new = sides.pieces(record)
    if not old.outputs:
        raise ProofError(f"the match at {record.anchor} replaced nothing that the graph reads")
    return max((compare(old, new, kind, record.anchor) for kind in INPUT_KINDS), key=lambda proof: proof.share)


def compare(old: Subprogram, new: Subprogram, kind: str, anchor: str) -> Proof:
    inputs, lengths = Inputs(kind), Lengths()
    with torch.no_grad():
        exact = old.run(inputs, in_float64, widened)
        was = old.run(inputs, lengths.call, unchanged)
        now = new.run(inputs, on_cpu, unchanged)
    proofs = [Proof(0.0, 0.0, kind)]  # of no tensor at all
    for reference, before, after in zip(exact, was, now, strict=True):
        for right, first, second in zip(tensors(reference), tensors(before), tensors(after), strict=True):
            error, limit = errors(right, first, second, lengths)
            if not error <= limit:
                raise ProofError(
                    f"the replacement at {anchor} is off by {error:.2e} on {kind} inputs, where {limit:.2e} is"
                    f" allowed ({first.dtype}, reductions of {lengths.longest})"
                )
            proofs.append(Proof(error, limit, kind))
    return max(reversed(proofs), key=lambda proof: proof.share)


def errors(right: torch.Tensor, before: torch.Tensor, after: torch.Tensor, lengths: Lengths) -> tuple[float, float]:
    """Error of the replacement and what it may be, relative to the largest exact value."""
    if before.shape != after.shape or before.dtype != after.dtype:
        raise ProofError(f"the replacement gives {after.dtype} {tuple(after.shape)}, not {before.dtype}")
    if not before.is_floating_point() and not before.is_complex():
        return float((before != after).any()), 0.0
    first, second = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (before, after))
    right = right.to(first.dtype)
    counts = torch.isfinite(first)
    # where the original overflowed, the replacement may do the same or be right
    fits = (first == second) | (first.isnan() & second.isnan()) | near(second, right)
    if not bool(fits[~counts].all()):
        return float("inf"), 0.0
    right, first, second = right[counts], first[counts], second[counts]
    finite = torch.isfinite(right)
    scale = right[finite].abs().max().item() if finite.any() else 0.0
    tiny = torch.finfo(before.dtype).tiny
    own = largest((first - right)[finite])
    error = largest((second - right)[finite])
    limit = max(tolerance(lengths.coarsest, lengths.longest) * scale, 2 * own) + tiny
    unit = scale or 1.0
    return error / unit, limit / unit


def near(value: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (value - right).abs() <= 1e-2 * right.abs()


def largest(difference: torch.Tensor) -> float:
    """The largest magnitude; not a number counts as infinitely far."""
    return difference.abs().nan_to_num(nan=float("inf")).max().item() if difference.numel() else 0.0


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


# ── how a piece runs ────────────────────────────────────────────────────────────────────────────────────────────


class Lengths:
    """Runs a piece as it is and notes what its tolerance depends on: the longest reduction, the coarsest dtype."""

    def __init__(self) -> None:
        self.longest = 1
        self.coarsest = torch.float64

    def call(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = on_cpu(target, args, kwargs)
        given = [t for t in tensors([*args, *kwargs.values()]) if t.dim()]
        for made in tensors(result):
            shrunk = max((t.numel() // max(made.numel(), 1) for t in given), default=1)
            self.longest = max(self.longest, shrunk, *(t.shape[-1] for t in given))
            if made.dtype in UNIT and UNIT[made.dtype] > UNIT[self.coarsest]:
                self.coarsest = made.dtype
        return result


def on_cpu(target: Any, args: Any, kwargs: Any) -> Any:
    """Calls an op; what was recorded for the meta device is made on the CPU.

    A graph captured for another device may call what the CPU lacks for whole numbers (histc): floats stand in.
    """
    args, kwargs = map_aggregate(args, off_meta), map_aggregate(kwargs, off_meta)
    try:
        return target(*args, **kwargs)
    except NotImplementedError:
        whole = next((t.dtype for t in tensors(list(args)) if not t.is_floating_point()), None)
        if whole is None:
            raise
        return target(*map_aggregate(args, as_float64), **kwargs).to(whole)


def as_float64(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else value


def off_meta(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def in_float64(target: Any, args: Any, kwargs: Any) -> Any:
    """Calls an op with every floating dtype as float64; graft's ops run as their references."""
    if isinstance(target, OpOverload) and target.namespace == "graft":
        target = OPS[target._schema.name.removeprefix("graft::")].reference
    try:
        with Float64():
            return on_cpu(target, map_aggregate(args, wide), map_aggregate(kwargs, wide))
    except RuntimeError:  # no float64 kernel (_grouped_mm): float32 is as exact as it gets
        return map_aggregate(on_cpu(target, map_aggregate(args, single), kwargs), widened)


def single(value: Any) -> Any:
    wide_tensor = isinstance(value, torch.Tensor) and value.dtype is torch.float64
    return value.to(torch.float32) if wide_tensor else value


class Float64(TorchFunctionMode):
    """Whatever floating dtype torch is asked for, it gives float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NARROWING:
            return args[0].double()
        return func(*map_aggregate(tuple(args), wide), **map_aggregate(dict(kwargs or {}), wide))


NARROWING = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def wide(value: Any) -> Any:
    narrow = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if narrow else value


def widened(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.float64) if floating else value


def unchanged(value: Any) -> Any:
    return value
