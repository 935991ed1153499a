"""The processes of the other ranks on this machine: started by rank 0, watched by it, and gone when it is.

    rank 0   Popen(python -m graft.engine.launch.worker)  ──▶  rank 1 … world - 1
             what to load, down the pipe of their standard input; its end ends them

A worker's output goes to a file; when it dies by itself, the last of it is the reason that rank 0 tells.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.base.errors import RankFailed
from graft.base.files import disk_errors

LEAVING = 5.0  # seconds that a worker has to end
TOLD = 20.0  # seconds between a broken connection and the end of the process that broke it
JOINING = 600.0  # seconds that workers have to import torch on a busy machine
LAST_LINES = 12
MODULE = "graft.engine.launch.worker"


@dataclass(eq=False)
class Workers:
    processes: dict[int, subprocess.Popen[bytes]]  # by rank
    folder: Path
    failed: RankFailed | None = None
    stopping: bool = False
    gone: threading.Event = field(default_factory=threading.Event)
    on_failure: Callable[[RankFailed], None] = lambda _: None

    @staticmethod
    def start(world: int, port: int, task: Any, environment: Mapping[str, str]) -> Workers:
        """Starts ranks 1 … world - 1. task: what each is told, beside its rank; it must pickle."""
        with disk_errors(Path(tempfile.gettempdir())):
            folder = Path(tempfile.mkdtemp(prefix="graft-ranks-"))
        workers = Workers({}, folder)
        try:
            for rank in range(1, world):
                workers.processes[rank] = launch(rank, folder, environment)
                told = {"rank": rank, "world": world, "port": port, "task": task, "folder": str(folder)}
                hand_over(workers.processes[rank], told)
        except BaseException:
            workers.stop()
            raise
        for rank in workers.processes:
            threading.Thread(target=workers.watch, args=(rank,), name=f"graft-rank-{rank}", daemon=True).start()
        return workers

    def watch(self, rank: int) -> None:
        """Waits for the end of a worker; one that nobody asked for ends the others too."""
        code = self.processes[rank].wait()
        if self.stopping or self.failed is not None:
            return
        self.failed = RankFailed(rank, f"{ended(code)}{self.last_lines(rank)}")
        self.gone.set()
        self.end_all()
        self.on_failure(self.failed)

    def last_lines(self, rank: int) -> str:
        log = log_file(self.folder, rank)
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return ": " + "\n".join(lines[-LAST_LINES:]) if lines else ""

    def failure(self, wait: float = TOLD) -> RankFailed | None:
        """The worker that failed, if one did; a connection may break a moment before its process is gone."""
        self.gone.wait(wait)
        return self.failed

    def stop(self) -> None:
        """Ends all workers; those that do not end by themselves are killed."""
        self.stopping = True
        for process in self.processes.values():
            close_input(process)
        until = time.monotonic() + LEAVING
        for process in self.processes.values():
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end_all(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()


def launch(rank: int, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Not by multiprocessing: that imports the caller's main module anew, which may load an LLM itself."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with log_file(folder, rank).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "PYTHONPATH": paths},
        )


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def hand_over(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    data = pickle.dumps(message)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it is gone; `watch` tells why
        process.stdin.write(struct.pack("<Q", len(data)) + data)
        process.stdin.flush()


def take_over() -> dict[str, Any]:
    """What a worker was handed; from then on the end of its input ends it."""
    source = sys.stdin.buffer
    (size,) = struct.unpack("<Q", source.read(8))
    message = pickle.loads(source.read(size))
    folder = message["folder"]
    threading.Thread(target=end_with_input, args=(folder,), name="graft-parent", daemon=True).start()
    return message


def end_with_input(folder: str) -> None:
    """Past Python's buffer: a thread that holds its lock makes the interpreter abort when it ends. folder: of the
    logs, which rank 0 does not remove where it is killed."""
    while os.read(sys.stdin.fileno(), 4096):
        continue
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def ended(code: int) -> str:
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"
