"""Nothing is silent for more than two seconds: importing torch takes longer, and comes before any progress bar.

From a verb's start until it shows something (a bar, a line on standard output) or ends, a terminal's standard error
says that it is at work, and for how long. Elsewhere nothing is written: logs stay as they are.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

AFTER, EVERY = 0.7, 0.25  # seconds until the first sign, and between two
CLEAR = "\r\x1b[K"


class Waiting:
    """A line that is written over and over by a thread, until `end`."""

    def __init__(self, what: str, terminal: TextIO, after: float = AFTER) -> None:
        self.what, self.terminal, self.after = what, terminal, after
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.shown = False
        self.thread = threading.Thread(target=self.show, daemon=True)
        self.thread.start()

    def show(self) -> None:
        started, pause = time.monotonic(), self.after
        while not self.over.wait(pause):
            with self.lock:
                if self.over.is_set():
                    return
                self.terminal.write(f"{CLEAR}{self.what} … {time.monotonic() - started:.0f} s")
                self.terminal.flush()
                self.shown, pause = True, EVERY

    def end(self) -> None:
        """The line is gone when this returns."""
        with self.lock:
            if not self.over.is_set():
                self.over.set()
                if self.shown:
                    self.terminal.write(CLEAR)
                    self.terminal.flush()

    def clear(self) -> None:
        """Somebody else writes a line; the sign comes again below it."""
        with self.lock:
            if self.shown and not self.over.is_set():
                self.terminal.write(CLEAR)
                self.shown = False


class BesideWaiting:
    """Standard output or error: what is written there comes after `before`, which takes the sign away."""

    def __init__(self, stream: TextIO, before: Callable[[], None]) -> None:
        self._stream, self._before = stream, before

    def write(self, text: str) -> int:
        self._before()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


current: list[Waiting] = []


def end_waiting() -> None:
    """Called by whatever shows progress of its own."""
    for waiting in current:
        waiting.end()


@contextmanager
def waiting(what: str, after: float = AFTER) -> Iterator[None]:
    terminal, output = sys.stderr, sys.stdout
    if current or not terminal.isatty():
        yield
        return
    sign = Waiting(what, terminal, after)
    current.append(sign)
    replaced: Any = BesideWaiting(output, sign.end)
    beside: Any = BesideWaiting(terminal, sign.clear)
    sys.stdout, sys.stderr = replaced, beside
    try:
        yield
    finally:
        sign.end()
        current.remove(sign)
        sys.stdout = output if sys.stdout is replaced else sys.stdout
        sys.stderr = terminal if sys.stderr is beside else sys.stderr
