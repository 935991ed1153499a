"""What the report says of an op: the kernel that runs it, and why not those before it in its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Skipped = tuple[tuple[str, str], ...]  # kernel and reason


@dataclass(frozen=True)
class Ran:
    """kernels: the one that runs, or those among which every call chooses by its sizes."""

    kernels: tuple[str, ...]
    kind: str = ""
    skipped: Skipped = ()
    note: str = ""
    sites: int = 1  # of the graph

    def __str__(self) -> str:
        """`aten (existing)`, `reference (not triton: Triton kernels run on a GPU…)`, `by call: split_kv, triton`."""
        name = self.kernels[0]
        if len(self.kernels) > 1:
            name = f"by call{', ' * bool(self.note)}{self.note}: {', '.join(self.kernels)}"
        notes = [self.kind] if self.kind not in ("", name) else []
        notes += [self.note] if self.note and len(self.kernels) == 1 else []
        notes += [reasons_text(self.skipped)] if self.skipped else []
        return f"{name} ({'; '.join(notes)})" if notes else name


@dataclass(frozen=True)
class OpKernels:
    """What runs an op at the sites of a graph, as text or by field."""

    ran: tuple[Ran, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of every kernel that runs, or may run, in some site."""
        return tuple(dict.fromkeys(name for one in self.ran for name in one.kernels))

    def __str__(self) -> str:
        if len(self.ran) == 1:
            return str(self.ran[0])
        return "; ".join(f"at {one.sites} site{'s' * (one.sites > 1)} {one}" for one in self.ran)

    @staticmethod
    def read(data: Mapping[str, Any]) -> OpKernels:
        """From JSON."""
        return OpKernels(tuple(read_ran(entry) for entry in data["ran"]))


def read_ran(entry: Mapping[str, Any]) -> Ran:
    skipped = tuple((str(name), str(reason)) for name, reason in entry["skipped"])
    return Ran(tuple(entry["kernels"]), entry["kind"], skipped, entry["note"], entry["sites"])


def reasons_text(skipped: Iterable[tuple[str, str]]) -> str:
    """`not triton, steps: Triton kernels run on a GPU…; not native: …`: kernels with one reason together."""
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped:
        reasons.setdefault(reason, []).append(name)
    return "; ".join(f"not {', '.join(names)}: {reason}" for reason, names in reasons.items())


def gathered(found: Iterable[tuple[str, Ran]]) -> dict[str, OpKernels]:
    """By op, in the order of the graph; equal ones are counted."""
    by_op: dict[str, dict[Ran, int]] = {}
    for op, ran in found:
        counts = by_op.setdefault(op, {})
        counts[ran] = counts.get(ran, 0) + 1
    return {op: OpKernels(tuple(replace(r, sites=n) for r, n in counts.items())) for op, counts in by_op.items()}
