"""Entries of graft's caches in one file, for another machine or another day.

A tar file: graft-cache.json first, which names every file with its size and sha256, then the files as
`<kind>/<name>/…`. What is imported is held against that list before it takes its place; entries that are there
already stay. A bundle may hold compiled code: import those of people whom you trust.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import graft
from graft.base.caches import KINDS, CacheEntry, CacheKind, files_of
from graft.base.errors import ArtifactError
from graft.base.files import atomic_file, atomic_folder, disk_errors, sha256

LIST = "graft-cache.json"
MARK, FORMAT = "graft cache", 1
LARGEST_LIST = 1 << 26
NAME = re.compile(r"[\w-][\w.-]*")  # one part of a path


@dataclass(frozen=True)
class Imported:
    """By `kind/name`: what is new, and what was there."""

    new: tuple[str, ...]
    known: tuple[str, ...]


def export_entries(file: Path, chosen: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Writes the file whole or not at all; gives what is in it: an entry that goes away meanwhile is left out."""
    listed, members, kept = [], [], []
    for one in chosen:
        found = {name_in(one, path): path for root in one.paths for path in files_of(root) if path.suffix != ".lock"}
        try:
            about = {name: [path.stat().st_size, sha256(path)] for name, path in found.items()}
        except FileNotFoundError:
            continue
        listed.append({"kind": one.kind.name, "name": one.name, "files": about})
        members += [(f"{one.kind.name}/{name}", path) for name, path in found.items()]
        kept.append(one)
    head = json.dumps({"kind": MARK, "format": FORMAT, "graft": graft.__version__, "entries": listed}).encode()
    with disk_errors(file), atomic_file(file) as partial, tarfile.open(partial, "w") as bundle:
        add(bundle, LIST, io.BytesIO(head), len(head))
        for name, path in members:
            with path.open("rb") as source:
                add(bundle, name, source, path.stat().st_size)
    return kept


def name_in(one: CacheEntry, path: Path) -> str:
    return path.relative_to(one.kind.folder()).as_posix()


def add(bundle: tarfile.TarFile, name: str, source: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    bundle.addfile(member, source)


def is_bundle(file: Path) -> bool:
    """Whether the file begins as one of graft's; it may be damaged all the same."""
    with file.open("rb") as opened:
        return opened.read(len(LIST)) == LIST.encode()


def import_bundle(file: Path) -> Imported:
    """Raises ArtifactError at the first thing that is wrong; entries before it are there, whole."""
    new, known = [], []
    with opened_bundle(file) as bundle:
        for about in read_list(file, bundle):
            kind, name, files = checked_entry(file, about)
            (known if is_there(kind, files) else new).append(f"{kind.name}/{name}")
            put_entry(file, bundle, kind, name, files)
    return Imported(tuple(new), tuple(known))


@contextmanager
def opened_bundle(file: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(file, "r:") as bundle:
            yield bundle
    except FileNotFoundError as error:
        raise ArtifactError(file, "does not exist; `graft cache export FILE` writes one") from error
    except (tarfile.TarError, EOFError) as error:
        raise ArtifactError(file, f"is no bundle of graft's caches, or is damaged ({error})") from error


def read_list(file: Path, bundle: tarfile.TarFile) -> list[Any]:
    first = bundle.next()
    if first is None or first.name != LIST or not first.isreg() or first.size > LARGEST_LIST:
        raise ArtifactError(file, f"is no bundle of graft's caches: it does not begin with {LIST}")
    content = bundle.extractfile(first)
    assert content is not None
    try:
        data = json.loads(content.read())
        if data["kind"] != MARK or data["format"] != FORMAT:
            raise ArtifactError(file, f"has format {data.get('format')}, but this graft reads {FORMAT}")
        return list(data["entries"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(file, f"has a damaged {LIST} ({type(error).__name__}); copy it again") from error


def checked_entry(file: Path, about: Any) -> tuple[CacheKind, str, dict[str, tuple[int, str]]]:
    """The kind, the name, and size and sha256 of each file; no name leads out of the kind's folder."""
    try:
        kind = next(kind for kind in KINDS if kind.name == about["kind"])
        name, files = about["name"], {path: (int(size), str(sha)) for path, (size, sha) in about["files"].items()}
        sound = all(NAME.fullmatch(part) for path in files for part in path.split("/")) and NAME.fullmatch(name)
        if not sound or not all(path.split("/")[0] in (name, Path(path).name) for path in files):
            raise ValueError(name)
    except (StopIteration, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(file, f"lists an entry that no cache of graft's has ({error})") from error
    return kind, name, files


def is_there(kind: CacheKind, files: dict[str, Any]) -> bool:
    return all((kind.folder() / path).exists() for path in files)


def put_entry(
    file: Path, bundle: tarfile.TarFile, kind: CacheKind, name: str, files: dict[str, tuple[int, str]]
) -> None:
    """From the next members of the bundle, in the order of its list."""
    folder = kind.folder()
    if not any("/" in path for path in files):
        for path, about in files.items():
            content = member_content(file, bundle, f"{kind.name}/{path}", about)
            if not (folder / path).exists():
                with disk_errors(folder / path), atomic_file(folder / path) as partial:
                    partial.write_bytes(content)
        return
    if (folder / name).exists():
        for path, about in files.items():
            member_content(file, bundle, f"{kind.name}/{path}", about)
        return
    with atomic_folder(folder / name) as temporary:
        for path, about in files.items():
            target = temporary / path.removeprefix(f"{name}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(member_content(file, bundle, f"{kind.name}/{path}", about))


def member_content(file: Path, bundle: tarfile.TarFile, name: str, about: tuple[int, str]) -> bytes:
    member = bundle.next()
    if member is None or member.name != name or not member.isreg() or member.size != about[0]:
        raise ArtifactError(file, f"is truncated or damaged: {name} is not where its list has it; copy it again")
    opened = bundle.extractfile(member)
    assert opened is not None
    content = opened.read()
    if hashlib.sha256(content).hexdigest() != about[1]:
        raise ArtifactError(file, f"is damaged: {name} has another sha256; copy it again")
    return content
