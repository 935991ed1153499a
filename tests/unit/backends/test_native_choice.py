"""Which backend a decoder gets: native on a CPU with a compiler, else eager, and the report says why."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import graft
from conftest import tiny
from graft import LLM, SamplingParams
from graft.backends.select import decoder_backend
from graft.base.errors import (
    CompilerFailed,
    NoCompiler,
    NothingNative,
    TooManyThreads,
    TransformError,
    UnknownBackend,
)
from native_cases import needs_compiler

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
CPU = torch.device("cpu")


def small(**options) -> LLM:
    return LLM(tiny("llama"), kv_cache_memory="8MiB", **options)


def tokens(llm: LLM) -> list[int]:
    return llm.generate([[5, 6, 7]], GREEDY)[0].token_ids


def said(llm: LLM) -> str:
    return "\n".join(llm.report.notes)


@pytest.fixture
def broken(tmp_path, monkeypatch) -> Path:
    """A compiler that complains about everything, and a cache that has nothing."""
    script = tmp_path / "broken-c++"
    script.write_text('#!/bin/sh\necho "step.cpp:1: error: no such instruction" >&2\nexit 1\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("GRAFT_NATIVE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs_compiler
def test_a_cpu_with_a_compiler_is_native_by_default():
    llm = small()
    assert llm.backend == "native" and "backend: native, because the model is on the CPU" in said(llm)
    eager = small(backend="eager")
    assert eager.backend == "eager" and "backend:" not in said(eager)
    assert tokens(llm) == tokens(eager)


def test_no_compiler_means_eager_and_the_report_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    llm = small()
    assert llm.backend == "eager" and "backend: eager, because" in said(llm) and "install g++" in said(llm)
    assert tokens(llm) == tokens(small(backend="eager"))
    with pytest.raises(NoCompiler):
        small(backend="native")


def test_a_compiler_that_fails_means_eager_with_its_first_lines(broken):
    llm = small()
    assert llm.backend == "eager" and "error: no such instruction" in said(llm)
    assert tokens(llm) == tokens(small(backend="eager"))
    with pytest.raises(CompilerFailed, match="no such instruction"):
        small(backend="native")
    assert not [path for path in broken.iterdir() if path.suffix in (".so", ".o")]


@pytest.mark.exhaustive
@needs_compiler
def test_an_object_of_another_cpu_is_not_met(tmp_path, monkeypatch):
    """The name has the CPU's features: what a folder on a shared disk holds for another one is left alone."""
    from graft.backends.native import compiler

    monkeypatch.setenv("GRAFT_NATIVE_CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as other:
        other.setattr(compiler, "cpu_features", lambda: "another CPU, with other instructions")
        small(backend="native")
    foreign = set(tmp_path.glob("*.so")) | set(tmp_path.glob("*.o"))
    for path in foreign:
        path.unlink()  # this process has it mapped: what is written into the same file would be run when it ends
        path.write_bytes(b"instructions that this CPU lacks")
    llm = small(backend="native")
    assert "compiled in" in said(llm) and len(foreign) == 2 and len(tokens(llm)) == 6
    assert all(path.read_bytes() == b"instructions that this CPU lacks" for path in foreign)


@pytest.mark.exhaustive  # the short run: test_native_build.py has it without a model
@needs_compiler
def test_a_cache_that_cannot_be_written_is_in_the_report(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAFT_NATIVE_CACHE_DIR", str(tmp_path / "file"))
    llm = small()
    assert llm.backend == "native" and "compiled at every start, because writing" in said(llm)


@needs_compiler
def test_more_threads_than_cores_is_an_error(monkeypatch):
    monkeypatch.setenv("GRAFT_NUM_THREADS", "4096")
    with pytest.raises(TooManyThreads, match="4096, but this process may use"):
        small()


def test_what_auto_stands_for():
    assert decoder_backend("auto", torch.device("cuda"), torch.bfloat16) == ("eager", ())
    backend, (note,) = decoder_backend("auto", CPU, torch.float64)
    assert backend == "eager" and "float64" in note
    assert decoder_backend("inductor", CPU, torch.float32) == ("inductor", ())
    with pytest.raises(UnknownBackend):
        decoder_backend("nativ", CPU, torch.float32)


@needs_compiler
def test_other_modules_stay_eager():
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    assert graft.compile(module, (x,)).backend == "eager"
    with pytest.raises(NothingNative, match=r"input_ids.*backend='eager'"):
        graft.compile(module, (x,), backend="native")


def test_weights_in_fp8_run_eagerly_and_the_report_says_why():
    assert decoder_backend("auto", CPU, torch.float32, ("fp8", "int8"))[0] == "eager"
    llm = small(quantize="fp8")
    assert llm.backend == "eager" and "eager, because native kernels have no fp8 weights" in said(llm)
    with pytest.raises(TransformError, match="the native backend has no fp8; use int8 or int4"):
        small(quantize="fp8", backend="native")
