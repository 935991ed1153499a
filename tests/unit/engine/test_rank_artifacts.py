"""Compiled engines on several ranks: one folder, from which every rank starts and compiles nothing."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import graft
from conftest import tiny
from gguf_cases import write_quantized
from graft.base.errors import ArtifactError, DiskFull, RankFailed, UsageError
from graft.base.manifest import checksum
from graft.cli.app import app
from graft.dist.workers import Workers
from graft.engine.artifact import save as saving
from graft.engine.artifact.format import CONFIG, GRAPH, REPORT, WEIGHTS, EngineFolder, ranks_of
from graft.engine.artifact.ranks import write_own, write_parts
from graft.engine.artifact.request import EngineRequest
from graft.models.load import load_model
from processes import run_python
from rank_events import BUILDING, events, watch

SMALL = {"kv_cache_memory": "8MiB"}

RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import sitecustomize  # of this folder, which Python imports by itself when the other ranks start
import graft
model, output, options = sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
llm = graft.LLM(model, kv_cache_memory="8MiB", **options)
found = llm.generate([[5, 6, 7], [9, 2]], graft.SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1))
if output:
    llm.save(output, made_by=("compile", "tiny-llama", "--tensor-parallel=2"))
print(json.dumps({
    "tokens": [one.token_ids for one in found],
    "notes": list(llm.report.notes),
    "ranks": llm.engine.graph.group.world,
    "again": [o.token_ids for o in llm.generate([[5, 6, 7]], graft.SamplingParams(max_tokens=6, ignore_eos=True))],
}))
"""


@dataclass(frozen=True)
class Ran:
    """What a program of several ranks said, and what each of its processes did beside computing."""

    said: dict
    events: list[list[str]]


def ran(home, model, output="", environment=None, **options) -> Ran:
    told = {**os.environ, **(environment or {}), **watch(home)}
    done = run_python("-c", RUN, str(home), str(model), str(output), json.dumps(options), env=told)
    assert done.returncode == 0, done.stderr[-3000:]
    return Ran(json.loads(done.stdout.splitlines()[-1]), events(home))


def nowhere(folder):
    """No compiler on the path, and empty caches."""
    (folder / "c++").write_text("#!/bin/sh\nexit 1\n")
    (folder / "c++").chmod(0o755)
    caches = {f"GRAFT_{name}CACHE_DIR": str(folder / f"{name}cache") for name in ("", "GRAPH_", "NATIVE_", "ENGINE_")}
    return {"PATH": str(folder), "CXX": "", **caches}


class Leader:
    """Rank 0's side, with what the other rank does when it is told to write."""

    def __init__(self, other):
        self.other, self.group = other, SimpleNamespace(world=2)

    def save(self, order, own):
        return [own(), self.other(order)]


@pytest.fixture(scope="module")
def parts():
    return graft.LLM(tiny("llama"), backend="eager", **SMALL).parts


