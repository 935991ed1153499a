"""Files that are whole or not there: atomic files, atomic folders and checksums."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from graft.base.errors import DiskFull
from graft.base.half_written import partial_path, remove, remove_stale, writer

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
def atomic_file(target: Path) -> Iterator[Path]:
    """A path to write to. What lies there takes `target`'s place when the block ends well; otherwise `target` stays
    as it was, and nothing remains beside it. The path ends as `target` does: writers read the format from it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target)
    partial = partial_path(target)
    try:
        yield partial
        partial.replace(target)
    finally:  # Ctrl-C included
        partial.unlink(missing_ok=True)


@contextmanager
def disk_errors(
    target: Path,
    refuse: Callable[[Exception], Exception] | None = None,
    errors: tuple[type[Exception], ...] = (OSError,),
) -> Iterator[None]:
    """What keeps `target` from being written, as an error for the user: DiskFull, or what `refuse` makes of an error
    that is not for want of space."""
    try:
        yield
    except errors as error:
        if refuse is None or is_disk_full(error):
            raise write_failed(str(target), error) from error
        raise refuse(error) from error


def write_whole(target: Path, content: str | bytes, refuse: Callable[[Exception], Exception] | None = None) -> None:
    """Writes a file, text as UTF-8, or leaves all as it was."""
    data = content.encode() if isinstance(content, str) else content
    with disk_errors(target, refuse), atomic_file(target) as partial:
        partial.write_bytes(data)


@contextmanager
def atomic_folder(target: Path, check: Callable[[], None] | None = None) -> Iterator[Path]:
    """A folder to fill; it appears at `target` when the block ends well, and nothing remains when it does not.

    Of several processes that write the same folder, each puts a whole one there, one after the other. check: raises,
    at that moment, where what lies there by now must stay.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        temporary = partial_path(target)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise write_failed(str(target), error) from error
    try:
        yield temporary
        with locked_folder(target.parent):
            if check is not None:
                check()
            put_in_place(temporary, target)
    except BaseException as error:  # Ctrl-C included: what was half written goes, and the error goes on
        shutil.rmtree(temporary, ignore_errors=True)
        if is_disk_full(error):
            raise write_failed(str(target), error) from error
        raise


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """One process at a time puts something into this folder; a killed one lets go. No file is made for it."""
    try:
        import fcntl
    except ImportError:  # no such locks here
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_together(files: Mapping[Path, str]) -> None:
    """Writes every file, or none: all are first written beside their places; what was there comes back on error."""
    partial = {target: partial_path(target) for target in files}
    before = {target: target.read_bytes() if target.exists() else None for target in files}
    fresh = new_folders(files)
    try:
        for target, text in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial[target].write_bytes(text.encode())
        for target, path in partial.items():
            path.replace(target)
    except BaseException as error:  # Ctrl-C included: all is as it was, and the error goes on
        for target, path in partial.items():
            if not target.parent.is_dir():
                continue  # it could not be made, so nothing was written there
            path.unlink(missing_ok=True)
            content = before[target]
            if content is not None:
                target.write_bytes(content)
            else:
                target.unlink(missing_ok=True)
        for folder in fresh:
            if folder.is_dir():
                folder.rmdir()
        if isinstance(error, OSError):
            raise write_failed(str(error.filename or next(iter(files))), error) from error
        raise


def new_folders(files: Iterable[Path]) -> list[Path]:
    """The folders that are made for `files`, the deepest first."""
    found = {folder for target in files for folder in target.parents if not folder.exists()}
    return sorted(found, key=lambda folder: len(folder.parts), reverse=True)


def put_in_place(temporary: Path, target: Path) -> None:
    """Where both cannot change places at once, what was at `target` is moved aside first, and comes back if the new
    folder cannot take its place."""
    replaced = target.exists()
    if replaced and exchanged(temporary, target):
        remove(temporary)  # what was there; `remove_stale` takes it away where this process is killed
        return
    old = target.with_name(f".{target.name}.{writer()}.old")
    if replaced:
        target.rename(old)
    try:
        temporary.rename(target)
    except BaseException:
        if replaced:
            old.rename(target)
        raise
    if replaced:
        remove(old)


def exchanged(one: Path, other: Path) -> bool:
    """Whether two paths changed places in one call of the system (Linux): neither is missing at any time, whoever is
    killed when."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def drop_folder(path: Path) -> None:
    """Gone at once for those who look for it; one who has its files open keeps them."""
    aside = path.with_name(f".{path.name}.{writer()}.old")
    with locked_folder(path.parent):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_failed(path: str, error: BaseException) -> DiskFull:
    """Space is lacking, or the folder is not one to write to."""
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        location = "The folder cannot be written: choose another (GRAFT_CACHE_DIR for the cache) or change its rights"
        return DiskFull(path, str(error), location)
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
