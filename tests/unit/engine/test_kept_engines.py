"""Engines that a start keeps: the next one takes them where nothing has changed, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import graft
from graft.base.caches import note_use
from graft.base.errors import UsageError
from graft.base.files import drop_folder
from graft.base.half_written import remove_leftovers
from graft.base.manifest import OpenFolder
from graft.base.plugins import STATE, Plugin
from graft.engine.artifact import kept as keeping
from graft.engine.artifact import key as keys
from graft.engine.artifact.format import ENGINE, WEIGHTS
from graft.engine.artifact.request import EngineRequest
from graft.engine.options import EngineOptions
from graft.passes.base import BaseTransform
from graft.passes.registry import TransformRegistry

PARAMS = graft.SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1)
REFUSE = keys.refuse_changed_process  # which `engines` switches off
SMALL = {"kv_cache_memory": "8MiB", "device": "cpu", "backend": "native"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A cache of its own, in a process whose transformers counts as untouched."""
    folder = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(keeping.FOLDER, str(folder))
        patch.setattr(keys, "refuse_changed_process", lambda: None)
        yield folder


@pytest.fixture(scope="module")
def first(engines):
    return graft.LLM("tiny-llama", **SMALL)


def answers(llm):
    return [(output.token_ids, output.logprobs) for output in llm.generate([[3, 1, 4], [1, 5, 9, 2]], PARAMS)]


def told(llm):
    return next(note for note in llm.report.notes if note.startswith("engine cache"))


START = """
import sys
counts = {"processes": 0}
def hook(event, _):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "os.fork", "os.forkpty"):
        counts["processes"] += 1
sys.addaudithook(hook)
import graft
llm = graft.LLM("tiny-llama", kv_cache_memory="8MiB", device="cpu", backend="native")
(output,) = llm.generate([[3, 1, 4]], graft.SamplingParams(max_tokens=4, ignore_eos=True))
heavy = [name for name in ("transformers", "torch._dynamo", "torch._inductor", "triton", "sympy",
    "graft.capture.decoder", "graft.passes.pipeline") if name in sys.modules]
print(counts, heavy, output.token_ids)
print(next(note for note in llm.report.notes if note.startswith("engine cache")))
"""


def test_the_next_process_captures_and_compiles_nothing(engines, first):
    assert "kept for the next start" in told(first)
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=500, check=False)
    (expected,) = first.generate([[3, 1, 4]], graft.SamplingParams(max_tokens=4, ignore_eos=True))
    lines = done.stdout.splitlines()
    assert lines[:1] == [f"{{'processes': 0}} [] {expected.token_ids}"], done.stderr[-2000:]
    assert "that an earlier start kept" in lines[1] and "nothing was compiled" in lines[1]


def test_the_same_answers_report_and_graph(engines, first):
    again = graft.LLM("tiny-llama", **SMALL)
    assert "that an earlier start kept" in told(again) and answers(again) == answers(first)
    assert again.model.name == "tiny-llama" and again.report.kernels == first.report.kernels
    assert {n: r.status for n, r in again.report.transforms.items()} == {
        n: r.status for n, r in first.report.transforms.items()
    }


def test_other_sizes_take_the_same_engine(engines, first):
    again = graft.LLM("tiny-llama", **SMALL | {"kv_cache_memory": "4MiB"}, max_num_seqs=2, self_check=False)
    assert "that an earlier start kept" in told(again) and again.engine.scheduler.max_num_seqs == 2


def test_an_engine_of_the_cache_can_be_saved(engines, first, tmp_path):
    again = graft.LLM("tiny-llama", **SMALL)
    again.save(tmp_path / "engine", made_by=("compile", "tiny-llama"))
    manifest = json.loads((tmp_path / "engine" / "manifest.json").read_text())
    assert "kept_for" not in manifest and manifest["made_by"] == ["compile", "tiny-llama"]
    assert answers(graft.LLM(tmp_path / "engine", kv_cache_memory="8MiB")) == answers(first)


def test_a_damaged_one_is_built_anew(engines, first):
    path = keeping.kept_engine(EngineRequest("tiny-llama", device="cpu", backend="native")).path
    assert path is not None and path.is_dir()
    with (path / WEIGHTS).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")
    again = graft.LLM("tiny-llama", **SMALL)
    assert "kept for the next start" in told(again) and "was changed after it was saved" in told(again)
    assert answers(again) == answers(first)
    opened = OpenFolder(path, ENGINE)  # whole again
    opened.take(WEIGHTS)
    opened.close()


