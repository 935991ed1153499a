"""Dumps, reports, comparisons and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from graft.base.errors.base import GraftError, UsageError


class PeerNotRun(GraftError):
    """An engine that a benchmark leaves out: not there, or not for this model. Its row says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not run: {reason}")


class DumpError(GraftError):
    """A dump folder cannot be written or read."""


class StoryEnded(GraftError):
    """What is asked of a story was not reached: its run ended before."""


class ReportError(GraftError):
    """A report cannot be written, or a file that goes into it cannot be read."""


class RunMismatch(UsageError):
    def __init__(self, before: str, after: str) -> None:
        super().__init__(
            f"{before} and {after} cannot be compared strictly; dump the same model twice, or leave out --strict"
        )


class BaselineMismatch(UsageError):
    def __init__(self, folder: str, kept: str, checked: str) -> None:
        super().__init__(
            f"the baseline {folder} is a run of {kept}, but {checked} is checked; check that model"
            " (--model, --dtype), or save a baseline of this one (graft check --model MODEL --save-baseline DIR)"
        )


class ReproRefused(GraftError):
    """A match that no file of its own can show; the message says why."""


class ExportRefused(GraftError):
    """A graph that a format cannot hold; the message says what would be lost."""


class SkillError(GraftError):
    """A skill that cannot be read, or that is not there."""


class SkillsDiffer(UsageError):
    def __init__(self, folder: object, files: Sequence[str]) -> None:
        super().__init__(
            f"{folder} has other files where skills go: {', '.join(files)}; nothing was written."
            " Install into another folder, or replace them with --force"
        )
