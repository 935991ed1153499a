"""Where an exception of somebody else's code comes from: his file and line, not ours."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path

# libraries that an author calls, and that call him: the line that matters is the one above theirs
LIBRARIES = ("torch", "transformers", "triton", "numpy", "typer", "click", "rich", "yaml")


def told(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (fuse_mine.py:12, in write)`."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    line = author_line(error)
    return f"{text} ({line})" if line else text


def author_line(error: BaseException) -> str:
    """The innermost line outside of graft, the libraries and Python itself; '' where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_authors(frame.filename):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return ""


@cache
def is_authors(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    folders = Path(filename).parents
    installed = any(Path(sysconfig.get_path(kind)) in folders for kind in ("purelib", "platlib"))
    python = not installed and any(root in folders for root in standard())
    return not python and not any(root in folders for root in libraries())


@cache
def standard() -> tuple[Path, ...]:
    found = Path(sysconfig.get_path("stdlib"))
    return (found, found.resolve())


def libraries() -> list[Path]:
    """The folders of graft and of the libraries that are imported."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    return [Path(__file__).parents[1], *(Path(file).parent for file in files if file)]
