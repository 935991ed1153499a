"""graft bench: the same work for all, failures shown, mistakes told before anything is loaded."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from typer.testing import CliRunner

import graft
from graft.base.errors import PromptTooLong, UsageError
from graft.bench import bench as workbench
from graft.bench import plot, runner
from graft.bench.baselines.baseline import Task
from graft.bench.baselines.hf import BASELINES, PEERS, EagerBaseline
from graft.bench.bench import bench, prompts_for
from graft.bench.limits.roofline import Roofline
from graft.bench.limits.traffic import (
    cache_bytes,
    causal_pairs,
    graph_weight_bytes,
    prompt_flops,
    step_bytes,
    weight_bytes,
)
from graft.bench.plan import BenchPlan, Cell, known_context
from graft.bench.plot import check_plot, write_plot
from graft.bench.rows import Bench, Row
from graft.bench.runner import Graft, agreement
from graft.cli.app import app
from graft.models.load import load_model

SMALL = BenchPlan(batches=(1, 3), prompts=(12,), new=6, repeats=2, against=("eager",))
ROOF = Roofline(read_gb_per_s=10.0, matrix_tflops=2.0, read_how="a sum", matrix_how="64³ in float32")


SETUP = {
    **{"model": "m", "dtype": "float32", "device_name": "CPU", "prompts": [128], "new": 1, "repeats": 1},
    **{"torch": "2", "backend": "eager", "graft_build_seconds": 1},
}


@cache
def engine() -> graft.LLM:
    return graft.LLM("tiny-llama", dtype="float32", device="cpu", keep_weights=True)


def command(*args):
    return CliRunner().invoke(app, ["bench", *args])


class Fake:
    """A engine that notes what it is asked and takes its time from the clock it is given."""

    def __init__(self, name: str, clock, seconds: float, dies: str = "") -> None:
        self.name, self.clock, self.seconds, self.dies = name, clock, seconds, dies
        self.asked: list[tuple[tuple[tuple[int, ...], ...], int]] = []

    def generate(self, prompts, new):
        self.asked.append((tuple(tuple(p) for p in prompts), new))
        self.clock[0] += 1.0 + self.seconds * (new - 1)  # one second for the prompt
        if self.dies:
            raise RuntimeError(self.dies)
        return [[1] * new for _ in prompts]


def replace_name(fake: Fake, name: str) -> Fake:
    return Fake(name, fake.clock, fake.seconds)


@pytest.fixture
def fakes(monkeypatch):
    """graft takes 0.1 s a step, eager 0.2 s, compile dies; on a clock of their own."""
    clock = [0.0]
    ours, eager = Fake("graft", clock, 0.1), Fake("hugging face eager", clock, 0.2)
    broken = Fake("hugging face compile", clock, 0.3, "no compiler here\nand a long trace")
    monkeypatch.setattr(runner.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(workbench, "Graft", lambda llm: ours)
    monkeypatch.setitem(BASELINES, "eager", lambda task: eager)
    monkeypatch.setitem(BASELINES, "compile", lambda task: broken)
    monkeypatch.setattr("graft.bench.limits.roofline.measure_roofline", lambda device, dtype: ROOF)
    return ours, eager, broken


def test_first_token_and_steps_are_told_apart(fakes):
    result = bench(engine(), replace(SMALL, against=("eager", "compile")), 5.0, roofline=ROOF)
    by = {(row.engine, row.batch): row for row in result.rows}
    ours, eager = by["graft", 3], by["hugging face eager", 3]
    assert ours.first_token_ms == pytest.approx(1000) and ours.prefill_tokens_per_s == pytest.approx(3 * 12)
    assert ours.token_ms == pytest.approx(100) and eager.token_ms == pytest.approx(200)
    assert ours.decode_tokens_per_s == pytest.approx(30) and by["graft", 1].decode_tokens_per_s == pytest.approx(10)
    assert result.ratio(eager) == pytest.approx(2.0)
    read = step_bytes(engine().model.module, 3, 12 + 3.5)
    assert ours.gb_per_s == pytest.approx(read / 0.1 / 1e9)
    assert ours.roofline_percent == pytest.approx(100 * ours.gb_per_s / 10)
    flops = prompt_flops(engine().model.module, 3, 12)
    assert ours.prefill_tflops == pytest.approx(flops / 1e12) and ours.prefill_percent == pytest.approx(flops / 2e10)
    assert ours.setup_seconds == pytest.approx(1.3), "the first calls: one prompt and three steps"
    assert ours.build_seconds == pytest.approx(6.3) and eager.build_seconds == eager.setup_seconds


def test_a_baseline_that_fails_is_shown_with_its_reason_and_the_others_go_on(fakes):
    result = bench(engine(), replace(SMALL, against=("eager", "compile")))
    dead = [row for row in result.rows if row.engine == "hugging face compile"]
    assert [row.batch for row in dead] == [1, 3]
    assert all(row.failed == "RuntimeError: no compiler here" and row.token_ms is None for row in dead)
    assert all(not row.failed for row in result.rows if row not in dead) and len(result.rows) == 6
    assert len(fakes[2].asked) == 2, "not asked again after it failed"


def test_all_get_the_same_prompts_and_none_comes_twice(fakes):
    """A prompt that came before could be found in a prefix cache; then nothing would be prefilled."""
    bench(engine(), SMALL)
    ours, eager = fakes[0].asked, fakes[1].asked
    assert ours == eager
    seen = [prompt for prompts, _ in ours for prompt in prompts]
    assert len(set(seen)) == len(seen) == (1 + 3) * (1 + 2 * 2)
    assert [new for _, new in ours] == [4, 1, 7, 1, 7] * 2
    assert all(len(prompt) == 12 for prompt in seen)


def test_an_interrupted_run_keeps_what_is_through_and_says_so(fakes, monkeypatch):
    usual = fakes[1].generate

    def interrupt(prompts, new):
        if len(prompts) == 3:
            raise KeyboardInterrupt
        return usual(prompts, new)

    monkeypatch.setattr(fakes[1], "generate", interrupt)
    result = bench(engine(), SMALL)
    assert result.interrupted and [row.batch for row in result.rows] == [1, 1]
    made = engine()
    monkeypatch.setattr("graft.engine.start.start_engine", lambda *_: made.parts)
    monkeypatch.setattr(graft.LLM, "of", lambda _: made)
    done = command("tiny-llama", "--batch", "1,3", "--prompt", "12", "--new", "6", "--against", "eager", "--json")
    assert done.exit_code == 1 and "interrupted; 1 of 2 batch sizes were measured" in done.stderr
    assert json.loads(done.stdout)["interrupted"] is True


def test_steps_that_noise_hides_are_not_given_a_number(fakes):
    fakes[0].seconds = 0.0
    row = bench(engine(), replace(SMALL, against=())).rows[0]
    assert "too short to tell" in row.failed and row.token_ms is None and row.first_token_ms == pytest.approx(1000)


def test_rows_for_every_batch_and_prompt_and_ratios_inside_a_cell(fakes):
    result = bench(engine(), replace(SMALL, prompts=(12, 20)))
    assert [(row.batch, row.prompt) for row in result.rows[::2]] == [(1, 12), (3, 12), (1, 20), (3, 20)]
    assert {len(prompt) for prompts, _ in fakes[0].asked for prompt in prompts} == {12, 20}
    slow = replace(result.rows[-1], decode_tokens_per_s=1.0)
    other = replace(result.rows[0], prompt=99, decode_tokens_per_s=1e9)
    assert replace(result, rows=(other, *result.rows)).ratio(slow) == pytest.approx(30.0), "graft's row of that cell"


@pytest.mark.exhaustive
def test_no_baseline_is_begun_that_would_outlast_the_limit(fakes):
    """Its first calls took 1.6 s at batch 1; after 14 s of 15 they are not begun at batch 3, and the row says so."""
    result = bench(engine(), replace(SMALL, time_limit=15.0))
    by = {(row.engine, row.batch): row for row in result.rows}
    late = by["hugging face eager", 3]
    assert by["hugging face eager", 1].token_ms and by["graft", 3].token_ms, "graft is always measured"
    assert late.token_ms is None and "of 15 s have passed" in late.failed and "--time-limit" in late.failed
    assert all(row.token_ms for row in bench(engine(), replace(SMALL, time_limit=100.0)).rows)


def test_baselines_are_let_go_after_every_cell(fakes, monkeypatch):
    forgotten = []
    monkeypatch.setattr(workbench.torch.compiler, "reset", lambda: forgotten.append(len(fakes[1].asked)))
    bench(engine(), SMALL)
    assert forgotten == [5, 10], "after the first calls and two repeats of two calls, in each cell"


# ── the real engines ─────────────────────────────────────────────────────────────────────────────────────────


def test_graft_and_eager_give_the_same_tokens():
    calls = prompts_for(engine().model, Cell(3, 9))
    prompts = [next(calls) for _ in range(3)]
    tokens = Graft(engine()).generate(prompts, 7)
    assert tokens == EagerBaseline(engine().model).generate(prompts, 7) and {len(t) for t in tokens} == {7}
    assert agreement(tokens, tokens) == 1.0 and agreement([[1, 2]], [[1, 3]]) == 0.5 and agreement([[1]], []) is None


@pytest.mark.exhaustive
def test_a_compiled_baseline_gives_the_same_tokens_call_after_call():
    """The cache is emptied between calls and serves shorter ones; compilation is in the first call alone."""
    model = load_model("tiny-smollm2", dtype="float32", device="cpu")
    eager, compiled = EagerBaseline(model), BASELINES["compile"](Task(model, 20))
    calls = prompts_for(model, Cell(2, 9))
    for new in (4, 1, 9):
        prompts = [next(calls) for _ in range(2)]
        assert compiled.generate(prompts, new) == eager.generate(prompts, new)


def test_the_modes_of_the_compiled_baselines(monkeypatch):
    """A real one compiles for a minute with max-autotune; tests/gpu/test_bench.py runs it."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.append(options))
    names = [BASELINES[name](Task(engine().model, 20)).name for name in ("compile", "autotune")]
    assert names == ["hugging face compile", "hugging face autotune"]
    assert [options["mode"] for options in asked] == [None, "max-autotune"]


