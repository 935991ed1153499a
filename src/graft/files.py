"""Files that are whole or not there: atomic folders and checksums."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from graft.errors import DiskFull

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EISDIR)
Progress = Callable[[str, int, int], None]  # what is going on, how much is done, how much there is


def cache_dir() -> Path:
    """GRAFT_CACHE_DIR, or `graft` in the user's cache directory."""
    given = os.environ.get("GRAFT_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "graft"


def cache_folder(name: str, variable: str) -> Path:
    """A folder of the cache directory, or what the environment variable names instead."""
    named = os.environ.get(variable)
    return Path(named) if named else cache_dir() / name


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it appears at `target` when the block ends well, and nothing remains when it does not."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise write_failed(str(target), error) from error
    try:
        yield temporary
        put_in_place(temporary, target)
    except BaseException as error:  # Ctrl-C included: what was half written goes, and the error goes on
        shutil.rmtree(temporary, ignore_errors=True)
        if is_disk_full(error):
            raise write_failed(str(target), error) from error
        raise


def write_together(files: Mapping[Path, str]) -> None:
    """Writes every file, or none: all are first written beside their places; what was there comes back on error."""
    partial = {target: target.with_name(f".{target.name}.{os.getpid()}.partial") for target in files}
    before = {target: target.read_bytes() if target.exists() else None for target in files}
    fresh = new_folders(files)
    try:
        for target, text in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial[target].write_text(text)
        for target, path in partial.items():
            path.replace(target)
    except BaseException as error:  # Ctrl-C included: all is as it was, and the error goes on
        for target, path in partial.items():
            path.unlink(missing_ok=True)
            content = before[target]
            if content is not None:
                target.write_bytes(content)
            else:
                target.unlink(missing_ok=True)
        for folder in fresh:
            folder.rmdir()
        if isinstance(error, OSError):
            raise write_failed(str(error.filename or next(iter(files))), error) from error
        raise


def new_folders(files: Iterable[Path]) -> list[Path]:
    """The folders that are made for `files`, the deepest first."""
    found = {folder for target in files for folder in target.parents if not folder.exists()}
    return sorted(found, key=lambda folder: len(folder.parts), reverse=True)


def put_in_place(temporary: Path, target: Path) -> None:
    """What was at `target` is moved aside first and comes back if the new folder cannot take its place."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    replaced = target.exists()
    if replaced:
        target.rename(old)
    try:
        temporary.rename(target)
    except BaseException:
        if replaced:
            old.rename(target)
        raise
    if replaced:
        shutil.rmtree(old)


def remove_stale(target: Path) -> None:
    """Takes away what a killed process left behind."""
    for path in target.parent.glob(f".{target.name}.*.partial"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def write_failed(path: str, error: BaseException) -> DiskFull:
    """Space is lacking, or the folder is not one to write to."""
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        place = "The folder cannot be written: choose another (GRAFT_CACHE_DIR for the cache) or change its rights"
        return DiskFull(path, str(error), place)
    return DiskFull(path, str(error))


def is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error)  # safetensors wraps the error of the system as text


def sha256(path: Path, progress: Progress | None = None) -> str:
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(f"checking {path.name}", done, size)
    return digest.hexdigest()
