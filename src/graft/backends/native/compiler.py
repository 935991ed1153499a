"""The C++ compiler: which one, with what flags, and everything that the objects it makes depend on."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

from graft.backends.native.cpu import cpu_features
from graft.base.errors import NoCompiler

ROOT = Path(__file__).parents[2]  # headers are named from here
COMPILERS = ("c++", "g++", "clang++")
# no -ffast-math: NaN must stay NaN, and sums keep their order
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread")
EXTRA = "GRAFT_CXXFLAGS"  # more flags: -fsanitize=address, -DGRAFT_ISA_PORTABLE


def find_compiler() -> list[str]:
    """The command of CXX, or the first compiler on the path."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [[name] for name in COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    raise NoCompiler(given[0] if given else None, COMPILERS)


def flags(compiler: list[str]) -> list[str]:
    arm = platform.machine() in ("aarch64", "arm64")
    own = ["-mcpu=native" if arm else "-march=native"]
    if arm and is_gcc(compiler):
        own.append("-fno-schedule-insns")  # loads stay in the order written: benchmarks/native_linear.py
    return [*FLAGS, *own, f"-I{ROOT}", *shlex.split(os.environ.get(EXTRA, ""))]


def is_gcc(compiler: list[str]) -> bool:
    return "Free Software Foundation" in version(tuple(compiler))


@cache
def version(compiler: tuple[str, ...]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}"


def headers() -> list[Path]:
    return sorted([*(ROOT / "ops").rglob("*.h"), *(ROOT / "backends").rglob("*.h")])


def outside_headers(source: str) -> list[Path]:
    """Of kernels of plugins, which a source names by their whole paths: all that lie beside them."""
    folders = {Path(name).parent for name in re.findall(r'^#include "(/[^"]+)"', source, re.MULTILINE)}
    return sorted(path for folder in folders for path in folder.rglob("*.h"))


def fingerprint(source: str, compiler: list[str]) -> str:
    """Source, headers, compiler, flags and CPU: a change of any gives another name, so that no old object is met."""
    digest = hashlib.blake2b(digest_size=16)
    parts = [source, version(tuple(compiler)), *compiler, *flags(compiler), cpu_features()]
    for part in [*parts, *(path.read_text() for path in (*headers(), *outside_headers(source)))]:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()
