"""The other engines: what is not there is a row that says how to get it, and bytes are those of their own formats."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import graft
from graft.backends.native.cpu import THREADS, available_cores
from graft.base.errors import NoCompiler, PeerNotRun, TooManyThreads, UsageError
from graft.bench import runner
from graft.bench.baselines import baseline
from graft.bench.baselines import llama_cpp as peers_llama
from graft.bench.baselines.baseline import Peer, Task
from graft.bench.baselines.hf import BASELINES, PEERS
from graft.bench.baselines.llama_cpp import LlamaCpp, gguf_file
from graft.bench.baselines.openvino import OpenVino, StepModule
from graft.bench.bench import bench
from graft.bench.limits import read_native, roofline
from graft.bench.limits.roofline import Roofline
from graft.bench.limits.traffic import cache_bytes, weight_bytes
from graft.bench.plan import BenchPlan
from graft.bench.rows import Row
from graft.bench.threads import checked_threads, use_threads
from graft.cli.app import app
from graft.cli.measure.bench_show import show

CPU = torch.device("cpu")
PLAN = BenchPlan(batches=(2,), prompts=(8,), new=40, repeats=1, against=("llama.cpp", "openvino"))
ROOF = Roofline(read_gb_per_s=10.0, matrix_tflops=2.0, read_how="a sum", matrix_how="64³ in float32")


@cache
def engine() -> graft.LLM:
    return graft.LLM("tiny-smollm2", dtype="float32", device="cpu", keep_weights=True)


@pytest.fixture
def nothing_installed(monkeypatch):
    found = baseline.importlib.util.find_spec
    monkeypatch.setattr(
        baseline.importlib.util,
        "find_spec",
        lambda name, *rest: None if name in ("llama_cpp", "openvino") else found(name, *rest),
    )


@pytest.fixture
def growing_clock(monkeypatch):
    """The time between two readings grows, so that a long call takes longer than the short one before it."""
    count = [0]

    def tick() -> float:
        count[0] += 1
        return 0.01 * count[0] ** 2

    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=tick))


def rows(result) -> dict[str, Row]:
    return {row.engine: row for row in result.rows}


def pretend(monkeypatch, name: str, **functions) -> None:
    """A module under a peer's name, as far as a test needs it."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


# ── not there ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
def test_a_peer_that_is_not_installed_is_a_row_that_says_how_to_get_it(nothing_installed, growing_clock, capsys):
    result = bench(engine(), PLAN, roofline=ROOF, source="tiny.gguf")
    by = rows(result)
    assert by["llama.cpp"].failed.startswith("not run: llama-cpp-python is not installed")
    assert (
        "pip install llama-cpp-python" in by["llama.cpp"].failed and "pip install openvino" in by["openvino"].failed
    )
    assert by["graft"].first_token_ms and by["llama.cpp"].first_token_ms is None
    show(result)
    printed = " ".join(capsys.readouterr().out.split())
    assert "batch 2, openvino not run: openvino is not installed" in printed and "failed" not in printed


@pytest.mark.exhaustive
def test_the_command_exits_with_0_without_any_peer(nothing_installed, growing_clock, monkeypatch):
    made = engine()
    monkeypatch.setattr("graft.engine.start.start_engine", lambda *_: None)
    monkeypatch.setattr("graft.engine.llm.LLM.of", lambda _: made)
    monkeypatch.setattr("graft.bench.limits.roofline.measure_roofline", lambda device, dtype: ROOF)
    small = ("--prompt", "8", "--new", "40", "--batch", "1", "--repeats", "1", "--threads", "1", "--json")
    done = CliRunner().invoke(app, ["bench", "tiny-smollm2", "--against", "llama.cpp,openvino", *small])
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["setup"]["threads"] == 1
    assert [row["failed"][:8] for row in document["rows"]] == ["", "not run:", "not run:"]


def test_a_model_without_a_gguf_file_is_not_run_with_llama_cpp(monkeypatch):
    pretend(monkeypatch, "llama_cpp")
    monkeypatch.setattr(roofline, "cpu_buffer", lambda: 1 << 22)
    failed = rows(bench(engine(), replace(PLAN, against=("llama.cpp",)))).get("llama.cpp").failed
    assert failed == "not run: no GGUF file; llama.cpp runs models that were loaded from one"
    with pytest.raises(PeerNotRun):
        gguf_file("tiny-llama")
    assert str(gguf_file("some/model.gguf")) == "some/model.gguf"