def test_peers_are_all_baselines_with_a_line_for_each_phase(fakes, monkeypatch):
    made = engine()
    monkeypatch.setattr("graft.engine.start.start_engine", lambda *_: made.parts)
    monkeypatch.setattr(graft.LLM, "of", lambda _: made)
    for name in ("llama.cpp", "openvino"):
        monkeypatch.setitem(BASELINES, name, lambda task, name=name: replace_name(fakes[1], name))
    done = command("tiny-llama", "--peers", "--prompt", "12", "--new", "6", "--json")
    document = json.loads(done.stdout)
    assert [row["engine"].split()[-1] for row in document["rows"]] == ["graft", *PEERS["cpu"]]
    assert [row["failed"][:12] for row in document["rows"] if row["engine"].endswith("compile")] == ["RuntimeError"]
    assert document["setup"]["batches"] == [1] and "llama.cpp, first calls" in done.stderr


def test_the_command_prints_a_table_and_one_json_document(tmp_path, monkeypatch):
    picture = tmp_path / "speed.svg"
    small = ("tiny-llama", "--prompt", "16", "--new", "48", "--repeats", "3", "--batch", "2", "--against", "eager")
    monkeypatch.setattr("sys.argv", ["/some/bin/graft", "bench", *small])  # what a shell would have passed
    done = command(*small, "--json", "--plot", str(picture))
    document = json.loads(done.stdout)
    assert [row["engine"] for row in document["rows"]] == ["graft", "hugging face eager"]
    setup, (ours, baseline) = document["setup"], document["rows"]
    assert setup["model"] == "tiny-llama" and baseline["same_tokens"] == 1.0
    assert (
        setup["command"] == " ".join(("graft bench", *small))
        and setup["date"].startswith("20")
        and setup["transformers"]
    )
    assert setup["roofline"]["read_gb_per_s"] > 0 and setup["build_phases"]["transforms"] > 0
    assert 0 < ours["roofline_percent"] == pytest.approx(100 * ours["gb_per_s"] / setup["roofline"]["read_gb_per_s"])
    assert ours["build_seconds"] > ours["setup_seconds"] and baseline["build_seconds"] == baseline["setup_seconds"]
    assert picture.read_text().startswith("<?xml") and [p.name for p in tmp_path.iterdir()] == ["speed.svg"]


