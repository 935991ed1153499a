"""Which names a new transform and its op may have."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from graft.base.errors import UsageError
from graft.ops import OPS
from graft.passes.registry import TransformRegistry, load_all

FILES = ("define", "fake", "make", "tl", "torch", "triton", "wrong")  # what the files of an op define or import
BACKENDS = ("triton", "torch", "cuda", "cpu")  # an op's name says what it computes, not what runs it


def check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot be a transform's name; write it in snake_case, a verb first: fuse_squared_relu"
        )
    if name.startswith("test_"):
        raise UsageError(f"{name!r}: pytest would take the transform's own file for a test; choose another name")


def check_free(name: str, own_file: Path, force: bool) -> None:
    """Registry key, YAML key and file name are one; a second transform of that name could not be loaded."""
    load_all()
    if name in TransformRegistry.names() and not (force and own_file.exists()):
        raise UsageError(f"a transform named {name!r} is there already (graft transforms); choose another name")


def check_importable(name: str, folder: Path) -> None:
    """A plugin is found by its file's name, so it must not hide another module."""
    spec = importlib.util.find_spec(name)
    if spec is not None and (
        spec.origin is None or Path(spec.origin).resolve().parent not in (folder, folder / name)
    ):
        raise UsageError(f"{name!r} is the name of another Python module ({spec.origin}); choose another name")


def op_name(name: str) -> str:
    """fuse_squared_relu → squared_relu."""
    return name.removeprefix("fuse_")


def check_op(op: str, used: Sequence[str], own_folder: Path, force: bool) -> None:
    """used: the names of the pattern's arguments, which the op's own name must not hide."""
    if op in used or op in FILES:
        raise UsageError(f"the op would be graft::{op}, which its own files use for something else; choose another")
    word = next((word for word in BACKENDS if word in op), None)
    if word is not None:
        raise UsageError(
            f"the op would be graft::{op}, and ops carry no backend ({word}) in their names; choose another"
        )
    if op in OPS and not (force and own_folder.exists()):
        raise UsageError(f"an op graft::{op} is there already (graft ops {op}); use it, or choose another name")


def class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
