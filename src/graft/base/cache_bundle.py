"""Entries of graft's caches in one file, for another machine or another day.

A tar file: graft-cache.json first, which names every file with its size and sha256, then the files as
`<kind>/<name>/…`. What is imported is held against that list before it takes its place; entries that are there
already stay. A bundle may hold compiled code: import those of people whom you trust.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
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
LONGEST = 200  # bytes of a name: file systems have 255, and what is half written has more around it
PIECE = 1 << 22  # bytes that are copied at a time


@dataclass(frozen=True)
class Imported:
    """By `kind/name`: what is new, and what was there."""

    new: tuple[str, ...]
    known: tuple[str, ...]


class Changed(Exception):
    """What an entry had when it was listed is not there any more: another process took it away or wrote it anew."""


def export_entries(file: Path, chosen: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Writes the file whole or not at all; gives what is in it: an entry that goes away meanwhile is left out."""
    found = [(one, listed) for one in chosen if (listed := files_with_hashes(one)) is not None]
    while True:
        try:
            with disk_errors(file), atomic_file(file) as partial:
                write_bundle(partial, found)
            return [one for one, _ in found]
        except Changed as error:
            found = [(one, listed) for one, listed in found if one is not error.args[0]]


def files_with_hashes(one: CacheEntry) -> dict[Path, tuple[int, str]] | None:
    try:
        paths = [path for root in one.paths for path in files_of(root) if path.suffix != ".lock"]
        return {path: (path.stat().st_size, sha256(path)) for path in paths}
    except FileNotFoundError:
        return None


def write_bundle(partial: Path, found: Sequence[tuple[CacheEntry, dict[Path, tuple[int, str]]]]) -> None:
    """Raises Changed for an entry that is not as it was listed."""
    listed = [
        {
            "kind": one.kind.name,
            "name": one.name,
            "files": {name_in(one, p): list(about) for p, about in files.items()},
        }
        for one, files in found
    ]
    head = json.dumps({"kind": MARK, "format": FORMAT, "graft": graft.__version__, "entries": listed}).encode()
    with tarfile.open(partial, "w") as bundle:
        add(bundle, LIST, io.BytesIO(head), len(head))
        for one, files in found:
            for path, (size, _) in files.items():
                try:
                    source = path.open("rb")
                except FileNotFoundError as error:
                    raise Changed(one) from error
                with source:
                    if os.fstat(source.fileno()).st_size != size:
                        raise Changed(one)
                    add(bundle, f"{one.kind.name}/{name_in(one, path)}", source, size)


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
            (new if put_entry(file, bundle, kind, name, files) else known).append(f"{kind.name}/{name}")
    return Imported(tuple(new), tuple(known))


@contextmanager
def opened_bundle(file: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(file, "r:") as bundle:
            yield bundle
    except FileNotFoundError as error:
        raise ArtifactError(file, "does not exist; `graft cache export FILE` writes one") from error
    except (tarfile.TarError, EOFError, IsADirectoryError, PermissionError, ValueError, OverflowError) as error:
        raise ArtifactError(file, f"is no bundle of graft's caches, or is damaged ({error})") from error


def read_list(file: Path, bundle: tarfile.TarFile) -> list[Any]:
    first = bundle.next()
    if first is None or first.name != LIST or not is_plain(first) or first.size > LARGEST_LIST:
        raise ArtifactError(file, f"is no bundle of graft's caches: it does not begin with {LIST}")
    content = bundle.extractfile(first)
    assert content is not None
    try:
        data = json.loads(content.read())
        if data["kind"] != MARK or data["format"] != FORMAT:
            raise ArtifactError(file, f"has format {data.get('format')}, but this graft reads {FORMAT}")
        return list(data["entries"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(file, f"has a damaged {LIST} ({type(error).__name__}); copy it again") from error


def is_plain(member: tarfile.TarInfo) -> bool:
    """A file with its bytes: of a sparse one a few kilobytes may stand for gigabytes."""
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()


def checked_entry(file: Path, about: Any) -> tuple[CacheKind, str, dict[str, tuple[int, str]]]:
    """The kind, the name, and size and sha256 of each file: files of that name, or all in a folder of that name. No
    name leads out of the kind's folder."""
    try:
        kind = next(kind for kind in KINDS if kind.name == about["kind"])
        name, files = about["name"], {path: (int(size), str(sha)) for path, (size, sha) in about["files"].items()}
        sound = is_name(name) and all(is_name(path.split("/")[0]) for path in files)
        sound = sound and all(is_part(part) for path in files for part in path.split("/"))
        inside = [path.startswith(f"{name}/") for path in files]
        if not sound or not (all(inside) or not any("/" in path for path in files)):
            raise ValueError(name)
    except (StopIteration, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ArtifactError(file, f"lists an entry that no cache of graft's has ({error})") from error
    return kind, name, files


def is_name(name: str) -> bool:
    """Of an entry: hidden files are none."""
    return is_part(name) and not name.startswith(".")


def is_part(name: str) -> bool:
    """Of a path: the name of a file or folder."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"} and len(name.encode()) <= LONGEST


def put_entry(
    file: Path, bundle: tarfile.TarFile, kind: CacheKind, name: str, files: dict[str, tuple[int, str]]
) -> bool:
    """From the next members of the bundle, in the order of its list; whether anything of it is new here."""
    folder = kind.folder()
    if any("/" in path for path in files):
        if (folder / name).exists():
            for path, about in files.items():
                take_member(file, bundle, f"{kind.name}/{path}", about, None)
            return False
        with disk_errors(folder / name), atomic_folder(folder / name) as temporary:
            for path, about in files.items():
                target = temporary / path.removeprefix(f"{name}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as output:
                    take_member(file, bundle, f"{kind.name}/{path}", about, output)
        return True
    new = False
    for path, about in files.items():
        if (folder / path).exists():
            take_member(file, bundle, f"{kind.name}/{path}", about, None)
            continue
        with disk_errors(folder / path), atomic_file(folder / path) as partial, partial.open("wb") as output:
            take_member(file, bundle, f"{kind.name}/{path}", about, output)
        new = True
    return new


def take_member(
    file: Path, bundle: tarfile.TarFile, name: str, about: tuple[int, str], output: IO[bytes] | None
) -> None:
    """The next member, piece by piece, held against its size and sha256; output: None where it is there already."""
    member = bundle.next()
    if member is None or member.name != name or not is_plain(member) or member.size != about[0]:
        raise ArtifactError(file, f"is truncated or damaged: {name} is not where its list has it; copy it again")
    opened, digest = bundle.extractfile(member), hashlib.sha256()
    assert opened is not None
    while piece := opened.read(PIECE):
        digest.update(piece)
        if output is not None:
            output.write(piece)
    if digest.hexdigest() != about[1]:
        raise ArtifactError(file, f"is damaged: {name} has another sha256; copy it again")
