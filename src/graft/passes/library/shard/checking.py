"""The numeric check of a part: all ranks run their parts as threads, and together must give what was replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.fx import GraphModule, Node

from graft.ir.edit import second_module
from graft.ir.evaluate import Inputs, Subprogram
from graft.ir.verify import GraphSnapshot
from graft.ops.ranks import run_as_ranks
from graft.passes.numeric.kinds import kind_of
from graft.passes.numeric.sides import Sides
from graft.passes.numeric_check import PairTrials
from graft.passes.report import MatchRecord, NumericCheck

Apply = Callable[[GraphModule], Sequence[MatchRecord]]  # the transform for another rank, on a copy of the graph


@dataclass(frozen=True)
class ByName:
    """The inputs of one rank for another, whose graph is a copy: its nodes have the same names."""

    inputs: Inputs
    nodes: Mapping[str, Node]

    def at(self, node: Node) -> Any:
        return self.inputs.at(self.nodes[node.name])

    def state(self, tensor: Any) -> Any:
        return self.inputs.state(tensor)


@dataclass(frozen=True)
class AllRanks(Subprogram):
    """What one rank computes, run beside the others. pieces: of every rank; own: which of them this is."""

    pieces: tuple[Subprogram, ...] = field(default=())
    own: int = 0

    def run(self, inputs: Inputs, call: Callable[..., Any]) -> list[Any]:
        shared = {node.name: node for node in self.shared()}
        for node in shared.values():
            inputs.at(node)  # made up once, before several threads ask for it
        given = [inputs if rank == self.own else ByName(inputs, shared) for rank in range(len(self.pieces))]
        results = run_as_ranks([partial(Subprogram.run, p, i, call) for p, i in zip(self.pieces, given, strict=True)])
        return results[self.own]


@dataclass(frozen=True)
class Rolled:
    """The inputs of another rank, whose part of a sum has its values in other places."""

    inputs: Inputs
    rank: int
    part: Node

    def at(self, node: Node) -> Any:
        value = self.inputs.at(node)
        return value.roll(self.rank, -1) if node is self.part else value

    def state(self, tensor: Any) -> Any:
        return self.inputs.state(tensor)


@dataclass(frozen=True)
class WithParts(Subprogram):
    """What every rank computes alike, each from its own part of the sum."""

    part: Node = field(kw_only=True)
    world: int = field(kw_only=True)

    def run(self, inputs: Inputs, call: Callable[..., Any]) -> list[Any]:
        for node in self.shared():
            inputs.at(node)  # made up once, before several threads ask for it
        given = [Rolled(inputs, rank, self.part) for rank in range(self.world)]
        return run_as_ranks([partial(Subprogram.run, self, one, call) for one in given])[0]


def part_of_sum(piece: Subprogram, exchange: Any) -> tuple[Node, int]:
    """What a match adds up over the ranks, which it begins at, and how many these are."""
    call = next(call for node in piece.program if (call := piece.calls[node]).target is exchange)
    part = piece.boundary(call.args[0])
    assert part is not None
    return part, call.args[1]


def check_ranks(
    gm: GraphModule,
    before: GraphSnapshot,
    records: Sequence[MatchRecord],
    most: int | None,
    others: Mapping[int, Apply],
    rank: int,
) -> tuple[MatchRecord, ...]:
    """The records with the check of each; NumericCheckError for the first that gives something else. others: what
    makes the part of every other rank."""
    sides, parts = Sides.of(gm, before, records), {}
    sides.check_rewiring()
    for other, apply in others.items():
        copy = second_module(gm)
        before.restore(copy)
        snapshot = GraphSnapshot.take(copy)
        found = apply(copy)
        parts[other] = Sides.of(copy, snapshot, found), {record.name: record for record in found}

    def pair(record: MatchRecord) -> tuple[Subprogram, Subprogram]:
        old, new = sides.pieces(record)
        pieces = {other: side.pieces(by_name[record.name])[1] for other, (side, by_name) in parts.items()}
        pieces[rank] = new
        every = tuple(pieces[index] for index in sorted(pieces))
        return old, AllRanks(new.outputs, new.calls, new.attributes, new.boundary, new.writes, every, rank)

    return check_pairs(records, pair, most)


def check_exchanges(
    gm: GraphModule, before: GraphSnapshot, records: Sequence[MatchRecord], most: int | None, exchange: Any
) -> tuple[MatchRecord, ...]:
    """The same for a transform that replaces an exchange, so that what was there needs all ranks as well. Each has
    another part of what `exchange` adds up."""
    sides = Sides.of(gm, before, records)
    sides.check_rewiring()

    def pair(record: MatchRecord) -> tuple[Subprogram, Subprogram]:
        pieces = sides.pieces(record)
        part, world = part_of_sum(pieces[0], exchange)
        old, new = (
            WithParts(p.outputs, p.calls, p.attributes, p.boundary, p.writes, part=part, world=world) for p in pieces
        )
        return old, new

    return check_pairs(records, pair, most)


def check_pairs(
    records: Sequence[MatchRecord], pair: Callable[[MatchRecord], tuple[Subprogram, Subprogram]], most: int | None
) -> tuple[MatchRecord, ...]:
    """What was replaced and what replaced it, run once where a match of that kind was tried before."""
    known: dict[str, NumericCheck] = {}
    checked = []
    for record in records:
        old, new = pair(record)
        kind, trials = kind_of(old, new), PairTrials(old, new, record.anchor, most)
        if kind in known:
            trials.once()
        else:
            known[kind] = trials.all()
        checked.append(replace(record, numeric_check=known[kind]))
    return tuple(checked)
