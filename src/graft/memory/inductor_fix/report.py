"""What the functionalization fix did to one graph, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from graft.ir.nodes import static_int, tensor_val


@dataclass(frozen=True)
class KeptCopy:
    """A copy that the graph needs: without it `node` would read or return something else."""

    node: str  # the mutating call
    op: str
    value: str  # what is copied
    reason: str
    bytes: int | str = 0  # an expression where sizes are symbols

    @property
    def size(self) -> str:
        return f"{self.bytes:,} bytes" if isinstance(self.bytes, int) else f"{self.bytes} bytes"

    @staticmethod
    def of(node: str, op: str, value: Node, reason: str) -> KeptCopy:
        """Of `value`, as it is recorded in the graph."""
        tensor = tensor_val(value)
        size = tensor.numel() * tensor.itemsize if tensor is not None else 0
        return KeptCopy(
            node, op, value.name, reason, number if (number := static_int(size)) is not None else str(size)
        )


@dataclass(frozen=True)
class RestoredCall:
    """A functional call that writes in place again, where it stands in the model, and the node that does so."""

    node: str
    op: str
    anchor: str
    module: str
    made: str


@dataclass(frozen=True)
class MovedRead:
    """A read of the old value that now stands above the write."""

    reader: str
    above: str


@dataclass(frozen=True)
class FunctionalizationReport:
    """Names are those of the graph that the pass was given."""

    restored: tuple[str, ...] = ()  # functional calls that are mutating calls again
    kept: tuple[KeptCopy, ...] = ()
    protected: tuple[KeptCopy, ...] = ()  # returned values that are copied, because their memory is written later
    moved: tuple[MovedRead, ...] = ()
    left: tuple[tuple[str, str], ...] = ()  # calls left to Inductor, with the reason
    calls: tuple[RestoredCall, ...] = ()  # those of `restored`

    def lines(self) -> list[str]:
        """One for each thing done."""
        lines = [f"%{name}: writes in place" for name in self.restored]
        lines += [f"%{move.reader}: moved above %{move.above}, which overwrites what it reads" for move in self.moved]
        lines += [f"%{c.node} ({c.op}): copies %{c.value}: {c.reason}" for c in self.kept]
        lines += [f"%{c.value}: returned as a copy: {c.reason}" for c in self.protected]
        lines += [f"%{name}: left to Inductor: {reason}" for name, reason in self.left]
        return lines

    def text(self) -> str:
        return "\n".join(self.lines()) or "nothing writes in place"
