"""Processes that build a model each, say so, and measure it when it is their turn.

    start ─▶ builds ─▶ "built" ─▶ waits ─▶ a line on its standard input ─▶ measures ─▶ one JSON document

Caches are empty and the process's own. It ends when its standard input does, so that nothing is left of a run that
was killed.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.bench.start import CACHES, OWN_CACHES

PROGRAM = "from graft.bench.family_process import main; main()"
BUILT = b"built\n"  # the line that says so


@dataclass
class Building:
    """home: with its caches, and what it wrote to standard error. said: its standard output until it had built."""

    process: subprocess.Popen[bytes]
    home: tempfile.TemporaryDirectory[str]
    late: float | None = None  # seconds after which it was given up
    said: bytes = b""

    @property
    def errors(self) -> Path:
        return Path(self.home.name) / "stderr"

    def give_up(self, seconds: float) -> None:
        """Ends it: it would go on beside those that are measured next."""
        self.late = seconds
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with self.process:  # its pipes are closed, and it is waited for
            self.process.kill()
        self.home.cleanup()


def start(asked: Mapping[str, Any]) -> Building:
    home = tempfile.TemporaryDirectory(prefix="graft-families-")
    environment = {name: value for name, value in os.environ.items() if name not in OWN_CACHES}
    environment |= {name: str(Path(home.name) / folder) for name, folder in CACHES.items()}
    command = [sys.executable, "-c", PROGRAM, json.dumps(asked)]
    pipe = subprocess.PIPE
    with (Path(home.name) / "stderr").open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=errors)
    return Building(process, home)


def wait_until_built(building: Sequence[Building], seconds: float) -> None:
    """Until each has built its model or has ended; one that takes longer is given up."""
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for one in building:
            assert one.process.stdout is not None
            waiting.register(one.process.stdout, selectors.EVENT_READ, one)
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                piece = os.read(key.fd, 1 << 16)
                key.data.said += piece
                if not piece or BUILT in key.data.said:
                    waiting.unregister(key.fileobj)
        for key in list(waiting.get_map().values()):
            key.data.give_up(seconds)


def finish(one: Building, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """What it says when it has measured, or None and why there is nothing."""
    rest = b""
    if one.late is None:
        try:
            rest, _ = one.process.communicate(b"go\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            one.give_up(seconds)
    if one.late is not None:
        return None, f"not through after {one.late:.0f} s"
    answer = (one.said + rest).rpartition(BUILT)[2].strip()
    if one.process.returncode or not answer:
        return None, last_line(one.errors.read_text()) or f"its process ended with {one.process.returncode}"
    return json.loads(answer.splitlines()[-1]), ""


def wait_for_turn() -> None:
    """In the process: says that the model is built; whoever began it says when to measure, or is gone."""
    sys.stdout.write(BUILT.decode())
    sys.stdout.flush()
    if not sys.stdin.readline():
        raise SystemExit("nobody waits for it any more")


def last_line(text: str) -> str:
    """Of a traceback: the error with its first line, without the module that its class is in."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith((" ", "Traceback"))]
    if not lines:
        return ""
    kind, colon, rest = lines[-1].partition(": ")
    return f"{kind.rpartition('.')[2]}{colon}{rest}" if colon and " " not in kind else lines[-1]
