"""From C++ to a shared object: compiled once, kept by the fingerprint of everything that it depends on.

    <cache directory>/native/<fingerprint>.cpp, .so     the step of a graph
    <cache directory>/native/<fingerprint>.o            its kernels, which other graphs with the same ones share

GRAFT_NATIVE_CACHE_DIR names another folder for these files. Where it cannot be written, a temporary one serves.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from graft.backends.native.compiler import find_compiler, fingerprint, flags
from graft.base.caches import NATIVE, note_use
from graft.base.errors import CannotLoad, CompilerFailed, DiskFull
from graft.base.files import atomic_file, disk_errors, write_whole

FIRST_LINES = 12  # of what a compiler that failed said


@dataclass(frozen=True)
class Source:
    """C++ of a step, and of the kernels that it calls: they depend on no graph, and take longer to compile."""

    step: str
    kernels: str = ""


@dataclass(frozen=True)
class Built:
    """A shared object, where its source lies, and whether it was compiled just now. `note`: why not in the cache."""

    path: Path
    source: Path
    compiled: bool
    note: str = ""


def build(source: Source) -> Built:
    """The shared object of a source, from the cache or compiled now. A second process waits for the first."""
    compiler = find_compiler()
    try:
        return build_in(NATIVE.folder(), source, compiler)
    except DiskFull as error:
        with disk_errors(Path(tempfile.gettempdir())):
            folder = Path(tempfile.mkdtemp(prefix="graft-native-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        built = build_in(folder, source, compiler)
        return Built(built.path, built.source, built.compiled, f"compiled at every start, because {error}")


def build_in(folder: Path, source: Source, compiler: list[str]) -> Built:
    key = fingerprint(f"{source.step}\0{source.kernels}", compiler)
    made, text = folder / f"{key}.so", folder / f"{key}.cpp"
    if made.exists():
        note_use(made)
        return Built(made, text, compiled=False)
    with disk_errors(made):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{key}.lock"):
            if made.exists():
                return Built(made, text, compiled=False)
            compile_all(folder, source, compiler, text, made)
    note_use(made)
    return Built(made, text, compiled=True)


def compile_all(folder: Path, source: Source, compiler: list[str], text: Path, made: Path) -> None:
    """Step and kernels at the same time, then both together."""
    write_whole(text, source.step)
    if not source.kernels:
        return compile_to(compiler, ["-shared"], [text], made)
    part = made.with_suffix(f".{os.getpid()}.o")
    try:
        with ThreadPoolExecutor(1) as other:
            kernels = other.submit(kernel_object, folder, source.kernels, compiler)
            compile_to(compiler, ["-c"], [text], part)
        compile_to(compiler, ["-shared"], [part, kernels.result()], made)
    finally:
        part.unlink(missing_ok=True)


def kernel_object(folder: Path, kernels: str, compiler: list[str]) -> Path:
    key = fingerprint(kernels, compiler)
    made, text = folder / f"{key}.o", folder / f"{key}.cpp"
    if not made.exists():
        with locked(folder / f"{key}.lock"):
            if not made.exists():
                write_whole(text, kernels)
                compile_to(compiler, ["-c"], [text], made)
    note_use(made)
    return made


def compile_to(compiler: list[str], how: list[str], sources: list[Path], target: Path) -> None:
    """`target` appears whole or not at all."""
    with atomic_file(target) as partial:
        command = [*compiler, *flags(compiler), *how, *map(str, sources), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = f"{done.stderr}{done.stdout}".strip() or f"nothing, and returned {done.returncode}"
            if "No space left on device" in said:
                raise DiskFull(str(target), said.splitlines()[0])
            first = "\n".join(said.splitlines()[:FIRST_LINES])
            raise CompilerFailed(shlex.join(compiler), str(sources[0]), first)


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


def load(source: Source) -> tuple[ctypes.CDLL, Built]:
    """The library of a source. A cached object that does not load is compiled again, once."""
    built = build(source)
    if not built.compiled:
        try:
            return ctypes.CDLL(str(built.path)), built
        except OSError:  # cut short, or of another machine: compiled again, and what is wrong then is told
            built.path.unlink(missing_ok=True)
            built = build(source)
    try:
        return ctypes.CDLL(str(built.path)), built
    except OSError as error:
        raise CannotLoad(str(built.path), str(error)) from error
