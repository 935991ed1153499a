"""What every error is: told without a traceback, with an exit code, and with near names for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraftError(Exception):
    """Base of every error that graft raises on purpose; the command line prints it without a traceback."""

    exit_code = 1


class UsageError(GraftError):
    """The request itself is wrong: an unknown name, key or option."""

    exit_code = 2


MOST_TOLD, FEW_TOLD = 100, 8  # names of a list


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'? Known: …` for an unknown name. Of hundreds not all are told."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    told = names if len(names) <= MOST_TOLD else [*names[:FEW_TOLD], f"… ({len(names)} in all)"]
    return f"{hint or '.'} Known: {', '.join(told) or 'none'}."
