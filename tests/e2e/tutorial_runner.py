"""Follows a tutorial word for word: `python tutorial_runner.py DOC.md FOLDER`, in a process of its own.

A ```python block whose first line names a file is written there; the commands of a ```bash block run in order; every
line of a ```text block must be among what the last bash block printed, `…` standing for anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(document: Path) -> tuple[int, int]:
    """The number of commands that ran and of lines that were compared."""
    commands, lines, printed = 0, 0, ""
    for kind, text in BLOCK.findall(document.read_text()):
        if kind == "python":
            name, _, body = text.partition("\n")
            Path(name.removeprefix("# ")).write_text(body)
        elif kind == "bash":
            printed = "".join(run(command) for command in text.strip().splitlines())
            commands += text.strip().count("\n") + 1
        elif kind == "text":
            for line in text.splitlines():
                pattern = ".*".join(re.escape(part) for part in line.split("…"))
                assert re.search(pattern, printed), f"{line!r} is not in what was printed:\n{printed}"
                lines += 1
    return commands, lines


def run(command: str) -> str:
    """graft runs in this process, which has torch imported already; everything else in a shell."""
    words = shlex.split(command)
    path = [word.partition("=")[2] for word in words if word.startswith("PYTHONPATH=")]
    words = [word for word in words if not word.startswith("PYTHONPATH=")]
    sys.path[:0] = path
    if words[0] == "graft":
        return graft(words[1:])
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def graft(words: list[str]) -> str:
    from typer.testing import CliRunner

    from graft.cli.app import app

    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"graft {shlex.join(words)}\n{result.output}\n{result.exception!r}"
    return result.output


if __name__ == "__main__":
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "200"}
    document = Path(sys.argv[1]).resolve()
    with contextlib.chdir(sys.argv[2]):
        commands, lines = follow(document)
    print(f"followed {commands} commands, compared {lines} lines")
