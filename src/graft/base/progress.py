"""What a long call is doing, for whoever watches it: words for a person, and the phase that they belong to."""

from __future__ import annotations

CAPTURE = "capture"
TRANSFORMS = "transforms"
LOWERING = "lowering, cache"


class Doing(str):
    """The words of a progress report, with the phase as a field: `progress(Doing("…", CAPTURE), done, total)`."""

    __slots__ = ("phase",)
    phase: str

    def __new__(cls, words: str, phase: str) -> Doing:
        made = super().__new__(cls, words)
        made.phase = phase
        return made


def phase_of(what: str) -> str:
    """The phase of a report; one that names none is a phase by itself."""
    return what.phase if isinstance(what, Doing) else what
