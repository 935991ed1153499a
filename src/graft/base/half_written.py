"""Files and folders on their way to their places, by whom they are written, and what killed writers left."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import threading
import time
from functools import cache
from glob import escape
from pathlib import Path

WRITER = r"\d+(?:-[0-9a-f]{8}-[0-9a-f]+)?"  # who writes a file; the number alone: an earlier graft
ABANDONED = 24 * 3600  # seconds


def partial_path(target: Path) -> Path:
    """Where this thread writes what will be `target`."""
    return target.with_name(f".{target.stem}.{writer()}.partial{target.suffix}")


def writer() -> str:
    """Names this thread among all that may share the disk."""
    return f"{os.getpid()}-{machine()}-{threading.get_ident():x}"


@cache
def machine() -> str:
    """Names what the numbers of processes belong to: a container has numbers of its own."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    told = f"{platform.node()} {space}"
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number beyond 32 bits
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def is_gone(path: Path, process: str) -> bool:
    """Whether who wrote this file half ended before it was done. process: as `writer` says it. Of another machine's
    nobody knows here: it is gone when nothing has been written for a day."""
    number, _, rest = process.partition("-")
    if not rest or rest.startswith(machine()):
        return not is_alive(int(number))
    try:
        return time.time() - path.stat().st_mtime > ABANDONED
    except OSError:
        return False  # it is whole by now, or somebody else took it away


def remove_stale(target: Path) -> None:
    """Takes away what a killed process left behind."""
    start, end = f".{target.stem}.", f".partial{target.suffix}"
    for path in target.parent.glob(f"{escape(start)}*{escape(end)}"):
        process = path.name.removeprefix(start).removesuffix(end)
        if re.fullmatch(WRITER, process) and is_gone(path, process):
            remove(path)


def remove_leftovers(folder: Path) -> None:
    """Takes away all that killed processes left half written or half removed in a folder of graft's own."""
    for path in folder.glob(".*"):
        found = re.fullmatch(rf"\..*\.({WRITER})\.(partial|old)(\..*)?", path.name)
        if found and is_gone(path, found[1]):
            remove(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
