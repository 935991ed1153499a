"""Compiling and keeping native code: once, by fingerprint, whole or not at all, and clear words when it cannot be."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from conftest import tiny
from graft import LLM
from graft.backends.native import build as native
from graft.backends.native import compiler as compilers
from graft.backends.native.build import Source
from graft.backends.native.cpu import allowed, available_cores, thread_count
from graft.base.errors import CannotLoad, CompilerFailed, DiskFull, NoCompiler, TooManyThreads, UsageError
from native_cases import needs_compiler, one_sequence

TEXT = 'extern "C" int answer() { return 42; }\n'
SOURCE = Source(TEXT)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GRAFT_NATIVE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def counted(tmp_path, monkeypatch) -> Path:
    """A compiler that notes every file it compiles; the notes."""
    log, script = tmp_path / "runs", tmp_path / "counting-c++"
    real = compilers.find_compiler()[0]
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo run >> {log};; esac\nexec {real} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return log


def runs(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


@needs_compiler
def test_a_second_start_compiles_nothing(cache, counted):
    library, first = native.load(SOURCE)
    assert library.answer() == 42 and first.compiled and runs(counted) == 1
    library, second = native.load(SOURCE)
    assert library.answer() == 42 and not second.compiled and runs(counted) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".cpp", ".lock", ".so"]
    assert second.source.read_text() == TEXT


@pytest.mark.exhaustive
@needs_compiler
def test_a_model_is_compiled_once(cache, counted):
    for _ in range(2):
        llm = LLM(tiny("llama"), backend="native", kv_cache_memory="8MiB")
        assert runs(counted) == 1
    assert any("from the cache" in note for note in llm.report.notes)
    source = next(path for path in cache.glob("*.cpp") if path.with_suffix(".so").exists()).read_text()
    assert "%fused_linear" in source and "model.layers.1.self_attn" in source and "team.barrier();" in source


@needs_compiler
def test_two_processes_at_once_compile_once(cache, counted):
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = native.load(SOURCE)[0].answer()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [42, 42]
    assert runs(counted) == 1
    assert not list(cache.glob(".*"))


@needs_compiler
def test_a_damaged_object_is_compiled_again(cache):
    for damage in (b"", b"not an object"):
        source = Source(
            f"// {damage!r}\n{TEXT}"
        )  # a file that this process has loaded already would not be read again
        native.build(source).path.write_bytes(damage)
        library, again = native.load(source)
        assert again.compiled and library.answer() == 42


@needs_compiler
def test_everything_that_matters_is_in_the_fingerprint(cache, monkeypatch):
    monkeypatch.delenv("GRAFT_CXXFLAGS", raising=False)
    compiler = compilers.find_compiler()
    names = {compilers.fingerprint(TEXT, compiler), compilers.fingerprint(TEXT + " ", compiler)}
    names.add(compilers.fingerprint(TEXT, [*compiler, "-g"]))
    monkeypatch.setattr(compilers, "cpu_features", lambda: "another CPU")
    names.add(compilers.fingerprint(TEXT, compiler))
    monkeypatch.setenv("GRAFT_CXXFLAGS", "-O1")
    names.add(compilers.fingerprint(TEXT, compiler))
    monkeypatch.setattr(compilers, "headers", list)
    names.add(compilers.fingerprint(TEXT, compiler))
    monkeypatch.setattr(compilers, "version", lambda _: "another version")
    names.add(compilers.fingerprint(TEXT, compiler))
    assert len(names) == 7


@needs_compiler
def test_a_compiler_that_fails_says_why(cache):
    with pytest.raises(CompilerFailed) as caught:
        native.build(Source("this is no C++\n"))
    assert "error" in str(caught.value) and str(cache) in str(caught.value) and "eager" in str(caught.value)
    assert not list(cache.glob("*.so")) and not list(cache.glob(".*"))


def test_no_compiler_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoCompiler, match="install g\\+\\+ or clang\\+\\+"):
        LLM(tiny("llama"), backend="native")
    monkeypatch.setenv("CXX", "/nowhere/c++ -O1")
    with pytest.raises(NoCompiler, match="CXX names '/nowhere/c\\+\\+'"):
        compilers.find_compiler()


@needs_compiler
def test_a_full_disk_leaves_nothing(cache, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskFull):
        native.build(SOURCE)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]
    monkeypatch.undo()


@needs_compiler
def test_two_graphs_share_their_kernels(cache, counted):
    for name in ("first", "second"):
        text = f'extern "C" int kernel(); extern "C" int answer() {{ return kernel() + {len(name)}; }}'
        library, _ = native.load(Source(text, 'extern "C" int kernel() { return 37; }'))
        assert library.answer() == 37 + len(name)
    assert len(list(cache.glob("*.o"))) == 1 and len(list(cache.glob("*.so"))) == 2
    with pytest.raises(CompilerFailed, match="no C"):
        native.build(Source(TEXT, "this is no C++ either\n"))
    assert len(list(cache.glob("*.so"))) == 2 and len(list(cache.glob("*.o"))) == 1


@needs_compiler
@pytest.mark.parametrize("name", ["file", "nowhere/at/all"])
def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").write_text("")
    monkeypatch.setenv("GRAFT_NATIVE_CACHE_DIR", str(tmp_path / name))
    library, built = native.load(SOURCE)
    assert library.answer() == 42 and built.compiled
    assert "compiled at every start" in built.note and str(tmp_path / name) in built.note
    monkeypatch.setattr(native.tempfile, "mkdtemp", full)
    with pytest.raises(DiskFull):
        native.build(SOURCE)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@needs_compiler
def test_an_object_that_does_not_load_is_a_clear_error(cache):
    with pytest.raises(CannotLoad, match=r"does not load: .*nobody_has_this"):
        native.load(Source('extern "C" int nobody_has_this(); int (*answer)() = nobody_has_this;'))


def test_the_number_of_threads(monkeypatch):
    monkeypatch.delenv("GRAFT_NUM_THREADS", raising=False)
    assert 1 <= thread_count() == available_cores() <= (os.cpu_count() or 1)
    for quota, cores in (("max 100000", 64), ("150000 100000", 2), ("1000 100000", 1), ("", 64)):
        assert allowed(quota, 64) == cores
    monkeypatch.setenv("GRAFT_NUM_THREADS", "1")
    assert thread_count() == 1
    monkeypatch.setenv("GRAFT_NUM_THREADS", str(available_cores() + 1))
    with pytest.raises(TooManyThreads, match="may use"):
        thread_count()
    for wrong in ("0", "two", "-1"):
        monkeypatch.setenv("GRAFT_NUM_THREADS", wrong)
        with pytest.raises(UsageError, match="number of threads"):
            thread_count()


@pytest.mark.exhaustive
@needs_compiler
def test_no_sum_depends_on_who_takes_a_chunk(monkeypatch):
    """Chunks go to whoever comes. How many threads there are divides attention in another way, which rounds."""
    monkeypatch.setenv("GRAFT_NUM_THREADS", "1")
    one = LLM(tiny("llama"), backend="native", kv_cache_memory="8MiB")
    monkeypatch.delenv("GRAFT_NUM_THREADS")
    many = LLM(tiny("llama"), backend="native", kv_cache_memory="8MiB")
    first, second, *others = (
        llm.engine.graph(*one_sequence(torch.arange(37)), *llm.engine.tensors)[0] for llm in (one, *[many] * 6)
    )
    assert all(torch.equal(second, other) for other in others)
    assert torch.allclose(first, second, rtol=1e-4, atol=1e-5)
    (wrong,) = one.engine.graph(*one_sequence(torch.arange(37) + 1), *one.engine.tensors)
    assert not torch.allclose(wrong, second, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_headers_are_where_the_compiler_looks():
    assert shutil.which(compilers.find_compiler()[0])
    names = {str(path.relative_to(compilers.ROOT)) for path in compilers.headers()}
    assert {"ops/view.h", "ops/cached_attention/native.h"} <= names


def test_a_header_of_a_plugin_is_in_the_fingerprint(tmp_path):
    """Also one that the named one includes."""
    named, beside = tmp_path / "native.h", tmp_path / "more.h"
    named.write_text("1"), beside.write_text("1")
    source, compiler = f'#include "{named}"\n', compilers.find_compiler()
    first = compilers.fingerprint(source, compiler)
    beside.write_text("2")
    assert compilers.fingerprint(source, compiler) != first
