"""What `graft autofuse` is asked to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.base.errors import UsageError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class AutofuseRequest:
    """budget: seconds of the whole run; None where `steps` says how many candidates are tried.

    limit: seconds of one candidate. own: write a kernel where one exists, too. gain: the share of a step that a
    fusion must bring. prompt, new, repeats: what is measured.
    """

    model: str
    package: Path
    budget: float | None = 600.0
    steps: int | None = None
    device: str = "auto"
    backend: str = "auto"
    dtype: str = "auto"
    config: str | None = None
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    own: bool = False
    gain: float = 0.02
    limit: float = 600.0
    prompt: int = 128
    new: int = 16
    repeats: int = 7
    trust_remote_code: bool = False

    def kind(self) -> dict[str, Any]:
        """What an interrupted run must share with the one that goes on from it."""
        names = ("model", "device", "backend", "dtype", "config", "sets", "plugins", "own", "gain", "prompt", "new")
        found = {name: getattr(self, name) for name in names}
        return found | {"sets": list(self.sets), "plugins": list(self.plugins)}


def check_request(request: AutofuseRequest) -> None:
    for name, value in (("steps", request.steps), ("repeats", request.repeats), ("prompt", request.prompt)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, but is {value}")
    if request.repeats < 3:
        raise UsageError(f"--repeats {request.repeats}: noise cannot be told from fewer than 3 repeats")
    if not 0 < request.gain < 1:
        raise UsageError(f"--gain {request.gain}: a share of a step, as 0.02")
    if not request.limit > 0:
        raise UsageError(f"--limit must be more than 0 seconds, but is {request.limit:g}")


def read_budget(text: str) -> float:
    """`90`, `90s`, `10m`, `1.5h` → seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    seconds = float(found[1]) * UNITS[found[2] or "s"] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"--budget {text}: write seconds, minutes or hours, more than none: 90s, 10m, 1h")
    return seconds
