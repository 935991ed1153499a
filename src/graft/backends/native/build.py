"""From C++ to a shared object: compiled once, kept by the fingerprint of everything that it depends on."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graft.backends.native.cpu import cpu_features
from graft.errors import CompilerFailed, DiskFull, NoCompiler
from graft.files import cache_dir, is_disk_full

ROOT = Path(__file__).parents[2]  # headers are named from here
COMPILERS = ("c++", "g++", "clang++")
# no -ffast-math: NaN must stay NaN, and sums keep their order
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
EXTRA = "GRAFT_CXXFLAGS"  # more flags: -fsanitize=address, -DGRAFT_ISA_PORTABLE
FIRST_LINES = 12  # of what a compiler that failed said


@dataclass(frozen=True)
class Built:
    """A shared object, where its source lies, and whether it was compiled just now."""

    path: Path
    source: Path
    compiled: bool


def find_compiler() -> list[str]:
    """The command of CXX, or the first compiler on the path."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [[name] for name in COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise NoCompiler(given[0] if given else None, COMPILERS)


def flags() -> list[str]:
    own = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [*FLAGS, own, f"-I{ROOT}", *shlex.split(os.environ.get(EXTRA, ""))]


@cache
def version(compiler: tuple[str, ...]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}"


def headers() -> list[Path]:
    return sorted([*(ROOT / "ops").rglob("*.h"), *(ROOT / "backends").rglob("*.h")])


def fingerprint(source: str, compiler: list[str]) -> str:
    """Source, headers, compiler, flags and CPU: a change of any gives another name, so that no old object is met."""
    digest = hashlib.blake2b(digest_size=16)
    parts = [source, version(tuple(compiler)), *compiler, *flags(), cpu_features()]
    for part in [*parts, *(path.read_text() for path in headers())]:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def build(source: str) -> Built:
    """The shared object of a source, from the cache or compiled now. A second process waits for the first."""
    compiler = find_compiler()
    folder, key = cache_dir() / "native", fingerprint(source, compiler)
    made, text = folder / f"{key}.so", folder / f"{key}.cpp"
    if made.exists():
        return Built(made, text, compiled=False)
    with disk_errors(made):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{key}.lock"):
            if made.exists():
                return Built(made, text, compiled=False)
            write(text, source)
            compile_to(compiler, text, made)
    return Built(made, text, compiled=True)


def write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def compile_to(compiler: list[str], source: Path, target: Path) -> None:
    """`target` appears whole or not at all."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        done = subprocess.run(
            [*compiler, *flags(), str(source), "-o", str(partial)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = f"{done.stderr}{done.stdout}".strip()
            if "No space left on device" in said:
                raise DiskFull(str(target), said.splitlines()[0])
            raise CompilerFailed(shlex.join(compiler), str(source), "\n".join(said.splitlines()[:FIRST_LINES]))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_disk_full(error) or isinstance(error, (PermissionError, FileNotFoundError, NotADirectoryError)):
            raise DiskFull(str(path), str(error)) from error
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; a killed one lets go. Where there are no such locks, both compile the same file."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load(source: str) -> tuple[ctypes.CDLL, Built]:
    """The library of a source. A cached object that does not load is compiled again, once."""
    built = build(source)
    try:
        return ctypes.CDLL(str(built.path)), built
    except OSError:
        if built.compiled:
            raise
        built.path.unlink(missing_ok=True)
        built = build(source)
        return ctypes.CDLL(str(built.path)), built
