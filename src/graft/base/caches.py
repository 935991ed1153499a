"""graft's caches on disk: what is in them, how large it is, when it was last used, and taking it away.

An entry is a folder, or the files of one name (`key.cpp`, `key.so`). All are written whole or not at all, and found
by keys of everything that they depend on, so one that goes away is made again by whoever needs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.base.files import cache_folder, drop_folder
from graft.base.half_written import remove_leftovers
from graft.base.manifest import LARGEST, MANIFEST


@dataclass(frozen=True)
class CacheKind:
    """name: of its folder; variable: of the environment, that names another one. holds: in a few words. about: what
    an entry is for, from its files. made_again: without a network and without measuring."""

    name: str
    variable: str
    holds: str
    about: Callable[[Path], str]
    made_again: bool = True

    def folder(self) -> Path:
        return cache_folder(self.name, self.variable)


@dataclass(frozen=True)
class CacheEntry:
    """used: when it was made or last found (see note_use), in seconds since 1970."""

    kind: CacheKind
    name: str
    paths: tuple[Path, ...]
    bytes: int
    used: float

    @property
    def about(self) -> str:
        try:
            return self.kind.about(self.paths[0])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return "damaged, or of another graft"

    def to_data(self) -> dict[str, Any]:
        return {"kind": self.kind.name, "name": self.name, "bytes": self.bytes, "used": self.used, "for": self.about}


def engine_about(path: Path) -> str:
    with (path / MANIFEST).open("rb") as file:
        manifest = json.loads(file.read(LARGEST))
    model, quantized = manifest["model"], manifest["quantized"]
    weights = quantized["format"] if quantized else model["dtype"]
    return f"{model['name']}, {weights}, {manifest['device']} ({manifest['backend']})"


def headed_about(path: Path) -> str:
    """Of a file whose first line says what it is."""
    with path.open() as file:
        return json.loads(file.readline()).get("about", "written by an earlier graft, which did not say")


def check_about(path: Path) -> str:
    with path.open() as file:
        file.readline()
        found = json.loads(file.readline())
    return f"{found['trials']} trials, worst {found['error']:.1e} of {found['limit']:.1e}: {found['inputs']}"


def native_about(path: Path) -> str:
    source = path.with_suffix(".cpp")
    if not source.is_file():
        return "compiled C++"
    with source.open() as file:
        return "kernels that steps share" if file.readline().startswith("// Kernels") else "the step of a graph"


def folder_about(path: Path) -> str:
    return ", ".join(sorted(child.name for child in path.iterdir())[:3])


GRAPHS = CacheKind("graphs", "GRAFT_GRAPH_CACHE_DIR", "captured graphs", headed_about)
CHECKS = CacheKind("checks", "GRAFT_CHECK_CACHE_DIR", "numeric checks that passed", check_about)
NATIVE = CacheKind("native", "GRAFT_NATIVE_CACHE_DIR", "compiled C++", native_about)
ENGINES = CacheKind("engines", "GRAFT_ENGINE_CACHE_DIR", "engines that a start kept", engine_about)
MODELS = CacheKind("models", "", "GGUF files as Hugging Face folders", folder_about)
DOWNLOADS = CacheKind("gguf", "", "downloaded models", folder_about, made_again=False)
TUNED = CacheKind("tuned", "", "measurements of `graft tune`", lambda path: path.stem, made_again=False)
CARRIED = (GRAPHS, NATIVE, CHECKS)  # small ones, which go with torch's cache artifacts
USED: dict[Path, None] = {}  # that this process found or made
KINDS = (ENGINES, GRAPHS, NATIVE, CHECKS, MODELS, DOWNLOADS, TUNED)


def entries(kind: CacheKind) -> list[CacheEntry]:
    """Those that are whole, the largest first. Other processes may add and remove some meanwhile."""
    found: dict[str, list[Path]] = {}
    folder = kind.folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or path.is_symlink():
            continue
        found.setdefault(path.name if path.is_dir() else path.stem, []).append(path)
    made = (entry(kind, name, paths) for name, paths in found.items())
    return sorted((one for one in made if one is not None), key=lambda one: (-one.bytes, one.name))


def entry(kind: CacheKind, name: str, paths: list[Path]) -> CacheEntry | None:
    """None where another process has taken it away."""
    try:
        sizes = [file.stat().st_size for path in paths for file in files_of(path)]
        used = max(path.stat().st_mtime for path in paths)
    except FileNotFoundError:
        return None
    return CacheEntry(kind, name, tuple(paths), sum(sizes), used)


def files_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    else:
        yield path


def note_use(path: Path) -> None:
    """An entry was found and serves, which keeps it from being pruned. A cache that cannot be written serves too."""
    USED[path] = None
    with suppress(OSError):
        os.utime(path)


def all_entries(kinds: tuple[CacheKind, ...] = KINDS) -> list[CacheEntry]:
    return [one for kind in kinds for one in entries(kind)]


def remove_entry(one: CacheEntry) -> bool:
    """Whether it was there. A process that has its files open keeps them."""
    there = False
    for path in one.paths:
        with suppress(FileNotFoundError):
            if path.is_dir():
                drop_folder(path)
            else:
                path.unlink()
            there = True
    return there


def prune(kinds: tuple[CacheKind, ...], before: float, *, dry: bool = False) -> list[CacheEntry]:
    """Takes away what was last used before that time, and what killed processes left; gives what went."""
    gone = [one for one in all_entries(kinds) if one.used < before]
    if dry:
        return gone
    for kind in kinds:
        if kind.folder().is_dir():
            remove_leftovers(kind.folder())
    return [one for one in gone if remove_entry(one)]
