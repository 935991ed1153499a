"""Lines from a terminal with arrow keys and a history, where Python has readline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

HISTORY_LINES = 1000


def can_edit() -> bool:
    """Both ends are a terminal: `input` shows its prompt, and edits, only there."""
    return sys.stdin.isatty() and sys.stdout.isatty() and find_spec("readline") is not None


@contextmanager
def history(path: Path) -> Iterator[None]:
    """The lines of earlier conversations; those of this one are kept for the next. Only the user may read them."""
    import readline

    readline.set_history_length(HISTORY_LINES)
    try:
        if path.exists():
            readline.read_history_file(path)
    except OSError as error:
        print(f"graft: the history {path} cannot be read: {error}", file=sys.stderr)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
        except OSError as error:
            print(f"graft: the history {path} cannot be written: {error}", file=sys.stderr)


def edited_lines(prompt: str) -> Iterator[bytes]:
    """Until Ctrl-D, or Ctrl-C at the prompt."""
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line.encode(errors="surrogateescape") + b"\n"
