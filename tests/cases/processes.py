"""Python programs in processes of their own, forked from one that has imported torch and transformers, not graft.

A process that begins from nothing takes 6 to 10 seconds until both are there; a forked one begins at once, imports
graft from its own PYTHONPATH, and ends as any interpreter does (threads, atexit, exit status). What torch reads from
the environment while it is imported is that of the test run; Triton is there already, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PARENT = """
import gc, json, os, runpy, sys
import torch, transformers, transformers.modeling_utils
import networkx, pydantic, torch._dynamo, torch.export, torch.fx.experimental.proxy_tensor, typer  # as graft does

def become(job):
    for number, name in enumerate(("in", "out", "err")):
        file = os.open(os.devnull if name == "in" else os.path.join(job["folder"], name), os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    kind, *rest = job["arguments"]
    sys.path[:] = [*filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    if kind in ("-c", "-m"):
        sys.path.insert(0, "" if kind == "-c" else job["cwd"])
        sys.argv = [kind, *rest[1:]]
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, os.path.dirname(kind))

def main(kind, rest):
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        space = sys.modules["__main__"].__dict__
        exec(compile(rest[0], "<string>", "exec"), space)
    else:
        runpy.run_path(kind, run_name="__main__")

PATH = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
gc.freeze()
job = None
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
become(job)
main(job["arguments"][0], job["arguments"][1:])
"""


@cache
def parent() -> subprocess.Popen[str]:
    """One for each process of the test run; it ends when its input does."""
    return subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run_python(*arguments: Any, cwd: Any = None, env: Mapping[str, str] | None = None) -> Done:
    """`python <arguments>`: -c and a program, -m and a module, or a file, and what they are given."""
    with TemporaryDirectory() as folder, suppress(BrokenPipeError):
        job = {
            "arguments": [*map(str, arguments)], "cwd": str(cwd or os.getcwd()), "folder": folder,
            "environment": dict(os.environ if env is None else env),
        }  # fmt: skip
        process = parent()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return Done(code, *(Path(folder, name).read_text() for name in ("out", "err")))
    raise RuntimeError("the process that others are forked from has ended")
