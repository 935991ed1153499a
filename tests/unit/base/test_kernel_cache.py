"""Triton's kernels in another cache: found there without being compiled. Compiled for a GPU that need not be here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig

import pytest
from triton.runtime import build

from graft.base.kernel_cache import GROUP, Recorder, adopt_platform, launcher_platform, seed, used_files

PROGRAM = """
import json, sys
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from graft.base.kernel_cache import cache_home, record, seed, used_files

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

box, mode = Path(sys.argv[1]), sys.argv[2]
recorder = record()
assert record() is recorder
if mode == "load":
    names = [str(path.relative_to(box)) for path in box.rglob("*") if path.is_file()]
    print(seed(names, lambda name: (box / name).read_bytes()))
source = ASTSource(fn=double, signature={"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 128})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert kernel.asm["cubin"]
print(len(recorder.used), len(recorder.made))
if mode == "save":
    for name, content in used_files(recorder).items():
        (box / name).parent.mkdir(parents=True, exist_ok=True)
        (box / name).write_bytes(content)
"""


def run(tmp_path, box, cache, mode, path=None):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / cache), "PATH": path or os.environ["PATH"]}
    environment.pop("TRITON_INTERPRET", None)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(box), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_a_carried_kernel_is_not_compiled_again(tmp_path):
    box = tmp_path / "box"
    box.mkdir()
    assert run(tmp_path, box, "first", "save") == ["1", "1"]
    suffixes = {path.suffix for path in box.rglob("*") if path.is_file()}
    assert ".cubin" in suffixes and ".ttir" not in suffixes
    assert run(tmp_path, box, "second", "load") == ["1", "1", "0"]  # one came, one is used, none is made


def test_lists_of_files_name_their_own_cache(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "KEY").mkdir(parents=True)
    (first / "KEY" / "k.cubin").write_bytes(b"code")
    (first / "KEY" / f"{GROUP}k.json").write_text(json.dumps({"child_paths": {"k.cubin": "/elsewhere/k.cubin"}}))
    recorder = Recorder()
    recorder.used.add("KEY")
    files = used_files(recorder, first)
    assert b"elsewhere" not in b"".join(files.values())
    assert seed(files, files.__getitem__, second) == 1
    listed = json.loads((second / "KEY" / f"{GROUP}k.json").read_text())["child_paths"]
    assert listed == {"k.cubin": str(second / "KEY" / "k.cubin")}
    assert seed(files, files.__getitem__, second) == 0  # what is there stays
    del files["KEY/k.cubin"]
    seed(files, files.__getitem__, tmp_path / "third")  # not whole, so that Triton compiles it
    assert not list(tmp_path.glob(f"third/KEY/{GROUP}*"))


LAUNCHER = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


def test_launchers_are_found_where_less_is_known_of_the_machine(tmp_path, monkeypatch):
    """Triton asks the program `file` for a part of their keys, and a slim machine has neither that nor a compiler."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "platform_key", lambda: "x86_64,Linux,64bit,ELF")
    include = [sysconfig.get_paths()["include"]]
    build.compile_module_from_src(LAUNCHER, "launcher", include_dirs=include)
    saved = launcher_platform()
    monkeypatch.setattr(build, "_build", None)  # no compiler
    monkeypatch.setattr(build, "platform_key", lambda: "x86_64,Linux,64bit,")
    with pytest.raises(TypeError):
        build.compile_module_from_src(LAUNCHER, "launcher", include_dirs=include)
    adopt_platform(saved)
    assert build.compile_module_from_src(LAUNCHER, "launcher", include_dirs=include).__name__ == "launcher"


@pytest.mark.parametrize("name", ["../x.so", "a/../b.so", "x.so", "/etc/x.so"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no file of a kernel"):
        seed([name], lambda _: b"", tmp_path)
    assert not list(tmp_path.iterdir())