def test_a_failure_stands_in_the_table_and_in_the_legend(tmp_path, capsys):
    from graft.cli.measure.bench_show import show

    rows = (
        Row("graft", 1, 128, first_token_ms=5.0, token_ms=2.0, decode_tokens_per_s=500.0),
        Row("baseline", 1, 128, failed="RuntimeError: [boom]"),
    )
    show(Bench(SETUP, rows))
    printed = capsys.readouterr().out
    assert "batch 1, baseline failed: RuntimeError: [boom]" in printed and "500" in printed
    write_plot(Bench(SETUP, rows), tmp_path / "x.svg")
    assert "<!-- baseline (failed) -->" in (tmp_path / "x.svg").read_text()


def test_the_table_fits_into_80_columns():
    """The widest numbers that an H200 gives; a terminal or a pipe of 80 columns cuts none of them."""
    from rich.console import Console

    from graft.cli.measure import bench_show

    names = ("graft", *(f"hugging face {name}" for name in BASELINES))
    rows = tuple(
        Row(name, 64, 8065, 99.5, 123.4, 12345.6, 45123.0, 433.3, 54.9, 12.34, 12501.2, 4230.4, 100.0, 1.0)
        for name in names
    )
    console = Console(width=80, record=True, highlight=False, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_show, "out", console)
        bench_show.show(Bench({**SETUP, "prompts": [128, 8065], "roofline": asdict(ROOF)}, rows))
    printed = console.export_text()
    table = printed[: printed.index("Greedy")]
    assert "…" not in table and all(len(line) <= 80 for line in printed.splitlines())
    for value in ("64×8065", "HF autotune", "12346", "433", "55%", "12.3", "12501", "4230", "100%", "123.4", "1.00x"):
        assert value in table, value
    assert "10 GB/s read (a sum)" in " ".join(printed.split())


