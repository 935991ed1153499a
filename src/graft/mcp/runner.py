"""A command of graft's as a process of its own: its JSON, in pages; cancelled with the call, ended by its limit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import graft
from graft.base.errors import GraftError
from graft.mcp.workspace import Workspace

PAGE = 20_000  # characters of an answer
GRACE = 5.0  # seconds that a command has to end by itself
TICK = 1.0  # seconds from one report of progress to the next
Tell = Callable[[float, str], Awaitable[None]]


class ToolAnswer(TypedDict):
    """What a tool gives. data: the command's JSON, where it fits into a page; else `page` is the beginning of its
    text, and `more(result, next_offset)` gives the rest. error: what was wrong, where ok is false."""

    ok: bool
    exit_code: int
    error: str
    data: dict[str, Any] | None
    page: str
    total_chars: int
    next_offset: int | None
    result: str
    seconds: float


async def run_verb(
    workspace: Workspace, arguments: Sequence[str], limit: float, tell: Tell | None = None
) -> ToolAnswer:
    """No shell: `arguments` are those of one command, which runs in the workspace. -P: no module of the workspace is
    taken for one of Python's."""
    started = time.monotonic()
    root = str(Path(graft.__file__).parent.parent)
    environment = workspace.environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH", ""))))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "graft", *arguments, cwd=workspace.root, env=environment, start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err, late = await finish(process, started, limit, tell)
    finally:
        await asyncio.shield(end(process))  # the call was cancelled, or it took too long
    said = " ".join(err.decode(errors="replace").split())[-2000:]
    code = -1 if late else process.returncode or 0
    text = out.decode(errors="replace")
    error = f"took longer than {limit:.0f} s and was ended" if late else error_of(text) or said
    return answer(workspace, text, code, error if code else "", time.monotonic() - started)


async def finish(
    process: asyncio.subprocess.Process, started: float, limit: float, tell: Tell | None
) -> tuple[bytes, bytes, bool]:
    work = asyncio.ensure_future(process.communicate())
    try:
        if tell:
            await tell(0.0, "started")
        while True:
            done, _ = await asyncio.wait({work}, timeout=TICK)
            if done:
                return *work.result(), False
            passed = time.monotonic() - started
            if passed > limit:
                return b"", b"", True
            if tell:
                await tell(passed, f"{passed:.0f} s")
    finally:
        work.cancel()


async def end(process: asyncio.subprocess.Process) -> None:
    """As by Ctrl-C first: a command ends the processes that it started itself."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE)


def answer(workspace: Workspace, text: str, code: int, error: str, seconds: float) -> ToolAnswer:
    data = read_json(text)
    small = len(text) <= PAGE
    return ToolAnswer(
        ok=code == 0,
        exit_code=code,
        error=error,
        data=data if small else None,
        page="" if small and data is not None else text[:PAGE],
        total_chars=len(text),
        next_offset=None if small else PAGE,
        result="" if small else workspace.keep(text),
        seconds=round(seconds, 2),
    )


def error_of(text: str) -> str:
    """What an error document says; '' for another one."""
    error = (read_json(text) or {}).get("error")
    return str(error["message"]) if isinstance(error, dict) else ""


def page_of(workspace: Workspace, result: str, offset: int) -> ToolAnswer:
    text = workspace.kept(result)
    rest = offset + PAGE
    return ToolAnswer(
        ok=True, exit_code=0, error="", data=None, page=text[offset:rest], total_chars=len(text),
        next_offset=rest if rest < len(text) else None, result=result, seconds=0.0,
    )  # fmt: skip


def refusal(error: GraftError) -> ToolAnswer:
    """Of a request that was not begun."""
    return ToolAnswer(
        ok=False, exit_code=error.exit_code, error=str(error), data=None, page="", total_chars=0, next_offset=None,
        result="", seconds=0.0,
    )  # fmt: skip


def read_json(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else {"items": found}
