"""What became of every candidate, in a file beside the package: a run that was interrupted goes on from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from graft.base.errors import UsageError
from graft.base.files import write_whole
from graft.workbench.autofuse.timing import ShapeTimes

FILE, FORMAT = "autofuse.json", 1
Status = Literal["kept", "no gain", "wrong", "failed", "refused", "deferred", "not tried"]
KernelPath = Literal["existing_kernel_path", "triton_fallback_path", ""]


@dataclass(frozen=True)
class CandidateOutcome:
    """One candidate. predicted: µs at each count of tokens, by the model of `graft discover`; share: of that step.

    over: the candidate that it takes a GEMM with. kernels: what was written (native, triton). seconds: what trying it
    took.
    """

    id: str
    title: str
    kind: str
    count: int
    predicted_us: tuple[float, ...]
    predicted_share: tuple[float, ...]
    status: Status
    reason: str
    transform: str = ""
    path: KernelPath = ""
    kernels: tuple[str, ...] = ()
    times: tuple[ShapeTimes, ...] = ()
    checks: tuple[dict[str, str], ...] = ()
    seconds: float = 0.0
    over: str = ""

    @property
    def decided(self) -> bool:
        """Whether a later run need not look at it again."""
        return self.status not in ("not tried", "deferred")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"times": [one.to_dict() for one in self.times]}


@dataclass(frozen=True)
class Ledger:
    kind: dict[str, Any]
    outcomes: tuple[CandidateOutcome, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # of the machine

    def find(self, name: str) -> CandidateOutcome | None:
        return next((one for one in self.outcomes if one.id == name), None)

    def having(self, outcome: CandidateOutcome) -> Ledger:
        """With one outcome more, or in place of an earlier one of the same candidate."""
        if self.find(outcome.id) is None:
            return replace(self, outcomes=(*self.outcomes, outcome))
        return replace(self, outcomes=tuple(outcome if one.id == outcome.id else one for one in self.outcomes))

    @property
    def kept(self) -> tuple[CandidateOutcome, ...]:
        return tuple(one for one in self.outcomes if one.status == "kept")

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "request": self.kind,
            "facts": self.facts,
            "candidates": [one.to_dict() for one in self.outcomes],
        }

    def save(self, package: Path) -> None:
        write_whole(package / FILE, json.dumps(self.to_dict(), indent=1) + "\n")


def open_ledger(package: Path, kind: dict[str, Any]) -> Ledger:
    """The one that is there, if it is of the same request; a new one where there is none."""
    file = package / FILE
    if not file.is_file():
        if package.exists() and (not package.is_dir() or any(package.iterdir())):
            raise UsageError(f"{package} is there already and was not made by graft autofuse; name another folder")
        return Ledger(kind)
    try:
        data = json.loads(file.read_text())
        known, outcomes = data["request"], tuple(map(outcome_of, data["candidates"]))
        version = data["format"]
        if not isinstance(known, dict):
            raise TypeError("it holds no request")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} cannot be read ({error}); delete the folder to begin anew") from error
    if version != FORMAT:
        raise UsageError(f"{file} is of format {version}, not {FORMAT}; delete the folder to begin anew")
    changed = [name for name in kind if known.get(name) != json.loads(json.dumps(kind[name]))]
    if changed:
        name = changed[0]
        raise UsageError(
            f"{package} is of a run with {name} = {known.get(name)!r}, not {kind[name]!r}; go on as it was begun, or"
            " name another folder with -o"
        )
    return Ledger(kind, outcomes, data.get("facts", {}))


MACHINE = ("device_name", "cores", "torch", "triton", "graft")  # what a time depends on


def on_machine(ledger: Ledger, package: Path, facts: dict[str, Any]) -> Ledger:
    """The ledger of a run that begins or goes on here. One that was measured on another machine is refused: its times
    and what was kept by them are of that one."""
    known = ledger.facts
    for name in MACHINE if ledger.outcomes else ():
        if name in known and known[name] != facts.get(name):
            raise UsageError(
                f"{package} was measured with {name} = {known[name]!r}, and here it is {facts.get(name)!r}: go on"
                " there, or name another folder with -o"
            )
    return ledger if ledger.outcomes and known else replace(ledger, facts=facts)


def outcome_of(data: dict[str, Any]) -> CandidateOutcome:
    given: dict[str, Any] = {**data, "times": [ShapeTimes.of(one) for one in data["times"]]}
    lists: dict[str, Any] = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return CandidateOutcome(**(given | lists))