def save_as_two(parts, path, other):
    """What rank 0 does; the other rank writes what `other` writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "LeaderGraph", type(parts.engine.graph))
        patch.setattr(saving, "write_parts", lambda _, *rest: write_parts(Leader(other), *rest))
        saving.save_engine(parts, path, overwrite=False, made_by=())


@pytest.fixture(scope="module")
def folder(parts, tmp_path_factory):
    """Of two ranks that are the same one, but for a number of its weights: those of real ranks are in
    test_tensor_parallel.py."""

    def other(order):
        said = write_own(parts, 1, order)
        flip(Path(json.loads(order)["folder"]) / "rank1" / WEIGHTS)
        return said

    path = tmp_path_factory.mktemp("compiled") / "engine"
    save_as_two(parts, path, other)
    return path


def flip(file):
    """One bit of the last bytes."""
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-3, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 1]))


def test_what_the_ranks_have_alike_is_there_once(folder):
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"manifest.json", CONFIG, GRAPH, REPORT, f"rank0/{WEIGHTS}", f"rank1/{WEIGHTS}"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == files - {"manifest.json"} and ranks_of(folder) == 2
    assert [one["rank"] for one in manifest["ranks"]] == [0, 1]
    for rank in range(2):
        opened = EngineFolder(folder, rank)
        assert opened.read(CONFIG) == (folder / CONFIG).read_bytes()
        assert opened.read(WEIGHTS) == (folder / f"rank{rank}" / WEIGHTS).read_bytes()
        assert opened.manifest["rank"] == rank
        opened.close()


# ── what is refused, before a process is started ────────────────────────────────────────────────────────────────


@pytest.fixture
def no_processes(monkeypatch):
    monkeypatch.setattr(Workers, "start", pytest.fail)


@pytest.fixture
def copied(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "engine"))


def sign(folder, **changes):
    """The manifest with other values, as somebody else's graft would have written it."""
    content = json.loads((folder / "manifest.json").read_text())
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    (folder / "manifest.json").write_text(json.dumps(content | {"sha256": checksum(content)}))


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("asked", [1, 4])
def test_another_number_of_ranks_is_refused(folder, asked, capfd):
    told = f"was compiled for 2 ranks, not for {asked}; leave tensor_parallel_size (--tensor-parallel) out"
    with pytest.raises(UsageError) as refused:
        graft.LLM(folder, tensor_parallel_size=asked)
    assert told in str(refused.value)
    with pytest.raises(SystemExit) as ended:
        app(["run", "--token-ids", "5", "-m", str(folder), "--tensor-parallel", str(asked)])
    assert ended.value.code == 2 and told in " ".join(capfd.readouterr().err.split())


@pytest.mark.usefixtures("no_processes")
def test_an_engine_of_one_rank_is_not_split_when_it_starts(parts, tmp_path):
    saving.save_engine(parts, tmp_path / "engine", overwrite=False, made_by=())
    with pytest.raises(UsageError, match="was compiled for one rank, not for 2"):
        graft.LLM(tmp_path / "engine", tensor_parallel_size=2)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("name", ["rank1/weights.safetensors", "rank0/weights.safetensors", "config.json"])
def test_a_file_of_any_rank_that_is_missing_is_told(copied, name):
    (copied / name).unlink()
    with pytest.raises(ArtifactError, match=rf"{name}: cannot be opened \(No such file"):
        graft.LLM(copied)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"built_for": {"torch": "2.9.0"}}, r"torch was 2\.9\.0"),
        ({"ranks": "two"}, "has ranks that cannot be read"),
        ({"ranks": [1, 2]}, "has ranks that cannot be read"),
    ],
)
def test_another_place_and_a_damaged_manifest_are_told(copied, changes, told):
    sign(copied, **changes)
    with pytest.raises(ArtifactError, match=told):
        graft.LLM(copied)


@pytest.mark.usefixtures("no_processes")
def test_what_was_not_compiled_is_not_given(folder):
    with pytest.raises(UsageError, match="dtype=float32"):
        graft.LLM(folder, dtype="bfloat16")
    with pytest.raises(UsageError, match="whose weights could be kept"):
        graft.LLM(folder, keep_weights=True)


def test_each_rank_checks_its_own_files(copied):
    """Those of many gigabytes are read once, not by every rank."""
    flip(copied / "rank1" / "weights.safetensors")
    first, second = EngineFolder(copied, 0), EngineFolder(copied, 1)
    first.take("weights.safetensors")
    assert "rank1/weights.safetensors" not in first.checks and "config.json" in first.checks
    with pytest.raises(ArtifactError, match=r"rank1/weights\.safetensors: was changed after it was saved"):
        second.take("weights.safetensors")
    for one in (first, second):
        one.close()
    with pytest.raises(ArtifactError, match="has parts of 2 ranks, and none of rank 2"):
        EngineFolder(copied, 2)


