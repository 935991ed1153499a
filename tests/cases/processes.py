"""Python programs in processes of their own, forked from one that has imported torch and transformers, not graft.

A process that begins from nothing takes 6 to 10 seconds until both are there; a forked one begins at once, imports
graft from its own PYTHONPATH, and ends as any interpreter does (threads, atexit, exit status). What torch reads from
the environment while it is imported is that of the test run; Triton is there already, too.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import fork_parent


@cache
def address() -> str:
    """Of the process that others are forked from: one for the whole run, or for this process where it runs alone."""
    if fork_parent.PROGRAMS in os.environ:
        return os.environ[fork_parent.PROGRAMS]
    folder, end = fork_parent.start("programs")
    atexit.register(end)
    return f"{folder}/programs"


class Forked:
    """`python <arguments>`, with what tests use of subprocess.Popen."""

    def __init__(
        self,
        *arguments: Any,
        cwd: Any = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
    ) -> None:
        self.returncode: int | None = None
        self.stdout, out = stream(stdout, 1)
        self.stderr, err = stream(stderr, 2)
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address())
        job = {
            "arguments": [*map(str, arguments)], "cwd": str(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
        }  # fmt: skip
        with open(os.devnull) as nothing:
            message = json.dumps(job).encode() + b"\n"
            sent = socket.send_fds(self.connection, [message], [nothing.fileno(), out, err])
            self.connection.sendall(message[sent:])
        for mine, theirs in ((self.stdout, out), (self.stderr, err)):
            if mine is not None:
                os.close(theirs)
        self.told = self.connection.makefile()
        self.pid = int(self.told.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.connection.settimeout(timeout)
            try:
                self.returncode = int(self.told.readline())
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and not select.select([self.connection], [], [], 0)[0]:
            return None
        return self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def stream(wanted: Any, number: int) -> tuple[IO[str] | None, int]:
    """The end of a pipe that the test reads, and what the process writes to."""
    if wanted == subprocess.PIPE:
        mine, theirs = os.pipe()
        return open(mine), theirs
    if wanted is None or isinstance(wanted, int):
        return None, number if wanted is None else wanted
    return None, wanted.fileno()


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run_python(*arguments: Any, cwd: Any = None, env: Mapping[str, str] | None = None) -> Done:
    """`python <arguments>`: -c and a program, -m and a module, or a file, and what they are given."""
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        with files[0].open("w") as out, files[1].open("w") as err:
            code = Forked(*arguments, cwd=cwd, env=env, stdout=out, stderr=err).wait()
        return Done(code, *(file.read_text() for file in files))
