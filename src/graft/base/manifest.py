"""Folders that vouch for themselves: manifest.json names every file with its size and sha256, and has a checksum.

Nothing of such a folder is used before it was held against the manifest. A file of many gigabytes is checked in
parts, by several threads, while others do something else (`OpenFolder`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.base.errors import ArtifactError
from graft.base.files import locked_folder

MANIFEST = "manifest.json"
PART = 1 << 26  # bytes that are hashed at once
READ = 1 << 20
LARGEST = 1 << 24  # bytes of a manifest: one that is longer is none of graft's
OWN_KEYS = ("kind", "format", "files", "sha256")  # that write_manifest gives a manifest
AGAIN = "copy the folder again or save it again"


@dataclass(frozen=True)
class FolderKind:
    """What `kind` and `format` a manifest must have; `noun`, `made_by` and `again` are for messages."""

    mark: str
    format: int
    noun: str
    made_by: str
    again: str


def checksum(manifest: Mapping[str, Any]) -> str:
    """Over everything in the manifest but the checksum itself."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, content: Mapping[str, Any], kind: FolderKind) -> None:
    """Vouches for every file that is in the folder now."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    named = {path.relative_to(folder).as_posix(): fingerprint(path) for path in files}
    manifest = {"kind": kind.mark, "format": kind.format, **content, "files": named}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"sha256": checksum(manifest)}, indent=1))


def fingerprint(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    with file.open("rb") as opened, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        hashes = threads.map(lambda start: part_hash(opened.fileno(), start, size), starts(size))
        return {"bytes": size, "sha256": list(hashes)}


def starts(size: int) -> range:
    return range(0, max(size, 1), PART)


def part_hash(descriptor: int, start: int, size: int) -> str:
    digest, end = hashlib.sha256(), min(start + PART, size)
    while start < end:
        chunk = os.pread(descriptor, min(READ, end - start), start)
        if not chunk:
            break
        digest.update(chunk)
        start += len(chunk)
    return digest.hexdigest()


def parse_manifest(file: Path, text: bytes, kind: FolderKind) -> dict[str, Any]:
    """The manifest of a folder that this graft can read."""
    try:
        manifest = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(file, f"is damaged ({error}); {AGAIN}") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != kind.mark:
        raise ArtifactError(file, f"is not the manifest of {kind.noun}, or is damaged")
    check_format(file, manifest.get("format"), manifest.get("versions"), kind)
    if manifest.get("sha256") != checksum(manifest):
        raise ArtifactError(file, f"was changed after it was saved (its checksum is another); {kind.again}")
    return manifest


def check_format(file: Path, found: object, versions: object, kind: FolderKind) -> None:
    if found == kind.format:
        return
    by = versions.get("graft") if isinstance(versions, dict) else None
    saved = f"has format {found} (saved by graft {by or 'of an unknown version'}), but this graft reads {kind.format}"
    if isinstance(found, int) and found > kind.format:
        raise ArtifactError(file, f"{saved}; update graft, or {kind.again} with this one")
    raise ArtifactError(file, f"{saved}; {kind.again} with this graft")


def is_marked(folder: Path, kind: FolderKind) -> bool:
    """Whether the folder says that it is of this kind; it may be damaged all the same."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            return f'"kind": "{kind.mark}"'.encode() in file.read(READ)
    except OSError:
        return False