# ── while it is written ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_that_cannot_write_is_told_and_nothing_is_left(parts, tmp_path):
    """On this rank or another, and for what reason."""

    def full(order):
        return json.dumps({"problem": "[Errno 28] No space left on device"})

    def elsewhere(order):
        return write_own(parts, 1, json.dumps({**json.loads(order), "folder": str(tmp_path / "elsewhere")}))

    def unseen(order):
        return json.dumps({"about": {}, "files": {"graph.json": 5}})

    for other, error, told in (
        (full, DiskFull, "rank 1: .*No space left"),
        (elsewhere, ArtifactError, "rank 1: there is no .*which their machines must share"),
        (unseen, ArtifactError, "rank 1: its graph.json is not seen by rank 0"),
    ):
        with pytest.raises(error, match=told):
            save_as_two(parts, tmp_path / "engine", other)
        assert not list(tmp_path.iterdir())


def test_the_command_has_the_ranks():
    asked = EngineRequest("tiny-llama", tensor_parallel_size=2)
    assert asked.command() == ("compile", "tiny-llama", "--tensor-parallel=2")
    assert EngineRequest.of_command(asked.command()) == asked


# ── more processes ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive  # the short run: test_two_ranks_from_their_start_to_their_end, on eager
@pytest.mark.parametrize("world", [2, 4])
def test_native_steps_start_without_a_compiler(tmp_path, world):
    """The ranks compute the same, so that one object is there for all."""
    options = {"tensor_parallel_size": world, "backend": "native", "device": "cpu", "dtype": "float32"}
    built = ran(tmp_path / "built", "tiny-llama", tmp_path / "engine", **options)
    started = ran(tmp_path / "started", tmp_path / "engine", environment=nowhere(tmp_path))
    assert started.said["tokens"] == built.said["tokens"] and started.said["ranks"] == world
    assert started.events == [["subprocess.Popen"] * (world - 1)]
    assert [path.relative_to(tmp_path / "engine").as_posix() for path in (tmp_path / "engine").rglob("*.so")] == [
        "native/step.so"
    ]
    again = ran(tmp_path / "rebuilt", "tiny-llama", tmp_path / "second", **options)
    assert again.said["tokens"] == built.said["tokens"]
    same_bytes(tmp_path / "engine", tmp_path / "second")


@pytest.mark.exhaustive
def test_weights_may_stay_in_their_checkpoint(tmp_path):
    """And two builds have the same bytes, and a damaged file of another rank is told by rank 0."""
    load_model("tiny-llama", dtype="float32", device="cpu").module.save_pretrained(tmp_path / "model")
    options = {"tensor_parallel_size": 2, "backend": "eager", "device": "cpu"}
    built = ran(tmp_path / "built", tmp_path / "model", tmp_path / "engine", **options)
    for rank in json.loads((tmp_path / "engine" / "manifest.json").read_text())["ranks"]:
        assert rank["checkpoint"]["folder"] == str(tmp_path / "model")
    assert len(built.events) == 2 and all(BUILDING in each for each in built.events), "what is counted is seen"
    ran(tmp_path / "again", tmp_path / "model", tmp_path / "second", **options)
    same_bytes(tmp_path / "engine", tmp_path / "second")
    started = ran(tmp_path / "started", tmp_path / "engine")
    assert started.said["tokens"] == built.said["tokens"] and started.events == [["subprocess.Popen"]]
    flip(tmp_path / "second" / "rank1" / "graph.json")
    with pytest.raises(RankFailed, match=r"rank 1 failed: .*rank1/graph\.json: was changed after it was saved"):
        graft.LLM(tmp_path / "second", **SMALL)
    flip(tmp_path / "model" / "model.safetensors")
    with pytest.raises((ArtifactError, RankFailed), match=r"model\.safetensors: was changed after it was saved"):
        graft.LLM(tmp_path / "engine", **SMALL)