def test_the_cache_has_room_for_what_is_measured_and_no_more():
    from graft.cli.measure.bench import cache_options

    model = engine().model
    need = cache_options(model, replace(SMALL, prompts=(12, 40)), None, "auto")["kv_cache_memory"]
    per_token = cache_bytes(model.module, 1)
    assert 3 * (40 + 1 + 6) * per_token < need < 3 * (40 + 1 + 6 + 64) * per_token
    assert cache_options(model, SMALL, "1GiB", "auto") == {"kv_cache_memory": "1GiB"}
    fewer = cache_options(model, replace(SMALL, prompts=(12, 40)), None, "fp8")["kv_cache_memory"]
    assert fewer / need == cache_bytes(model.module, 1, torch.float8_e4m3fn) / per_token < 0.5


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1, but is 0"),
        (["--batch", "1,x"], "--batch takes numbers"),
        (["--batch", ""], "--batch takes numbers"),
        (["--prompt", "16,0"], "--prompt must be at least 1, but is 0"),
        (["--prompt", "16;32"], "--prompt takes numbers"),
        (["--time-limit", "0"], "--time-limit must be more than 0 seconds"),
        (["--kernels", "--plot", "speed.png"], "leave --kernels out"),
        (["--new", "0"], "--new must be at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--prompt", "16,200", "--new", "56"], "context is 256"),
        (["--peers", "--prompt", "129"], "context is 256"),
        (["--against", "egaer"], "did you mean 'eager'"),
        (["--backend", "induktor"], "did you mean 'inductor'"),
        (["--dtype", "float31"], "unknown dtype 'float31'"),
        (["--plot", "speed.jpg"], "the name must end in .png, .svg or .pdf"),
        (["--plot", "no/such/folder/speed.png"], "the folder no/such/folder does not exist"),
        (["--set", "transforms.fuse_rope.enabeld=false"], "did you mean 'enabled'"),
    ],
)
def test_a_mistake_is_told_before_the_model_is_loaded(args, message, monkeypatch):
    monkeypatch.setattr("graft.models.load.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    done = command("tiny-llama", *args)
    assert done.exit_code == 2 and message in done.stderr


def test_the_context_is_known_without_the_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"n_positions": 77}')
    assert known_context(str(tmp_path)) == 77 and known_context("tiny-llama") == 256
    assert known_context("model.gguf") is None
    with pytest.raises(PromptTooLong):
        bench(engine(), replace(SMALL, prompts=(12, 250)))
    SMALL.check_context(12 + 1 + 6)


