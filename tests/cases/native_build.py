"""Compiles a test's C++ with the native headers, for every instruction set that this machine can run.

Entries have one signature, `extern "C" void name(void** arrays, const int64_t* numbers)`. On this machine's own
instruction sets they are called with ctypes; the other family's run as a program under qemu-user, where a cross
compiler and qemu are installed, with the arrays in a file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import graft
from graft.backends.native.build import locked

OPS = Path(graft.__file__).parent / "ops"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-Wall", "-Wextra", "-Werror",
         "-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # fmt: skip  # the last two: GCC's own AVX-512 header
INCLUDE = [f"-I{OPS / 'native'}", f"-I{OPS / 'fused_linear'}"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-march=cascadelake"]
AMX = ["-march=sapphirerapids"]
EMULATED = Path(__file__).with_name("amx_emulated.h")
MAIN = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
%(entries)s
static void take(void* to, size_t bytes, FILE* file) { if (fread(to, 1, bytes, file) != bytes) abort(); }
int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  int64_t head[3];
  take(head, sizeof head, file);
  std::vector<int64_t> numbers(head[1] + 1), sizes(head[2]);
  take(numbers.data(), 8 * head[1], file);
  take(sizes.data(), 8 * head[2], file);
  std::vector<void*> arrays;
  for (int64_t size : sizes) {
    arrays.push_back(aligned_alloc(64, (size + 63) / 64 * 64));
    take(arrays.back(), size, file);
  }
  void (*const all[])(void**, const int64_t*) = {%(names)s};
  all[head[0]](arrays.data(), numbers.data());
  file = fopen(names[2], "wb");
  for (size_t i = 0; i < arrays.size(); i++) fwrite(arrays[i], 1, sizes[i], file);
  return fclose(file);
}
"""


@dataclass(frozen=True)
class Target:
    isa: str
    compiler: str
    flags: tuple[str, ...]
    runner: tuple[str, ...] = ()  # the command that runs a compiled program; empty: a library, called here


def cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    return set(path.read_text().split()) if path.exists() else set()


