"""Kernel times for a report: what `graft bench --kernels --json` printed, from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from graft.base.errors import ReportError
from graft.bench.kernels.kernel_times import KernelTime, StepTimes

KERNELS = "kernels.json"  # where a run folder has its own


@dataclass(frozen=True)
class KernelFile:
    file: str
    setup: dict[str, Any]
    steps: tuple[StepTimes, ...]


def find_kernels(run: Path, given: Path | None) -> KernelFile | None:
    """The file that was named, else the one in the run folder, else None."""
    file = given or run / KERNELS
    return read_kernels(file) if given is not None or file.is_file() else None


def read_kernels(file: Path) -> KernelFile:
    hint = "graft bench MODEL --kernels --json > FILE writes one"
    try:
        data = json.loads(file.read_text())
        steps = tuple(read_step(entry) for entry in data["steps"])
        return KernelFile(str(file), dict(data["setup"]), steps)
    except OSError as error:
        raise ReportError(f"cannot read {file}: {error.strerror or error}; {hint}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{file} has no kernel times ({type(error).__name__}: {error}); {hint}") from error


def read_step(entry: dict[str, Any]) -> StepTimes:
    rows = tuple(KernelTime(**{f.name: row[f.name] for f in fields(KernelTime)}) for row in entry["rows"])
    step = StepTimes(**{f.name: entry[f.name] for f in fields(StepTimes) if f.name != "rows"}, rows=rows)
    numbers = (step.wall_us, step.busy_us, step.gap_us, step.calls, *(n for r in rows for n in (r.us, r.percent)))
    if not all(isinstance(number, (int, float)) for number in numbers):
        raise TypeError("a time is not a number")
    return step