def test_a_missing_matplotlib_is_told_with_the_extra(monkeypatch, tmp_path):
    check_plot(tmp_path / "speed.PNG")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'graft\[bench\]'"):
        check_plot(tmp_path / "speed.png")


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_of_a_step():
    """Tied embeddings count once, as the head; an untied table not at all; experts by the share that is reached."""
    tied = load_model("tiny-smollm2", dtype="bfloat16", device="meta").module
    assert weight_bytes(tied, 1) == 2 * sum(p.numel() for p in tied.parameters())
    untied = load_model("tiny-llama", dtype="float32", device="meta").module
    everything = 4 * sum(p.numel() for p in untied.parameters())
    table = untied.get_input_embeddings().weight
    own = table is not untied.get_output_embeddings().weight
    assert weight_bytes(untied, 8) == everything - (4 * table.numel() if own else 0)
    config = untied.config
    assert cache_bytes(untied, 10) == 10 * 2 * 2 * config.num_key_value_heads * config.head_dim * 4
    assert step_bytes(untied, 3, 10) == weight_bytes(untied, 3) + 3 * cache_bytes(untied, 10)
    experts = load_model("tiny-mixtral", dtype="float32", device="meta").module
    size = sum(p.numel() * 4 for name, p in experts.named_parameters() if ".experts." in name)
    assert size > 0 and weight_bytes(experts, 2) - weight_bytes(experts, 1) == pytest.approx(size * 0.25)


def test_a_sliding_window_bounds_what_is_read():
    module = load_model("tiny-gemma-3", dtype="float32", device="meta").module
    window, kinds = module.config.sliding_window, module.config.layer_types
    assert "sliding_attention" in kinds and "full_attention" in kinds
    full = kinds.count("full_attention")
    more = cache_bytes(module, window + 100) - cache_bytes(module, window)
    per_token = 2 * module.config.num_key_value_heads * module.config.head_dim * 4
    assert more == 100 * full * per_token


def test_operations_of_a_prompt():
    """Every matrix for every token but the head, which is for the last one; a window cuts attention."""
    module = load_model("tiny-llama", dtype="float32", device="meta").module
    config = module.config
    matrices = sum(p.numel() for name, p in module.named_parameters() if p.ndim > 1 and "layers" in name)
    head = module.get_output_embeddings().weight.numel()
    attention = 4 * 2 * (10 * 11 / 2) * config.num_attention_heads * config.head_dim
    assert prompt_flops(module, 3, 10) == 3 * (2 * 10 * matrices + 2 * head + attention)
    assert causal_pairs(5, float("inf")) == 15 and causal_pairs(5, 2) == 1 + 2 + 2 + 2 + 2


def test_bytes_of_quantized_weights():
    class Tiny(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(100, 8), requires_grad=False)
            self.weight = nn.Parameter(torch.zeros(16, 8, dtype=dtype), requires_grad=False)

        def forward(self, ids):
            return nn.functional.embedding(ids, self.table) @ self.weight.float().t()

    assert graph_weight_bytes(symbolic_trace(Tiny(torch.int8)), 1) == 16 * 8
    assert graph_weight_bytes(symbolic_trace(Tiny(torch.float32)), 1) is None, "nothing is quantized"
