"""Lines about what happens, for people or (--json) for programs; written by a thread, so that nothing waits for a
disk or a terminal. Neither prompts nor keys are ever in them."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from contextlib import suppress
from queue import Full, Queue
from typing import Any, TextIO

SCHEMA = "serve-log/1"  # of a line as JSON: docs/schemas/serve-log.json
MOST = 10_000  # lines that wait to be written; more are lost, and counted


class ServerLog:
    """log("ready", url=…): `graft: ready url=…` on standard error, or {"event": "ready", …} on standard output."""

    def __init__(self, as_json: bool, target: TextIO | None = None) -> None:
        self.as_json = as_json
        self.target = target or (sys.stdout if as_json else sys.stderr)
        self.waiting: Queue[str] = Queue(MOST)
        self.lost = 0
        threading.Thread(target=self.write_forever, name="graft-log", daemon=True).start()

    def __call__(self, event: str, /, **values: Any) -> None:
        try:
            self.waiting.put_nowait(self.line(event, values))
        except Full:
            self.lost += 1

    def line(self, event: str, values: dict[str, Any]) -> str:
        if self.as_json:
            return json.dumps({"schema": SCHEMA, "time": round(time.time(), 3), "event": event, **values})
        shown = [f"{name}={plain(value)}" for name, value in values.items() if value is not None]
        return " ".join([time.strftime("%H:%M:%S"), "graft:", event, *shown])

    def write_forever(self) -> None:
        while True:
            line = self.waiting.get()
            try:
                print(line, file=self.target, flush=True)
            except (OSError, ValueError):  # a full disk, a closed pipe: the server goes on
                self.lost += 1
            self.waiting.task_done()

    def flush(self, seconds: float = 2.0) -> None:
        """Waits until all is written, or the time is over."""
        end = time.monotonic() + seconds
        while self.waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)


def print_traceback() -> None:
    """Of the error that is handled: a defect. A full disk is no reason not to go on."""
    with suppress(OSError, ValueError):
        traceback.print_exc()


def plain(value: object) -> str:
    """On one line, whatever it holds."""
    text = str(value)
    return text if text.isprintable() else json.dumps(text)
