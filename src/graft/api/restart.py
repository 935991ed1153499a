"""State that begins anew by itself: an input says that a sequence begins.

    graft.compile(decoder, …, restart={"position": 0})            before a call whose positions start at 0
    graft.compile(decoder, …, restart={"sequence": "changed"})    before a call with another value than the last one
    graft.compile(decoder, …, restart="auto")                     the input is found, and the report names it

What happens then is `CompiledModule.reset`: every buffer that the program writes gets the value that it had when the
module was compiled. Without `restart` a compiled module does what eager does, and nobody begins but the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graft.base.errors import UsageError, near
from graft.ir.program.signature import Leaf

AUTO, CHANGED = "auto", "changed"
SEQUENCES = ("sequence", "sequence_id", "seq_id", "session", "session_id", "request_id")
INTEGERS = ("int", "uint", "bool")  # how names of dtypes begin
MISSING = object()


@dataclass
class Restart:
    """When state begins anew, and what the input was at the last call."""

    name: str
    when: int | str  # 0 or CHANGED
    last: Any = MISSING
    found: bool = False  # by graft, not named by the caller

    def due(self, names: Sequence[str], values: Sequence[Any]) -> bool:
        """Whether a call with these inputs begins a sequence; the first call goes on with what there is."""
        value = values[names.index(self.name)]
        if self.when == CHANGED:
            return self.last is not MISSING and as_numbers(value) != self.last
        return starts_at_zero(self.name, value)

    def note(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """A call with these inputs was made."""
        if self.when == CHANGED:
            self.last = as_numbers(values[names.index(self.name)])

    def to_data(self) -> dict[str, Any]:
        known = {} if self.last is MISSING else {"last": self.last}
        return {"name": self.name, "when": self.when, **known}

    @staticmethod
    def from_data(data: Mapping[str, Any] | None) -> Restart | None:
        return Restart(data["name"], data["when"], data.get("last", MISSING)) if data else None


def restart_of(
    asked: Mapping[str, int | str] | str | None, leaves: Sequence[Leaf], positions: Sequence[str] = ()
) -> Restart | None:
    """What `restart` asks for, for a module with these inputs. positions: those by which its buffers are written."""
    if not asked:
        return None
    if asked == AUTO:
        return found_restart(leaves, positions)
    if not isinstance(asked, Mapping) or len(asked) != 1:
        raise UsageError(
            f"restart names one input, as {{'position': 0}} or {{'id': 'changed'}}, or is 'auto'; it is {asked!r}"
        )
    ((name, when),) = asked.items()
    leaf = next((leaf for leaf in leaves if leaf.name == name), None)
    if leaf is None:
        raise UsageError(f"restart: no input is named {name!r}{near(str(name), [leaf.name for leaf in leaves])}")
    if isinstance(when, bool) or when not in (0, CHANGED):
        raise UsageError(f"restart.{name} is 0 (where its positions start) or {CHANGED!r}, not {when!r}")
    if not is_whole(leaf):
        raise UsageError(f"restart: {name} must be integers, but is {leaf.text()}")
    return Restart(name, when)


def is_whole(leaf: Leaf) -> bool:
    return leaf.dtype.startswith(INTEGERS) if leaf.dtype else leaf.symbolic or isinstance(leaf.value, int)


def candidates(leaves: Sequence[Leaf], positions: Sequence[str]) -> tuple[list[str], int | str]:
    """The inputs that say where buffers are written, else those that are named like a sequence."""
    whole = [leaf.name for leaf in leaves if is_whole(leaf)]
    where = [name for name in whole if name in positions]
    return (where, 0) if where else ([name for name in whole if name.rpartition(".")[2] in SEQUENCES], CHANGED)


def found_restart(leaves: Sequence[Leaf], positions: Sequence[str]) -> Restart:
    names, when = candidates(leaves, positions)
    if len(names) == 1:
        return Restart(names[0], when, found=True)
    if names:
        raise UsageError(f"restart='auto' found {' and '.join(names)}; name one: restart={{{names[0]!r}: {when!r}}}")
    raise UsageError(
        "restart='auto' found no input that says where buffers are written, and none that is named like a sequence"
        f" ({', '.join(SEQUENCES)}); name one: restart={{'INPUT': 0}} or {{'INPUT': 'changed'}}"
    )


def unasked_notes(leaves: Sequence[Leaf], positions: Sequence[str]) -> list[str]:
    """For a module that writes buffers and was compiled without `restart`: an input that could begin them anew."""
    names, when = candidates(leaves, positions)
    if len(names) != 1:
        return []
    begins = "starts at 0" if when == 0 else "changes"
    return [
        f"state: buffers go on from call to call as in eager, also where {names[0]} {begins}; restart='auto' begins"
        " them anew there"
    ]


def restart_notes(restart: Restart | None, leaves: Sequence[Leaf], written: int) -> list[str]:
    if restart is None:
        return []
    device, notes = next(leaf.device for leaf in leaves if leaf.name == restart.name), []
    if restart.found:
        begins = "starts at 0" if restart.when == 0 else "is another one than at the last call"
        notes.append(f"restart: the program's state begins anew before a call whose {restart.name} {begins}")
    if not written:
        notes.append("restart has nothing to do: the program writes no buffer of its own")
    if device not in (None, "cpu"):
        notes.append(f"restart reads {restart.name} at every call, which waits for {device}")
    return notes


def as_numbers(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def starts_at_zero(name: str, value: Any) -> bool:
    """The first position of a call, of every row where there are rows."""
    if not isinstance(value, torch.Tensor):
        return value == 0
    if value.numel() == 0:
        return False
    first = value.reshape(-1, value.shape[-1])[:, 0] if value.dim() > 1 else value.reshape(-1)[:1]
    zero = [number == 0 for number in first.tolist()]
    if any(zero) != all(zero):
        raise UsageError(
            f"some rows of {name} start at 0 and others do not, and state begins anew for all rows at once; call"
            " reset() and leave restart away"
        )
    return all(zero)