def own_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def targets() -> list[Target]:
    """What this machine can run."""
    own = own_compiler()
    found = []
    if own:
        found.append(Target("portable", own, ("-DGRAFT_ISA_PORTABLE", "-march=native")))
    if own and platform.machine() == "aarch64":
        found.append(Target("neon", own, ("-DGRAFT_ISA_NEON", "-march=native")))
    if own and platform.machine() == "x86_64" and {"avx2", "fma", "f16c"} <= cpu_flags():
        found.append(Target("avx2", own, ("-DGRAFT_ISA_AVX2", *AVX2)))
    if own and platform.machine() == "x86_64" and {"avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= cpu_flags():
        found.append(Target("avx512", own, ("-DGRAFT_ISA_AVX512", *AVX512)))
    cross, qemu = shutil.which("x86_64-linux-gnu-g++"), shutil.which("qemu-x86_64")
    if platform.machine() != "x86_64" and cross and qemu:
        found.append(
            Target("avx2", cross, ("-DGRAFT_ISA_AVX2", *AVX2), (qemu, "-cpu", "max", "-L", "/usr/x86_64-linux-gnu"))
        )
    return found


def with_amx() -> list[Target]:
    """Products in bfloat16 alone, with AMX: emulated on every machine, and on those that have it."""
    own = own_compiler()
    if own is None:
        return []
    found = [Target("emulated", own, ("-DONLY_BF16", "-include", str(EMULATED), "-march=native"))]
    if platform.machine() == "x86_64" and {"amx_tile", "amx_bf16", "avx512_vnni"} <= cpu_flags():
        found.append(Target("amx", own, ("-DONLY_BF16", "-DGRAFT_ISA_AVX512", *AMX)))
    return found


def sanitized(kinds: str) -> Target | None:
    """This machine's widest instruction set under sanitizers, or None where they do not work: a compiler without
    them, or an operating system whose address space their runtime does not expect."""
    own = own_compiler()
    flags = (f"-fsanitize={kinds}", "-fno-sanitize-recover=all", "-march=native", "-g", "-O1")
    with tempfile.TemporaryDirectory(prefix="graft-native-test-") as folder:
        probe = [own or "g++", *flags, "-x", "c++", "-", "-o", f"{folder}/probe"]
        if own is None or subprocess.run(probe, input=b"int main() {}", capture_output=True, check=False).returncode:
            return None
        if subprocess.run([f"{folder}/probe"], capture_output=True, check=False).returncode:
            return None
    return Target(kinds, own, flags, ("env", "ASAN_OPTIONS=detect_leaks=0", "TSAN_OPTIONS=halt_on_error=1"))


def every_target(widest: bool = False):
    """Parameters for a test: one for each instruction set, or one that is skipped. `widest`: the short run has one,
    for code that is dear to compile and made of operations that are tested for each."""
    reason = "no C++ compiler (g++ or clang++) on this machine"
    able = targets()
    left = [() if target is able[-1] or not widest else (pytest.mark.exhaustive,) for target in able]
    found = [pytest.param(target, id=target.isa, marks=marks) for target, marks in zip(able, left, strict=True)]
    return found or [pytest.param(None, id="none", marks=pytest.mark.skip(reason=reason))]


def built(source: str, command: list[str]) -> Path:
    """What the command makes of the source, compiled by whichever process of this run comes first."""
    key = hashlib.sha256("\0".join([source, *command]).encode()).hexdigest()[:24]
    folder = Path(os.environ["GRAFT_TEST_BUILDS"]) / key
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not (folder / "made").exists():
            (folder / "test.cpp").write_text(source)
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
    return folder / "made"


class Compiled:
    """The entries of one C++ source for one target."""

    def __init__(self, source: str, entries: tuple[str, ...], target: Target, flags: tuple[str, ...] = ()) -> None:
        self.target, self.entries = target, entries
        declared = "".join(f'extern "C" void {name}(void**, const int64_t*);\n' for name in entries)
        main = MAIN % {"entries": declared, "names": ", ".join(entries)} if target.runner else ""
        kind = [] if target.runner else ["-shared", "-fPIC"]
        more = shlex.split(os.environ.get("GRAFT_CXXFLAGS", ""))
        command = [target.compiler, *FLAGS, *more, *target.flags, *flags, *kind, *INCLUDE, "test.cpp", "-o", "made"]
        self.output = built(source + main, command)
        self.library = None if target.runner else ctypes.CDLL(str(self.output))

    def call(self, entry: str, arrays: list[np.ndarray], numbers: list[int]) -> None:
        """The arrays are changed in place."""
        assert all(array.flags.c_contiguous for array in arrays)
        if self.library is None:
            return self.run(entry, arrays, numbers)
        pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
        getattr(self.library, entry)(pointers, (ctypes.c_int64 * (len(numbers) + 1))(*numbers))
        return None

    def run(self, entry: str, arrays: list[np.ndarray], numbers: list[int]) -> None:
        head = np.array([self.entries.index(entry), len(numbers), len(arrays), *numbers, *[a.nbytes for a in arrays]])
        with tempfile.TemporaryDirectory(prefix="graft-native-test-") as folder:
            given, taken = Path(folder) / "given", Path(folder) / "taken"
            given.write_bytes(head.astype(np.int64).tobytes() + b"".join(a.tobytes() for a in arrays))
            command = [*self.target.runner, str(self.output), str(given), str(taken)]
            subprocess.run(command, check=True, timeout=300)
            left = taken.read_bytes()
        for array in arrays:
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(left[: array.nbytes], np.uint8)
            left = left[array.nbytes :]


@functools.cache
def compiled(source: str, entries: tuple[str, ...], target: Target, flags: tuple[str, ...] = ()) -> Compiled:
    return Compiled(source, entries, target, flags)
