"""graft bench: the same work for all, failures shown, mistakes told before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from typer.testing import CliRunner

import graft
from graft.cli.app import app
from graft.errors import PromptTooLong, UsageError
from graft.models.load import load_model
from graft.workbench import bench as workbench
from graft.workbench import plot
from graft.workbench.bench import Bench, Graft, Plan, Row, agreement, bench, known_context, prompts_for
from graft.workbench.compare import CompiledRival, EagerRival
from graft.workbench.plot import check_plot, write_plot
from graft.workbench.traffic import cache_bytes, step_bytes, weight_bytes

SMALL = Plan(batches=(1, 3), prompt=12, new=6, repeats=2, against=("eager",))


@cache
def engine() -> graft.LLM:
    return graft.LLM("tiny-llama", dtype="float32", device="cpu")


def command(*args):
    return CliRunner().invoke(app, ["bench", *args])


class Fake:
    """A contestant that notes what it is asked and takes its time from the clock it is given."""

    def __init__(self, name: str, clock, seconds: float, dies: str = "") -> None:
        self.name, self.clock, self.seconds, self.dies = name, clock, seconds, dies
        self.asked: list[tuple[tuple[tuple[int, ...], ...], int]] = []

    def generate(self, prompts, new):
        self.asked.append((tuple(tuple(p) for p in prompts), new))
        self.clock[0] += 1.0 + self.seconds * (new - 1)  # one second for the prompt
        if self.dies:
            raise RuntimeError(self.dies)
        return [[1] * new for _ in prompts]


@pytest.fixture
def fakes(monkeypatch):
    """graft takes 0.1 s a step, eager 0.2 s, compile dies; on a clock of their own."""
    clock = [0.0]
    ours, eager = Fake("graft", clock, 0.1), Fake("hugging face eager", clock, 0.2)
    broken = Fake("hugging face compile", clock, 0.3, "no compiler here\nand a long trace")
    monkeypatch.setattr(workbench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(workbench, "Graft", lambda llm: ours)
    monkeypatch.setattr(workbench, "EagerRival", lambda model: eager)
    monkeypatch.setattr(workbench, "CompiledRival", lambda model, length: broken)
    return ours, eager, broken


def test_first_token_and_steps_are_told_apart_r61(fakes):
    result = bench(engine(), replace(SMALL, against=("eager", "compile")))
    by = {(row.engine, row.batch): row for row in result.rows}
    ours, eager = by["graft", 3], by["hugging face eager", 3]
    assert ours.first_token_ms == pytest.approx(1000) and ours.prefill_tokens_per_s == pytest.approx(3 * 12)
    assert ours.token_ms == pytest.approx(100) and eager.token_ms == pytest.approx(200)
    assert ours.decode_tokens_per_s == pytest.approx(30) and by["graft", 1].decode_tokens_per_s == pytest.approx(10)
    assert result.ratio(eager) == pytest.approx(2.0)
    read = step_bytes(engine().model.module, 3, 12 + 3.5)
    assert ours.gb_per_s == pytest.approx(read / 0.1 / 1e9)
    assert ours.setup_seconds == pytest.approx(1.3), "the first calls: one prompt and three steps"


def test_a_rival_that_fails_is_shown_with_its_reason_and_the_others_go_on(fakes):
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
    monkeypatch.setattr("graft.runtime.llm.LLM", lambda *_, **__: engine())
    done = command("tiny-llama", "--batch", "1,3", "--prompt", "12", "--new", "6", "--against", "eager", "--json")
    assert done.exit_code == 1 and "interrupted; 1 of 2 batch sizes were measured" in done.stderr
    assert json.loads(done.stdout)["interrupted"] is True


def test_steps_that_noise_hides_are_not_given_a_number(fakes):
    fakes[0].seconds = 0.0
    row = bench(engine(), replace(SMALL, against=())).rows[0]
    assert "too short to tell" in row.failed and row.token_ms is None and row.first_token_ms == pytest.approx(1000)


# ── the real contestants ─────────────────────────────────────────────────────────────────────────────────────────


def test_graft_and_eager_give_the_same_tokens():
    calls = prompts_for(engine().model, 9)
    prompts = [next(calls) for _ in range(3)]
    tokens = Graft(engine()).generate(prompts, 7)
    assert tokens == EagerRival(engine().model).generate(prompts, 7) and {len(t) for t in tokens} == {7}
    assert agreement(tokens, tokens) == 1.0 and agreement([[1, 2]], [[1, 3]]) == 0.5 and agreement([[1]], []) is None


def test_the_compiled_rival_gives_the_same_tokens_call_after_call():
    """The cache is emptied between calls and serves shorter ones; compilation is in the first call alone."""
    model = load_model("tiny-smollm2", dtype="float32", device="cpu")
    eager, compiled = EagerRival(model), CompiledRival(model, 20)
    calls = prompts_for(model, 9)
    for new in (4, 1, 9):
        prompts = [next(calls) for _ in range(2)]
        assert compiled.generate(prompts, new) == eager.generate(prompts, new)


def test_the_command_prints_a_table_and_one_json_document_r61(tmp_path):
    picture = tmp_path / "speed.svg"
    small = ("tiny-llama", "--prompt", "16", "--new", "48", "--repeats", "3", "--batch", "2", "--against", "eager")
    done = command(*small, "--json", "--plot", str(picture))
    document = json.loads(done.stdout)
    assert [row["engine"] for row in document["rows"]] == ["graft", "hugging face eager"]
    assert document["setup"]["model"] == "tiny-llama" and document["rows"][1]["same_tokens"] == 1.0
    assert picture.read_text().startswith("<?xml") and [p.name for p in tmp_path.iterdir()] == ["speed.svg"]


def test_a_failure_stands_in_the_table_and_in_the_legend(tmp_path, capsys):
    from graft.cli.bench import show

    setup = {**{"model": "m", "dtype": "float32", "device_name": "CPU", "prompt": 1, "new": 1, "repeats": 1},
             "torch": "2", "backend": "eager", "graft_build_seconds": 1}  # fmt: skip
    rows = (Row("graft", 1, 0.1, 5.0, 200.0, 2.0, 500.0, 1.5, 1.0), Row("rival", 1, failed="RuntimeError: [boom]"))
    show(Bench(setup, rows))
    printed = capsys.readouterr().out
    assert "batch 1, rival failed: RuntimeError: [boom]" in printed and "500" in printed
    write_plot(Bench(setup, rows), tmp_path / "x.svg")
    assert "<!-- rival (failed) -->" in (tmp_path / "x.svg").read_text()


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1, but is 0"),
        (["--batch", "1,x"], "--batch takes numbers"),
        (["--batch", ""], "--batch takes numbers"),
        (["--prompt", "0"], "--prompt must be at least 1"),
        (["--new", "0"], "--new must be at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--prompt", "200", "--new", "56"], "context is 256"),
        (["--against", "egaer"], "did you mean 'eager'"),
        (["--backend", "induktor"], "did you mean 'inductor'"),
        (["--dtype", "float31"], "unknown dtype 'float31'"),
        (["--plot", "speed.jpg"], "the name must end in .png, .svg or .pdf"),
        (["--plot", "no/such/folder/speed.png"], "the folder no/such/folder does not exist"),
        (["--set", "transforms.fuse_rope.enabeld=false"], "did you mean 'enabled'"),
    ],
)
def test_a_mistake_is_told_before_the_model_is_loaded_r63(args, message, monkeypatch):
    monkeypatch.setattr("graft.models.load.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    done = command("tiny-llama", *args)
    assert done.exit_code == 2 and message in done.stderr


def test_the_context_is_known_without_the_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"n_positions": 77}')
    assert known_context(str(tmp_path)) == 77 and known_context("tiny-llama") == 256
    assert known_context("model.gguf") is None
    with pytest.raises(PromptTooLong):
        bench(engine(), replace(SMALL, prompt=250))
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