def test_a_peer_that_dies_is_shown_with_its_reason_and_closed(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("unsupported op\nand a long trace")

    closed = []
    pretend(monkeypatch, "openvino", convert_model=broken, Core=lambda: SimpleNamespace(compile_model=None))
    pretend(monkeypatch, "openvino.passes", MakeStateful=None, Manager=None)
    monkeypatch.setattr(OpenVino, "close", lambda self: closed.append(self))
    by = rows(bench(engine(), replace(PLAN, against=("openvino",))))
    assert by["openvino"].failed == "RuntimeError: unsupported op" and by["graft"].first_token_ms
    assert len(closed) == 1


def test_peers_of_a_cpu_and_of_a_gpu():
    assert PEERS["cpu"] == ("eager", "compile", "llama.cpp", "openvino") and "llama.cpp" not in PEERS["cuda"]
    assert all(name in BASELINES for names in PEERS.values() for name in names)
    task = Task(engine().model, 20)
    assert isinstance(LlamaCpp(task), Peer) and isinstance(OpenVino(task), Peer)
    assert not isinstance(BASELINES["eager"](task), Peer)


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_are_those_of_the_peers_own_formats(growing_clock, monkeypatch):
    """A peer's row counts what that peer reads; graft's and Hugging Face's count the module's weights."""

    class Small:
        name, closed = "small", 0

        def __init__(self, task):
            self.task = task

        def generate(self, prompts, new):
            return [[1] * new for _ in prompts]

        def step_bytes(self, batch, tokens):
            assert (batch, tokens) == (2, 8 + 41 / 2)
            return 1000.0

        def close(self):
            Small.closed += 1

    monkeypatch.setitem(BASELINES, "small", Small)
    by = rows(bench(engine(), replace(PLAN, against=("eager", "small")), roofline=ROOF))
    small, eager = by["small"], by["hugging face eager"]
    assert small.gb_per_s == pytest.approx(1000 / small.token_ms / 1e6)
    assert small.roofline_percent == pytest.approx(10 * small.gb_per_s) and Small.closed == 1
    module = engine().model.module
    read = weight_bytes(module, 2) + 2 * cache_bytes(module, 8 + 41 / 2)
    assert eager.gb_per_s == pytest.approx(read / eager.token_ms / 1e6)


@pytest.mark.parametrize(("tied", "expected"), [(True, 300 + 50), (False, 300 + 50 + 70)])
def test_bytes_of_a_gguf_file(monkeypatch, tied, expected):
    """The table counts where it is the head as well."""
    tensors = [("token_embd.weight", 300), ("blk.0.attn_q.weight", 50)]
    if not tied:
        tensors = [("token_embd.weight", 9999), ("blk.0.attn_q.weight", 350), ("output.weight", 70)]
    found = SimpleNamespace(tensors=[SimpleNamespace(name=name, n_bytes=size) for name, size in tensors])
    monkeypatch.setattr("gguf.GGUFReader", lambda file: found)
    assert peers_llama.weight_bytes("x.gguf") == expected
    llama = LlamaCpp(Task(engine().model, 20))
    llama.weights = 1.0
    assert llama.step_bytes(3, 10) == 1 + 3 * cache_bytes(engine().model.module, 10) / 2, "its cache is float16"


# ── what the peers are asked ─────────────────────────────────────────────────────────────────────────────────────


class Array(list):
    """As long as it is written to."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def reach(self, index):
        while len(self) <= index:
            self.append(self.make())

    def __getitem__(self, index):
        self.reach(index)
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        self.reach(index)
        super().__setitem__(index, value)


def test_llama_cpp_decodes_a_batch_in_one_call():
    """Every call has a token of each sequence at its own position; logits are asked for at the last one alone."""
    calls = []

    def decode(context, batch):
        count = batch.n_tokens
        calls.append([(batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i]) for i in range(count)])
        return 0

    def logits(context, index):
        values = np.zeros(16, np.float32)
        values[calls[-1][index][0] + 1] = 1.0  # the likeliest token is the last one's successor
        return np.ctypeslib.as_ctypes(values)

    llama = LlamaCpp(Task(engine().model, 20, batch=2))
    empty = SimpleNamespace(
        token=Array(int), pos=Array(int), n_seq_id=Array(int), seq_id=Array(lambda: [0]), logits=Array(int)
    )
    llama.api = SimpleNamespace(
        llama_memory_clear=lambda *_: None, llama_get_memory=lambda _: None, llama_batch_free=lambda _: None,
        llama_batch_init=lambda *_: empty, llama_decode=decode, llama_get_logits_ith=logits,
    )  # fmt: skip
    llama.context, llama.vocabulary = object(), 16
    assert llama.generate([[1, 2, 3], [5, 6, 7]], 3) == [[4, 5, 6], [8, 9, 10]]
    prompt = [
        (1, 0, 0, False),
        (2, 1, 0, False),
        (3, 2, 0, True),
        (5, 0, 1, False),
        (6, 1, 1, False),
        (7, 2, 1, True),
    ]
    assert calls == [prompt, [(4, 3, 0, True), (8, 3, 1, True)], [(5, 4, 0, True), (9, 4, 1, True)]]
    llama.api.llama_decode = lambda *_: 1
    with pytest.raises(RuntimeError, match="llama_decode returned 1 for 6 tokens"):
        llama.generate([[1, 2, 3], [5, 6, 7]], 3)


@torch.inference_mode()
def test_the_step_that_openvino_gets_is_the_model():
    """Prompt and one step with keys and values handed through give the logits of the whole at once."""
    module = engine().model.module
    config = module.config
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    past = [
        torch.zeros(2, config.num_key_value_heads, 0, config.head_dim) for _ in range(2 * config.num_hidden_layers)
    ]
    step, beams, expected = StepModule(module), torch.arange(2), module(ids).logits

    def call(first, last, past):
        own = torch.arange(first, last)
        mask = torch.where(torch.arange(last) <= own[:, None], 0.0, -3e38).expand(2, 1, -1, -1)
        return step(ids[:, first:last], mask, own.repeat(2, 1), beams, *past)

    logits, *past = call(0, 4, past)
    torch.testing.assert_close(logits, expected[:, 3])
    logits, *longer = call(4, 5, past)
    torch.testing.assert_close(logits, expected[:, 4])
    assert longer[0].shape[2] == 5
    wrong, *_ = call(4, 5, [torch.zeros_like(part) for part in past])
    assert not torch.allclose(wrong, expected[:, 4], atol=1e-3), "without the cache it would not be the model"


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_threads_hold_for_torch_and_native_and_are_given_back(monkeypatch):
    monkeypatch.delenv(THREADS, raising=False)
    before = torch.get_num_threads()
    with use_threads(before + 1):
        assert torch.get_num_threads() == before + 1 and os.environ[THREADS] == str(before + 1)
    assert torch.get_num_threads() == before and THREADS not in os.environ
    monkeypatch.setenv(THREADS, "1")
    with pytest.raises(KeyError), use_threads(before + 1):
        raise KeyError
    assert os.environ[THREADS] == "1" and torch.get_num_threads() == before
    with use_threads(None):
        assert torch.get_num_threads() == before


def test_threads_are_the_cores_unless_told(monkeypatch):
    monkeypatch.delenv(THREADS, raising=False)
    assert checked_threads(None, CPU) == available_cores() and checked_threads(1, CPU) == 1
    assert checked_threads(None, torch.device("cuda")) is None
    with pytest.raises(UsageError, match="--threads must be at least 1, but is 0"):
        checked_threads(0, CPU)
    with pytest.raises(TooManyThreads, match=f"--threads is {available_cores() + 1}, but"):
        checked_threads(available_cores() + 1, CPU)


# ── bandwidth ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("words", [0, 5, 16, (1 << 15) + 3, 5 * (1 << 15)])
def test_the_native_read_kernel_reads_every_word(threads, words):
    reader = read_native.Reader(threads)
    x = torch.arange(1, words + 1, dtype=torch.int64)
    assert reader.read(x) == words * (words + 1) // 2
    if words:
        x[words // 2] += 1
        assert reader.read(x) == words * (words + 1) // 2 + 1
    reader.close()


def test_without_a_compiler_torch_reads_and_the_roofline_says_so(monkeypatch):
    def missing(threads):
        raise NoCompiler(None, ("g++",))

    monkeypatch.setattr(roofline, "CPU_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "last_level_cache", lambda: 0)
    assert roofline.cpu_read()[1].startswith("a C++ kernel over")
    monkeypatch.setattr(roofline, "Reader", missing)
    rate, how = roofline.cpu_read()
    assert rate > 0 and how.startswith("a sum over") and "NoCompiler" in how


def test_more_is_read_than_caches_hold(tmp_path, monkeypatch):
    for index, size in enumerate(("64K", "1024K", "32M", "")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert read_native.last_level_cache(tmp_path) == 32 << 20
    assert read_native.last_level_cache(tmp_path / "nothing") == read_native.sysconf_cache()
    monkeypatch.setattr(roofline, "free_memory", lambda device: 16 << 30)
    for cache_size, expected in ((32 << 20, roofline.CPU_BYTES), (100 << 20, 500 << 20), (10 << 30, 8 << 30)):
        monkeypatch.setattr(roofline, "last_level_cache", lambda size=cache_size: size)
        assert roofline.cpu_buffer() == expected