@pytest.mark.exhaustive
def test_blocks_of_a_gguf_file_start_as_they_were_packed(tmp_path):
    write_quantized(tmp_path / "small.gguf", {"token_embd": "Q8_0"}, "Q4_1")
    options = {"tensor_parallel_size": 2, "backend": "native", "device": "cpu"}
    own = {"GRAFT_CACHE_DIR": str(tmp_path / "cache")}
    built = ran(tmp_path / "built", tmp_path / "small.gguf", tmp_path / "engine", environment=own, **options)
    (tmp_path / "small.gguf").unlink()
    started = ran(tmp_path / "started", tmp_path / "engine", environment=nowhere(tmp_path))
    assert started.said["tokens"] == built.said["tokens"] and started.events == [["subprocess.Popen"]]
    manifest = json.loads((tmp_path / "engine" / "manifest.json").read_text())
    assert [rank["quantized"]["format"] for rank in manifest["ranks"]] == ["Q8_0+Q4_1"] * 2
    assert all(rank["checkpoint"] is None for rank in manifest["ranks"])


def same_bytes(one, other):
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    same, differing, lacking = filecmp.cmpfiles(one, other, names, shallow=False)
    assert (sorted(same), differing, lacking) == (names, [], [])


@pytest.mark.exhaustive
def test_all_ranks_are_recompiled_where_that_is_asked_for(copied):
    threads, params = torch.get_num_threads(), graft.SamplingParams(max_tokens=6, ignore_eos=True)
    made_by = EngineRequest("tiny-llama", dtype="float32", backend="eager", device="cpu", tensor_parallel_size=2)
    sign(copied, built_for={"torch": "2.9.0"}, made_by=list(made_by.command()))
    with pytest.raises(ArtifactError, match=r"graft compile tiny-llama .*--tensor-parallel=2 -o .* --overwrite"):
        graft.LLM(copied)
    again = graft.LLM(copied, recompile=True, **SMALL)
    (note,) = [note for note in again.report.notes if note.startswith("recompiled")]
    assert "torch was 2.9.0" in note and "nothing was compiled" in " ".join(again.report.notes)
    expected = graft.LLM("tiny-llama", dtype="float32", backend="eager", device="cpu", **SMALL)
    answers = [llm.generate([[5, 6, 7]], params)[0].token_ids for llm in (again, expected)]
    assert answers[0] == answers[1] and again.engine.graph.group.world == 2
    assert (copied / "rank1" / GRAPH).is_file(), "those that were there were alike"
    again.engine.graph.close()
    torch.set_num_threads(threads)


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_while_it_writes_leaves_nothing(tmp_path):
    threads = torch.get_num_threads()
    llm = graft.LLM("tiny-llama", tensor_parallel_size=2, backend="eager", device="cpu", dtype="float32", **SMALL)

    def kill(what, _done, _total):
        if what == "writing the weights":
            llm.engine.graph.workers.processes[1].send_signal(signal.SIGKILL)

    with pytest.raises(RankFailed, match="rank 1 failed: it was killed by signal 9"):
        llm.save(tmp_path / "engine", progress=kill)
    with pytest.raises(RankFailed, match="rank 1 failed"):
        llm.save(tmp_path / "engine")
    assert not list(tmp_path.iterdir())
    torch.set_num_threads(threads)


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_while_it_loads_ends_the_start(monkeypatch):
    """Rank 0 ends at its next step, not when it would wait for the other."""
    threads, seen, started = torch.get_num_threads(), [], Workers.start

    def remembered(*given):
        seen.append(started(*given))
        return seen[0]

    monkeypatch.setattr(Workers, "start", staticmethod(remembered))
    done = []

    def kill(what, _done, _total):
        done.append(str(what))
        if str(what).startswith("transform ") and seen[0].failed is None:
            seen[0].processes[1].kill()
            seen[0].gone.wait(60)

    with pytest.raises(RankFailed, match="rank 1 failed: it was killed by signal 9"):
        graft.LLM("tiny-llama", tensor_parallel_size=2, backend="eager", device="cpu", progress=kill, **SMALL)
    assert len([what for what in done if what.startswith("transform ")]) == 1
    torch.set_num_threads(threads)
