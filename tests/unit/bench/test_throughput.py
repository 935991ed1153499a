"""graft bench --throughput: loads, what is told of them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import graft
from capture_cases import engine
from conftest import tiny
from graft.base.errors import GraftError, PromptTooLong, UsageError
from graft.bench.limits.traffic import weight_bytes
from graft.bench.loads import throughput
from graft.bench.loads.bound import MachineRates, load_bound
from graft.bench.loads.phases import PHASES, LoadPhases
from graft.bench.loads.spread import AskedLoad, HistogramBin, histogram
from graft.bench.loads.throughput import Load, Log, Spread, measure_load, row_of
from graft.cli.app import app


@pytest.fixture
def clock(monkeypatch):
    """A second passes at every look, and while nobody does anything."""
    now = [0.0]

    def look():
        now[0] += 1.0
        return now[0]

    def sleep(seconds):
        assert seconds > 0
        now[0] += seconds

    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=look, sleep=sleep))
    return now


def test_every_request_gets_all_of_its_tokens(clock, monkeypatch):
    llm = engine("llama", True, max_num_seqs=4)
    told, requests, add = [], [], llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda *asked: requests.append(add(*asked)) or requests[-1])
    row = measure_load(llm, Load(9, 5, 10), lambda *what: told.append(what))
    assert [len(request.new_tokens) for request in requests[-10:]] == [5] * 10
    assert row.output_tokens_per_s == pytest.approx(50 / row.seconds)
    assert row.steps == row.prompt_steps + (row.steps - row.prompt_steps) and row.prompt_steps >= 3
    assert 0 < row.batch <= 4 == row.max_num_seqs and 0 < row.cache_percent <= 100
    assert told[-1] == ("9/5: requests", 10, 10)
    assert llm.engine.idle and llm.engine.manager.available == llm.engine.manager.blocks


def test_requests_come_as_the_rate_says(clock):
    llm = engine("llama", False, max_num_seqs=4)
    row = measure_load(llm, Load(3, 2, 6, rate=1e-4))  # long gaps: each runs alone
    assert row.batch <= 1 and row.behind == ""
    fast = measure_load(llm, Load(3, 2, 6, rate=100.0))
    assert "100 requests/s were asked for" in fast.behind and fast.first_token.p99 > row.first_token.p99
    gaps = Load(1, 1, 2000, rate=5.0).arrivals()
    assert gaps == sorted(gaps) and gaps[-1] == pytest.approx(1999 / 5) and gaps == Load(1, 1, 2000, 5.0).arrivals()


def test_times_of_tokens():
    log, one = Log(), SimpleNamespace()
    state = SimpleNamespace(
        scheduler=SimpleNamespace(running=[one, one], max_num_seqs=8), manager=SimpleNamespace(available=1, blocks=4),
        stats=SimpleNamespace(preemptions=2, bucket_misses=0),
    )  # fmt: skip
    log = Log(came={1: 0.5, 2: 1.0})
    log.note(state, [1], 2.0, 1.0, decoding=False)
    log.note(state, [1, 2], 3.0, 1.0, decoding=False)
    log.note(state, [1, 2], 3.25, 0.25, decoding=True)
    assert log.first_token == [1.5, 2.0] and log.between == [1.0, 0.25, 0.25]
    row = row_of(state, Load(4, 2, 2), log, 4.0)
    assert (row.steps, row.prompt_steps, row.batch, row.cache_percent, row.preemptions) == (3, 2, 2.0, 75.0, 2)
    assert (row.prompt_percent, row.decode_percent) == (50.0, 6.25)
    assert Spread.of([0.001]) == Spread(1.0, 1.0, 1.0) and Spread.of([]) is None
    assert Spread.of([i / 1e3 for i in range(101)]) == Spread(*map(pytest.approx, (50.0, 90.0, 99.0)))


def test_what_is_wrong_is_told_before_anything_runs():
    with pytest.raises(UsageError, match="at least 1"):
        Load(0, 1, 1)
    with pytest.raises(UsageError, match="more than 0 requests"):
        Load(1, 1, 1, rate=0.0)
    llm = graft.LLM(tiny("llama"), backend="eager", max_num_seqs=2)
    with pytest.raises(PromptTooLong):
        measure_load(llm, Load(llm.model.context, 1, 1))
    for given, message in (
        (["--throughput", "4/4", "--requests", "0"], "--requests must be at least 1"),
        (["--throughput", "12"], "lengths like 128/128"),
        (["--throughput", "4/4:"], "with a number of requests"),
        (["--throughput", "4/4:0"], "--requests must be at least 1"),
        (["--throughput", "4/4", "--plot", "loads.txt"], "must end in .png"),
        (["--preset", "trtlm"], "did you mean 'trtllm'"),
        (["--throughput", "200000/1"], "context"),
    ):
        done = CliRunner().invoke(app, ["bench", "llama-3.1-8b", *given])
        assert isinstance(done.exception, GraftError) or message in done.output, given
        assert message in (str(done.exception) if isinstance(done.exception, GraftError) else done.output)


def test_the_command_prints_a_row_a_load(tmp_path):
    asked = ["--throughput", "4/2:5,6/3", "--requests", "3", "--plot", str(tmp_path / "loads.svg")]
    done = CliRunner().invoke(app, ["bench", "tiny-llama", *asked, "--backend", "eager", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [(row["load"]["isl"], row["load"]["requests"]) for row in document["rows"]] == [(4, 5), (6, 3)]
    assert (
        document["rows"][0]["idle_percent"] is None
        and sum(one["decode"] + one["prompts"] for one in document["rows"][0]["step_times"])
        == document["rows"][0]["steps"]
    )
    assert (tmp_path / "loads.svg").stat().st_size > 10_000
    assert document["setup"]["model"] == "tiny-llama" and document["rows"][0]["output_tokens_per_s"] > 0


def test_an_interrupted_run_shows_the_loads_that_are_through(monkeypatch):
    from graft.bench.loads import throughput

    measure = throughput.measure_load

    def interrupt(llm, load, progress):
        if load.isl == 6:
            raise KeyboardInterrupt
        return measure(llm, load, progress)

    monkeypatch.setattr(throughput, "measure_load", interrupt)
    asked = ["bench", "tiny-llama", "--throughput", "4/2:2,6/3:2,5/2:2", "--backend", "eager"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1 and "4/2" in done.stdout and "interrupted; 1 of 3 loads were measured" in done.stderr
    document = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert document["interrupted"] and [row["load"]["isl"] for row in document["rows"]] == [4]


def test_the_bound_of_a_load_is_its_arithmetic_and_its_bytes():
    """By hand, and slow memory, which weights are read from once for all requests of a step."""
    llm = engine("llama", True, max_num_seqs=4)
    module, batch = llm.model.module, 4
    rates = MachineRates(matrix_flops=1e9, attention_flops=2e9, read_bytes=1e10)
    load = Load(20, 10, batch)
    matrices = sum(w.numel() for name, w in module.named_parameters() if w.ndim > 1 and "layers" in name)
    head = module.get_output_embeddings().weight.numel()
    config = module.config
    pairs = config.num_hidden_layers * 20 * 21 / 2
    prompt = (2 * 20 * matrices + 2 * head) / 1e9
    prompt += 4 * config.num_attention_heads * config.head_dim * pairs / 2e9
    cached = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * module.dtype.itemsize * 25
    token = 2 * (matrices + head) / 1e9 + cached / 1e10
    assert load_bound(llm, load, rates) == pytest.approx(10 / (prompt + 9 * token))
    slow = replace(rates, read_bytes=1e3)
    weights = weight_bytes(module, batch) / batch / 1e3
    assert load_bound(llm, load, slow) == pytest.approx(10 / (prompt + 9 * (weights + cached / 1e3)))


@pytest.mark.parametrize("looped", [False, True])
def test_phases_are_all_of_the_time_and_leave_nothing_behind(looped, monkeypatch):
    """What a call within another takes counts once. Without a GPU there are no events."""
    llm = engine("llama", looped, max_num_seqs=4)
    watched = llm.engine, llm.engine.scheduler, llm.engine.loop
    before = [None if one is None else {*vars(one)} for one in watched]
    row = measure_load(llm, Load(9, 5, 10))
    assert [None if one is None else {*vars(one)} for one in watched] == before
    assert [*row.phase_percent] == [*PHASES, "other"] and sum(row.phase_percent.values()) == pytest.approx(100)
    assert all(share >= 0 for share in row.phase_percent.values()), row.phase_percent
    assert all(row.phase_percent[name] > 0 for name in ("schedule", "bookkeeping"))
    assert row.phase_percent["sampling"] > 0 or looped
    assert (row.phase_percent["launch"] > 0) is looped and row.idle_percent is None
    if not looped:
        assert row.phase_percent["prefill"] > 0 and row.phase_percent["decode"] > 0


def test_what_a_call_takes_counts_for_it_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("graft.bench.loads.phases.time", SimpleNamespace(perf_counter=lambda: now[0]))
    phases = LoadPhases()

    def inner():
        now[0] += 2.0

    timed = phases.timed(inner, "model")

    def outer():
        now[0] += 1.0
        timed()
        now[0] += 1.0

    phases.timed(outer, "launch")()
    assert phases.seconds == {"launch": 2.0, "model": 2.0}
    phases.settle(decoding=False)
    timed()
    phases.settle(decoding=True)
    assert phases.shares(8.0) == {
        **dict.fromkeys(PHASES, 0.0),
        "launch": 25.0,
        "prefill": 25.0,
        "decode": 25.0,
        "other": 25.0,
    }


class Event:
    """Of a device: at a time, once it is recorded."""

    def __init__(self, at):
        self.at = at

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return later.at - self.at


def test_the_device_is_idle_between_the_end_of_a_step_and_the_next():
    """Steps from 0 to 10 ms, from 10.5 (launched ahead) and, when nothing was in flight, from 27."""
    times = [(0.0, 10.0), (10.5, 20.0), (27.0, 30.0)]
    steps = [SimpleNamespace(arrival=SimpleNamespace(begin=Event(a), done=Event(b)), tokens=list) for a, b in times]
    loop = SimpleNamespace(in_flight=[])
    loop.land = loop.in_flight.remove
    loop.begin = lambda step: loop.in_flight.append(step) or step
    loop.go_ahead = lambda step: None
    phases = LoadPhases()
    phases.watch_steps(loop)
    loop.begin(steps[0])
    loop.begin(steps[1])
    assert loop.go_ahead(steps[1]) is None
    loop.land(steps[0])
    loop.land(steps[1])
    loop.begin(steps[2])
    assert phases.idle == pytest.approx(0.0005 + 0.007)


def test_steps_by_how_long_they_took():
    assert histogram([], []) == ()
    found = histogram([0.0009, 0.001, 0.0041], [0.030])
    assert found == (
        HistogramBin(1.0, 2, 0),
        HistogramBin(2.0, 0, 0),
        HistogramBin(5.0, 1, 0),
        HistogramBin(10.0, 0, 0),
        HistogramBin(20.0, 0, 0),
        HistogramBin(50.0, 0, 1),
    )


def test_a_load_without_a_number_fills_the_batch():
    load = AskedLoad(128, 2048, None).among(1024, 57_000, 32)
    assert load.requests == 57_000 // 68  # one wave is more than 300,000 tokens
    assert AskedLoad(128, 128, None).among(1024, 57_000, 32).requests == 3 * 1024
    assert AskedLoad(20_000, 2_000, None).among(1024, 100, 32).requests == 150  # one at a time
    assert AskedLoad(128, 128, 7).among(1024, 57_000, 32) == Load(128, 128, 7)
