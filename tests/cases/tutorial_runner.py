"""Follows a page word for word: `python tutorial_runner.py DOC.md FOLDER`, in a process of its own.

A ```python block whose first line names a file is written there; the commands of a ```bash block run in order; every
line of a ```text block must be among what the last bash block printed, `…` standing for anything. Words behind `bash`
say what a block needs (NEEDS): where that is not there, the block and its text are left out, and the result says so.
`exit=2`: the last command of the block ends with that. `background`: its one command runs until the page ends; its
text is waited for, and port 8000 is a free one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

Read = Callable[[str], str]  # what was printed by the time that a pattern is in it
FENCED = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {
    "gpu": "needs a GPU",
    "server": "needs a server with a tokenizer in the background",
    "clone": "changes or tests the clone itself",
}


@dataclass(frozen=True)
class Block:
    kind: str
    words: tuple[str, ...]
    text: str

    @property
    def commands(self) -> list[str]:
        """Lines, with those that end in a backslash joined; comments are for readers."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]

    @property
    def needs(self) -> str:
        """Why it cannot run here, or nothing."""
        return next((NEEDS[word] for word in self.words if word in NEEDS and not has(word)), "")

    @property
    def code(self) -> int:
        return next((int(word.removeprefix("exit=")) for word in self.words if word.startswith("exit=")), 0)


@dataclass
class Followed:
    commands: int = 0
    lines: int = 0
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = f"followed {self.commands} commands, compared {self.lines} lines"
        return "; ".join([done, *(f"left out: {one}" for one in self.left_out)])


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text()
    if "```bash background" in text:
        text = re.sub(r"(?<=--port )8000|(?<=:)8000\b", str(free_port()), text)
    for kind, info, body in FENCED.findall(text):
        yield Block(kind, tuple(info.split()), body)


def has(word: str) -> bool:
    if word != "gpu":
        return False
    import torch

    return torch.cuda.is_available()


def follow(document: Path) -> Followed:
    done, needs = Followed(), ""
    read: Read = nothing
    with background() as begin:
        for block in blocks(document):
            if block.kind == "python":
                name, _, body = block.text.partition("\n")
                Path(name.removeprefix("# ")).write_text(body)
            elif block.kind == "bash":
                needs = block.needs
                if needs:
                    done.left_out += (f"{block.commands[0]} ({needs})",)
                    continue
                read = begin(block.commands[0]) if "background" in block.words else run_all(block)
                done.commands += len(block.commands)
            elif block.kind == "text" and not needs:
                done.lines += compare(block.text, read)
    return done


def compare(text: str, read: Read) -> int:
    """Symbols of sizes (s44) are torch's to name, and it names them by what it met before."""
    for line in text.splitlines():
        parts = (re.sub(r"\bs\d+\b", r"s\\d+", re.escape(part)) for part in line.split("…"))
        pattern = ".*".join(parts)
        printed = read(pattern)
        assert re.search(pattern, printed), f"{line!r} is not in what was printed:\n{printed}"
    return len(text.splitlines())


def nothing(pattern: str) -> str:
    return ""


def run_all(block: Block) -> Read:
    codes = [*[0] * (len(block.commands) - 1), block.code]
    printed = "".join(run(command, code) for command, code in zip(block.commands, codes, strict=True))
    return lambda _: printed


@contextlib.contextmanager
def background() -> Iterator[Callable[[str], Read]]:
    """Starts commands; each then gives what it has printed once a pattern is in it, or when it has ended. At the end
    they get SIGTERM, and must end with 0."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(command: str) -> Read:
        log = Path(f"background_{len(running)}.log")
        with log.open("wb") as file:
            running.append(subprocess.Popen(shlex.split(shell(command)), stdout=file, stderr=subprocess.STDOUT))
        return partial(wait_for, running[-1], log)

    try:
        yield begin
    finally:
        for process in running:
            process.terminate()
        codes = [process.wait() for process in running]
    assert not any(codes), f"what ran in the background ended with {codes}"


def wait_for(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    for _ in range(6000):  # ten minutes: a command that hangs must not hang the tests
        if re.search(pattern, log.read_text()) or process.poll() is not None:
            break
        time.sleep(0.1)
    return log.read_text()


def shell(command: str) -> str:
    """With this Python, and graft from it."""
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    return re.sub(r"^graft ", f"{shlex.quote(sys.executable)} -m graft ", command)


@cache
def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run(command: str, code: int = 0) -> str:
    """graft runs in this process, which has torch imported already; everything else in a shell."""
    words = shlex.split(command)
    path = [word.partition("=")[2] for word in words if word.startswith("PYTHONPATH=")]
    words = [word for word in words if not word.startswith("PYTHONPATH=")]
    sys.path[:0] = path
    if words[0] == "graft" and not {"|", ">", "&&"} & {*words}:
        return graft(words[1:], code)
    done = subprocess.run(shell(command), shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def graft(words: list[str], code: int = 0) -> str:
    from typer.testing import CliRunner

    from graft.cli.app import app

    result = CliRunner().invoke(app, words)
    said = f"graft {shlex.join(words)}: exit {result.exit_code}\n{result.output}\n{result.exception!r}"
    assert result.exit_code == code and isinstance(result.exception, SystemExit | None), said
    return result.output


if __name__ == "__main__":
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "200"}
    document = Path(sys.argv[1]).resolve()
    with contextlib.chdir(sys.argv[2]):
        print(follow(document))