@pytest.mark.parametrize(
    ("asked", "environment", "verify", "why"),
    [
        ({"use_cache": False}, {}, "structure", "switched off"),
        ({}, {keys.OFF: "1"}, "structure", keys.OFF),
        ({}, {keeping.SIZE: "0"}, "structure", "is 0"),
        ({}, {keeping.SIZE: "1"}, "structure", "not kept, because it takes"),
        ({}, {}, "matches", "checks are to be made each time"),
    ],
    ids=["switched off", "by the environment", "no room at all", "too large", "verify"],
)
def test_what_is_not_kept_is_told(engines, first, tmp_path, monkeypatch, asked, environment, verify, why):
    monkeypatch.setenv(keeping.FOLDER, str(tmp_path / "engines"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kept = keeping.kept_engine(EngineRequest("tiny-llama", device="cpu", backend="native", **asked))
    parts = replace(first.parts, settings=replace(first.parts.settings, verify=verify))
    assert why in keeping.keep_engine(kept, parts) and not kept.is_there
    assert not list((tmp_path / "engines").glob("*"))


def test_a_folder_that_cannot_be_written_does_no_harm(engines, first, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(keeping.FOLDER, str(tmp_path / "file" / "engines"))
    request = EngineRequest("tiny-llama", device="cpu", backend="native")
    assert "not kept, because" in keeping.keep_engine(keeping.kept_engine(request), first.parts)


def test_a_wrong_size_is_told(engines, monkeypatch):
    monkeypatch.setenv(keeping.SIZE, "much")
    with pytest.raises(UsageError, match="GRAFT_ENGINE_CACHE_SIZE is a size like"):
        keeping.kept_engine(EngineRequest("tiny-llama"))


# ── the key ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path, monkeypatch, engines):
    """A model's folder, a package and a compiler that stand for real ones. Weights count as large files."""
    monkeypatch.setattr(keys, "SMALL", 99)
    monkeypatch.setattr(keys, "FRESH", 0)
    monkeypatch.setattr(keys, "package_folder", lambda _: tmp_path / "package")
    (tmp_path / "package" / "models").mkdir(parents=True)
    (tmp_path / "package" / "models" / "modeling.py").write_text("a = 1")
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(200))
    (tmp_path / "settings.yaml").write_text("verify: structure")
    return model


def same_size_and_time(file: Path) -> None:
    """A changed byte that neither size nor time of the last change shows."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch_sources(monkeypatch, folder):
    monkeypatch.setattr("graft.engine.artifact.target.source_hash", lambda: "one changed line")


CHANGES = {
    "config.json": lambda _, folder: (folder / "config.json").write_text('{"model_type": "qwen3"}'),
    "tokenizer": lambda _, folder: (folder / "tokenizer.json").write_text('{"a": 1}'),
    "a further file": lambda _, folder: (folder / "generation_config.json").write_text("{}"),
    "weights": lambda _, folder: same_size_and_time(folder / "model.safetensors"),
    "small file": lambda _, folder: same_size_and_time(folder / "config.json"),
    "graft": lambda patch, _: patch.setattr(graft, "__version__", "0.0.0"),
    "sources": touch_sources,
    "torch": lambda patch, _: patch.setattr(torch, "__version__", "2.9.0"),
    "cpu": lambda patch, _: patch.setattr("graft.engine.artifact.target.cpu_features", lambda: "amx9"),
    "machine": lambda patch, _: patch.setattr("platform.machine", lambda: "pdp11"),
    "python": lambda patch, _: patch.setattr(sys, "version", "4.0"),
    "library": lambda patch, _: patch.setattr(keys, "package_version", lambda name: f"{name} 0"),
    "transformers": lambda _, folder: (folder.parent / "package" / "models" / "modeling.py").write_text("a = 10"),
    "compiler": lambda _, folder: (folder.parent / "c++").write_text("#!/bin/bash\n"),
    "no compiler": lambda patch, folder: patch.setenv("CXX", str(folder / "nowhere")),
    "flags": lambda patch, _: patch.setenv("GRAFT_CXXFLAGS", "-O0"),
    "settings": lambda _, folder: (folder.parent / "settings.yaml").write_text("verify: matches"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_another_engine(folder, monkeypatch, change):
    request = EngineRequest(folder, config=folder.parent / "settings.yaml", device="cpu")
    before = keys.key_parts(request)
    assert keys.key_parts(request) == before
    CHANGES[change](monkeypatch, folder)
    assert keys.engine_key(keys.key_parts(request)) != keys.engine_key(before)


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": "bfloat16"},
        {"backend": "eager"},
        {"quantize": "int8"},
        {"sets": ("transforms.fuse_rope.enabled=false",)},
        {"config": {"kernels": {"rope": "reference"}}},
        {"sizes": EngineOptions(max_model_len=64)},
        {"sizes": EngineOptions(kv_cache_dtype="fp8")},
    ],
    ids=str,
)
def test_every_request_has_an_engine_of_its_own(folder, asked):
    plain = EngineRequest(folder, device="cpu")
    assert keys.key_parts(replace(plain, **asked)) != keys.key_parts(plain)


def test_what_changes_nothing_finds_the_same_engine(folder, monkeypatch):
    request = EngineRequest(folder, device="cpu")
    before = keys.key_parts(request)
    monkeypatch.setenv("GRAFT_NUM_THREADS", "1")
    monkeypatch.setenv(keeping.FOLDER, "elsewhere")
    other = replace(request, device="auto", sizes=EngineOptions(max_num_seqs=3))
    if not torch.cuda.is_available():
        assert keys.key_parts(other) == before


def test_a_file_written_a_moment_ago_has_no_key(folder, monkeypatch):
    monkeypatch.setattr(keys, "FRESH", 10**18)
    with pytest.raises(keys.NoKey, match="a moment ago"):
        keys.key_parts(EngineRequest(folder, device="cpu"))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"plugins": ("mine.py",)}, "plugin mine.py"),
        ({"keep_weights": True}, "Hugging Face module"),
        ({"dump_dir": "dumps"}, "dumped"),
        ({"trust_remote_code": True}, "may run"),
        ({"model": "no-such-model"}, "no such model"),
        ({"config": object()}, "configuration is a object"),
        ({"config": {"verify": {1, 2}}}, "cannot be written down"),
        ({"config": "nowhere.yaml"}, "cannot be read"),
        ({"device": "meta"}, "device is meta"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_requests_without_a_key(folder, asked, why):
    with pytest.raises(keys.NoKey, match=why):
        keys.key_parts(EngineRequest(**{"model": folder, "device": "cpu"} | asked))


def test_transforms_of_this_process_have_no_key(folder):
    @TransformRegistry.register("registered_here")
    class RegisteredHere(BaseTransform):
        """Of a test's module."""

    try:
        with pytest.raises(keys.NoKey, match="registered_here was registered in this process"):
            keys.key_parts(EngineRequest(folder, device="cpu"))
    finally:
        TransformRegistry.forget("registered_here")
    keys.key_parts(EngineRequest(folder, device="cpu"))


def test_plugins_of_this_process_have_no_key(folder, monkeypatch):
    monkeypatch.setitem(STATE.plugins, "json", Plugin("json", "my-fusions"))
    with pytest.raises(keys.NoKey, match="my-fusions is loaded"):
        keys.key_parts(EngineRequest(folder, device="cpu"))


def test_a_changed_process_has_no_key():
    with pytest.raises(keys.NoKey, match="transformers' models were imported before"):
        REFUSE()  # as they were, by this very process


@pytest.mark.parametrize("change", ["dtype", "device", "autocast", "hooks"])
def test_a_changed_torch_has_no_key(monkeypatch, change):
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    REFUSE()
    why = {"dtype": "default dtype", "device": "device was changed", "autocast": "autocast", "hooks": "hooks"}[change]
    if change == "dtype":
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    if change == "hooks":
        monkeypatch.setitem(torch.nn.modules.module._global_forward_hooks, 99, print)
    with (
        torch.device("meta" if change == "device" else "cpu"),
        torch.autocast("cpu", enabled=change == "autocast"),
        pytest.raises(keys.NoKey, match=why),
    ):
        REFUSE()


# ── the folder ──────────────────────────────────────────────────────────────────────────────────────────────────


def some_engines(folder, *names):
    """Each of 100 bytes, the first the oldest."""
    for age, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_bytes(bytes(100))
        os.utime(folder / name, (age, age))


@pytest.mark.parametrize(("limit", "stay"), [(400, "abc"), (300, "abc"), (299, "bc"), (150, "c"), (10, "c")])
def test_what_was_not_used_for_longest_goes_first(tmp_path, limit, stay):
    some_engines(tmp_path, "a", "b", "c")
    keeping.evict(tmp_path, limit, tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == list(stay)


def test_use_makes_an_engine_young(tmp_path):
    some_engines(tmp_path, "a", "b", "c")
    note_use(tmp_path / "a")
    assert keeping.evict(tmp_path, 200, tmp_path / "c") == [tmp_path / "b"]


def test_what_killed_processes_left_goes_and_the_rest_stays(tmp_path):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead = int(gone.stdout)
    for name in (f".a.{dead}.partial", f".b.{dead}.old", f".c.{os.getpid()}.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half")
    (tmp_path / f".d.{dead}.partial.json").write_text("half")
    some_engines(tmp_path, "e")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".c.{os.getpid()}.partial", "e"]


def test_an_engine_that_goes_while_it_is_read_stays_whole(engines, first, tmp_path):
    first.save(tmp_path / "engine")
    opened = OpenFolder(tmp_path / "engine", ENGINE)
    drop_folder(tmp_path / "engine")
    assert not list(tmp_path.iterdir()) and json.loads(opened.text("config.json"))
    opened.take(WEIGHTS)
    opened.close()