class OpenFolder:
    """A folder whose files were all opened at once: it stays as it was then, whoever replaces it meanwhile.

    Files are held against the manifest by threads; `take` gives the descriptor of one that was found right.
    """

    def __init__(self, path: Path, kind: FolderKind) -> None:
        self.path, self.kind = path, kind
        self.descriptors: dict[str, int] = {}
        self.checks: dict[str, list[Future[str]]] = {}
        self.threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "graft-check")
        try:
            self.manifest = self.opened()
        except BaseException:
            self.close()
            raise

    def opened(self) -> dict[str, Any]:
        """Opens what the manifest names. A folder that is replaced meanwhile is opened again."""
        for last in (False, False, True):
            identity = self.identity()
            try:
                return self.open_all()
            except ArtifactError:
                self.close_files()
                with suppress(OSError), locked_folder(self.path.parent):
                    pass  # whoever puts another folder there is done now
                if last or identity == self.identity():
                    raise
        raise AssertionError("the last attempt returns or raises")

    def identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def open_all(self) -> dict[str, Any]:
        if not self.path.exists():
            raise ArtifactError(self.path, f"does not exist; {self.kind.made_by}")
        if not self.path.is_dir():
            raise ArtifactError(self.path, f"is a file, but {self.kind.noun} is a folder; {self.kind.made_by}")
        if not (self.path / MANIFEST).is_file():
            raise ArtifactError(
                self.path, f"has no {MANIFEST}, so it is not {self.kind.noun}, or not all of it is here"
            )
        with (self.path / MANIFEST).open("rb") as file:
            manifest = parse_manifest(self.path / MANIFEST, file.read(LARGEST), self.kind)
        for name, recorded in manifest["files"].items():
            self.open_file(name, recorded["bytes"])
        return manifest

    def open_file(self, name: str, size: int) -> None:
        file = self.locate(name)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ArtifactError(self.path / MANIFEST, f"names {name!r}, which is not inside of the folder")
        try:
            descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            why = "it is a link, and links are not followed" if error.errno == errno.ELOOP else error.strerror
            raise ArtifactError(file, f"cannot be opened ({why}); {AGAIN}") from error
        self.descriptors[name] = descriptor
        found = os.fstat(descriptor).st_size
        if found != size:
            what = "truncated" if found < size else "longer than it was"
            raise ArtifactError(file, f"is {what}: {found} bytes instead of {size}; {AGAIN}")

    def locate(self, name: str) -> Path:
        return self.path / name

    def whole_name(self, name: str) -> str:
        """Under which name the manifest has a file that is asked for."""
        return name

    def is_needed(self, name: str) -> bool:
        """Whether a file of the manifest is one that may be asked for here."""
        return name in self.manifest["files"]

    def start_checks(self) -> None:
        """The largest files last: what is needed first is short."""
        files = self.manifest["files"]
        for name in sorted(filter(self.is_needed, files), key=lambda name: files[name]["bytes"]):
            size = files[name]["bytes"]
            self.checks[name] = [
                self.threads.submit(part_hash, self.descriptors[name], start, size) for start in starts(size)
            ]

    def take(self, name: str) -> int:
        """The descriptor of a file that is what the manifest says; waits for its check."""
        name = self.whole_name(name)
        if name not in self.manifest["files"]:
            raise ArtifactError(self.path, f"has no {name}; {AGAIN}")
        if not self.checks:
            self.start_checks()
        if [check.result() for check in self.checks[name]] != self.manifest["files"][name]["sha256"]:
            raise ArtifactError(self.path / name, f"was changed after it was saved (its sha256 is another); {AGAIN}")
        return self.descriptors[name]

    def checked_path(self, name: str) -> Path:
        """A path for those who take nothing else: of the file that was checked, also where another folder is in this
        one's place by now (Linux)."""
        opened = Path(f"/proc/self/fd/{self.take(name)}")
        return opened if opened.exists() else self.path / name

    def read(self, name: str) -> bytes:
        descriptor, size = self.take(name), self.manifest["files"][self.whole_name(name)]["bytes"]
        found = bytearray()
        while len(found) < size and (chunk := os.pread(descriptor, size - len(found), len(found))):
            found += chunk
        return bytes(found)

    def text(self, name: str) -> str:
        return self.read(name).decode()

    def names(self, folder: str) -> list[str]:
        """The files in a folder of it."""
        return sorted(name for name in self.manifest["files"] if name.startswith(f"{folder}/"))

    def close_files(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors = {}

    def close(self) -> None:
        """No more than what was mapped stays."""
        self.threads.shutdown(cancel_futures=True)
        self.close_files()


class OpenCheckpoint(OpenFolder):
    """The files of a checkpoint that a folder refers to, held against what the folder's own manifest says of them."""

    def __init__(self, path: Path, files: Mapping[str, Any], kind: FolderKind) -> None:
        self.files = files
        super().__init__(path, kind)

    def open_all(self) -> dict[str, Any]:
        if not self.path.is_dir():
            raise ArtifactError(
                self.path, "is the checkpoint whose weights are used, and is not there; put it back, or compile the"
                " model again (--with-weights makes a folder that needs no checkpoint)",
            )  # fmt: skip
        for name, recorded in self.files.items():
            self.open_file(name, recorded["bytes"])
        return {"files": self.files}

    def locate(self, name: str) -> Path:
        return (self.path / name).resolve()  # the Hub's own cache is a folder of links
