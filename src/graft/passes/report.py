"""The one record of what the pipeline did. Terminal, dumps, tests and artifacts read it; nothing parses log lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from torch.fx import Node

from graft.ir.nodes import module_path, where
from graft.ir.patterns.match import NearMiss
from graft.memory.alias_map import StateRecord
from graft.ops.ran import OpKernels

Status = Literal["applied", "no_match", "skipped", "disabled", "rolled_back"]


@dataclass(frozen=True)
class NumericCheck:
    """How far a replacement was from float64, and how far it may be, on the inputs where it came closest to that.

    trials: how many ways it was tried. uncovered: what was not tried, or said nothing, and why. origin: "from the
    cache" for the result of an earlier run, or why this one could not be kept; '' for one that was made now.
    """

    error: float
    limit: float
    inputs: str
    trials: int = 0
    uncovered: tuple[str, ...] = ()
    origin: str = ""

    @property
    def share(self) -> float:
        """How much of what is allowed was used."""
        return self.error / self.limit if self.limit else 0.0


@dataclass(frozen=True)
class MatchRecord:
    """One rewrite: where it was made, the nodes that it replaced and those that it made.

    successors: the replaced nodes that others read, each with the node that they read now. proved: what was proved of
    the rewrite without running it (passes/numeric/proofs.py), '' where nothing was.
    """

    anchor: str
    module: str
    replaced: tuple[str, ...]
    made: tuple[str, ...]
    pattern: str = ""
    numeric_check: NumericCheck | None = None
    note: str = ""  # what is worth knowing about this site
    successors: tuple[tuple[str, str], ...] = ()
    name: str = field(default="", kw_only=True)  # of the node in `anchor`
    proved: str = field(default="", kw_only=True)

    @staticmethod
    def at(
        node: Node,
        replaced: tuple[str, ...],
        made: tuple[str, ...],
        pattern: str = "",
        numeric_check: NumericCheck | None = None,
        note: str = "",
        successors: tuple[tuple[str, str], ...] = (),
    ) -> MatchRecord:
        return MatchRecord(
            where(node), module_path(node), replaced, made, pattern, numeric_check, note, successors, name=node.name
        )


def checks_text(matches: Iterable[MatchRecord]) -> str:
    """`5 checked numerically, worst 2.6e-07 of 1.3e-06 allowed (random inputs); 5 proved: …`; '' where none was."""
    matches = list(matches)
    checks = [match.numeric_check for match in matches if match.numeric_check is not None]
    if not checks:
        return proofs_text(matches)
    worst = max(checks, key=lambda check: check.share)
    share = f"worst {worst.error:.1e} of {worst.limit:.1e} allowed ({worst.inputs} inputs)"
    left = dict.fromkeys(text for check in checks for text in check.uncovered)
    origins = ", ".join(dict.fromkeys(check.origin for check in checks if check.origin))
    told = f"{len(checks)} checked numerically{f' ({origins})' if origins else ''}, {share}"
    told += f"; {proofs}" if (proofs := proofs_text(matches)) else ""
    return told + (f"; not covered: {'; '.join(left)}" if left else "")


def proofs_text(matches: Iterable[MatchRecord]) -> str:
    """`5 proved: the same operations in the same order`."""
    counts = Counter(match.proved for match in matches if match.proved)
    return "; ".join(f"{count} proved: {text}" for text, count in counts.items())


@dataclass(frozen=True)
class TransformRecord:
    """What became of one transform. `unchecked`: why its matches carry no numeric check, where one was asked for.
    `phases`: what its seconds went into, in order; what is left of them is the snapshot."""

    name: str
    stage: str
    status: Status
    matches: tuple[MatchRecord, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    unchecked: str = ""
    phases: tuple[tuple[str, float], ...] = ()

    @property
    def summary(self) -> str:
        """The `[SUMMARY]` line."""
        head = f"[stage={self.stage}, transform={self.name}] [SUMMARY]"
        if self.status == "disabled":
            return f"{head} disabled"
        if self.status in ("skipped", "rolled_back"):
            return f"{head} {self.status}: {self.reason}"
        why = f" ({self.reason})" if self.status == "no_match" else ""
        return f"{head} matches={len(self.matches)}{why} | time: {self.seconds:.3f}s"


@dataclass(frozen=True)
class Report:
    """What was captured, every transform's record by name, which kernel runs each op, and notes on fallbacks."""

    model: str = ""
    transforms: Mapping[str, TransformRecord] = field(default_factory=dict)
    kernels: Mapping[str, OpKernels] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    state: tuple[StateRecord, ...] = ()  # every input and buffer that the graph writes

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Report:
        data = json.loads(text)
        records = {name: read_record(entry) for name, entry in data["transforms"].items()}
        state = tuple(read_state(entry) for entry in data["state"])
        kernels = {op: OpKernels.read(entry) for op, entry in data["kernels"].items()}
        return Report(data["model"], records, kernels, tuple(data["notes"]), state)


def read_state(entry: dict[str, Any]) -> StateRecord:
    plain: dict[str, Any] = {**entry, "writes": tuple(entry["writes"])}
    return StateRecord(**plain)


def read_match(entry: dict[str, Any]) -> MatchRecord:
    check = read_check(entry["numeric_check"]) if entry["numeric_check"] else None
    replaced, made = tuple(entry["replaced"]), tuple(entry["made"])
    successors = tuple((old, new) for old, new in entry["successors"])
    plain = (entry["anchor"], entry["module"], replaced, made, entry["pattern"], check, entry["note"], successors)
    return MatchRecord(*plain, name=entry["name"], proved=entry["proved"])


def read_record(entry: dict[str, Any]) -> TransformRecord:
    matches = tuple(read_match(match) for match in entry["matches"])
    misses = tuple(NearMiss(**miss) for miss in entry["near_misses"])
    nested = ("matches", "near_misses", "phases")
    plain = {f.name: entry[f.name] for f in fields(TransformRecord) if f.name not in nested}
    phases = tuple((str(name), float(seconds)) for name, seconds in entry.get("phases", ()))
    return TransformRecord(**plain, matches=matches, near_misses=misses, phases=phases)


def read_check(entry: dict[str, Any]) -> NumericCheck:
    return NumericCheck(**(entry | {"uncovered": tuple(entry["uncovered"])}))
