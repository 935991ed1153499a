"""A terminal sees that a verb is at work until the verb itself shows something."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from graft.cli.show import busy, progress_bar
from graft.cli.waiting import current, waiting

SIGNS = r"(\r\x1b\[Kgraft transforms … \d+ s)+\r\x1b\[K(?!graft)"  # and then it is gone


class Terminal(io.StringIO):
    """Standard error of somebody who looks at it. written: set by the first sign."""

    def __init__(self, tty=True):
        super().__init__()
        self.tty, self.written = tty, threading.Event()

    def isatty(self):
        return self.tty

    def write(self, text):
        self.written.set()
        return super().write(text)


@pytest.mark.parametrize("shows", ["output", "bar", "status", "end"])
def test_the_sign_is_there_until_something_else_is(monkeypatch, shows):
    output, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", output)
    with waiting("graft transforms", after=0.0):
        assert terminal.written.wait(30)
        if shows == "output":
            print("answer")
        elif shows == "bar":
            with progress_bar():
                pass
        elif shows == "status":
            with busy("comparing"):
                pass
        seen = terminal.getvalue()
    assert re.match(SIGNS, terminal.getvalue()) and (shows == "end" or re.match(SIGNS, seen))
    assert output.getvalue() == ("answer\n" if shows == "output" else "")
    assert sys.stdout is output and sys.stderr is terminal and not current


def test_a_warning_stands_on_a_line_of_its_own(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with waiting("graft run", after=0.0):
        assert terminal.written.wait(30)
        print("a warning", file=sys.stderr)
    assert re.search(r" s\r\x1b\[Ka warning\n", terminal.getvalue())


def test_after_output_there_is_no_sign(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with waiting("graft ops", after=60.0):
        print("at once")
        current[0].thread.join(30)
    assert terminal.getvalue() == ""


def test_logs_stay_as_they_are(monkeypatch):
    pipe = Terminal(tty=False)
    monkeypatch.setattr(sys, "stderr", pipe)
    with waiting("graft run", after=0.0):
        assert not current
    assert pipe.getvalue() == ""
