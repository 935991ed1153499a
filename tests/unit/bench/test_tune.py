"""`graft tune` with clocks that the tests set: what is chosen, what is told, what is written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

import graft
from conftest import tiny
from graft.base.errors import GraftError, NoGpu
from graft.bench.tune import search as workbench
from graft.bench.tune.results import StepSample, step_sample, weight_bytes
from graft.bench.tune.search import KEPT, MARGIN, Failure, candidates, tune
from graft.bench.tune.timers import noted_steps
from graft.cli.app import app
from graft.cli.measure import tune as command
from graft.engine.params import SamplingParams
from graft.engine.scheduler import StepPlan
from graft.engine.setup.choices import choice_note, choice_notes, model_shapes
from graft.ops.fused_linear import choice
from graft.ops.fused_linear.choice import choose_kernel, overridden
from graft.ops.fused_linear.kinds import Gemm, IntegerGemm, LinearShape, Matvec, how_problem
from graft.ops.fused_linear.tables import TunedEntry, read_table, write_table
from graft.ops.ran import OpKernels, Ran
from graft.weights.packing import pack_int4

CPU = torch.device("cpu")
DOWN = LinearShape(4096, 14336, "plain", False, False)
UP = LinearShape(14336, 4096, "plain", True, True)


USUAL = Matvec(2, 4)
SHIPPED = {shape: {1: TunedEntry(USUAL, 20.0, "NVIDIA H200")} for shape in (DOWN, UP)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(workbench, "shipped_table", lambda: SHIPPED)
    choice.forget()
    yield tmp_path
    choice.forget()


def clock(fast, other=10.0):
    """Every candidate takes `other`, those in `fast` what is said there: microseconds or why it fails."""
    return lambda shape, tokens, ways: [fast.get(how, other) for how in ways]


def sample(us):
    return StepSample(us, us + 1, us + 9)


def test_the_fastest_candidate_is_chosen():
    found = tune([DOWN, UP], [1, 8], CPU, timer=clock({Matvec(2, 8): 3.0, Gemm(32, 8, 64, 1, 4, 6, 8): 4.0}))
    assert found.device == "cpu" and found.failures == () and found.steps == ()
    for shape in (DOWN, UP):
        assert found.table[shape] == {
            1: TunedEntry(Matvec(2, 8), 3.0, "cpu"),
            8: TunedEntry(Gemm(32, 8, 64, 1, 4, 6, 8), 4.0, "cpu"),
        }
    first = found.trials[0]
    assert first.gb_per_s == pytest.approx(4096 * 14336 * 2 / 3e-6 / 1e9)
    assert first.shipped == USUAL and first.gain == pytest.approx(10 / 3)


def test_what_does_not_run_is_told_and_not_chosen():
    found = tune([DOWN], [1], CPU, timer=clock({None: "OutOfResources: shared memory", Matvec(2, 8): 3.0}))
    assert found.failures == (Failure(DOWN, 1, None, "OutOfResources: shared memory"),)
    assert found.failures[0].text() == "plain 4096x14336, 1 token: library: OutOfResources: shared memory"
    assert found.table[DOWN][1].how == Matvec(2, 8)


def test_an_interrupted_run_keeps_what_it_has():
    kept = []

    def interrupted(shape, tokens, ways):
        if shape == UP:
            raise KeyboardInterrupt
        return clock({Matvec(2, 8): 3.0})(shape, tokens, ways)

    with pytest.raises(KeyboardInterrupt):
        tune([DOWN, UP], [1], CPU, timer=interrupted, keep=kept.append)
    assert kept == [{DOWN: {1: TunedEntry(Matvec(2, 8), 3.0, "cpu")}}]


def test_a_shape_that_nothing_runs_gets_no_entry_and_none_at_all_is_an_error():
    def only_up(shape, tokens, ways):
        return ["no memory" if shape == DOWN else 5.0 for _ in ways]

    found = tune([DOWN, UP], [1], CPU, timer=only_up)
    assert set(found.table) == {UP} and len(found.failures) == len(set(candidates(DOWN, 1)))
    with pytest.raises(GraftError, match=r"no kernel ran.*plain 4096x14336, 1 token: library: no memory"):
        tune([DOWN], [1], CPU, timer=only_up)


def test_a_step_goes_before_what_is_best_alone():
    """The second best alone is the best in a step; the fourth would be better still, but is not tried."""
    ways = list(candidates(DOWN, 1))
    order = [Matvec(1, 4), Matvec(2, 8), Matvec(4, 4), Matvec(4, 8)]
    assert set(order) <= set(ways) and KEPT == 3
    alone = clock({how: 1.0 + i for i, how in enumerate(order)}, other=50.0)
    tried = []

    def step(tokens):
        taken = {shape: choose_kernel(shape, tokens, "cpu").how for shape in (DOWN, UP)}
        tried.append(taken)
        times = {Matvec(2, 8): 5.0, Matvec(4, 8): 1.0}
        return sample(100.0 + sum(times.get(how, 10.0) for how in taken.values()))

    found = tune([DOWN, UP], [1, 2], CPU, timer=alone, step=step, in_step=[1])
    assert found.table[DOWN] == {
        1: TunedEntry(Matvec(2, 8), 2.0, "cpu", "in a step"),
        2: TunedEntry(order[0], 1.0, "cpu"),
    }
    assert found.table[UP][1] == TunedEntry(Matvec(2, 8), 2.0, "cpu", "in a step")
    assert found.steps[0].us == 110.0 and found.steps[0].tokens == 1
    assert all(how in (*order[:3], USUAL) for t in tried for how in t.values())
    assert choice.OVERRIDES == []
    whole = [one.what for one in found.tried if one.shape is None]
    assert whole == ["the fastest alone", "the choices that come with graft"] and len(found.tried) == len(tried)
    assert {one.how for one in found.tried if one.shape == DOWN} <= set(order[:3])
    assert all(one.sample.p99 == one.sample.us + 9 and one.tokens == 1 for one in found.tried)


def test_times_of_steps_have_a_median_and_a_slowest():
    found = step_sample(100.0, [1e-6 * (100 + i) for i in range(101)])
    assert (found.us, found.p50, found.p99) == (100.0, 150.0, 199.0)
    assert step_sample(5.0, []) == StepSample(5.0, 5.0, 5.0)


def test_steps_are_noted_while_an_engine_runs(quantized):
    engine = quantized.engine
    before = engine.count
    with noted_steps(engine) as noted:
        quantized.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.count(StepPlan(1, 1), [], 0.25, decoding=True)
    assert noted == [0.25] and engine.count == before  # a step that is no replay is not one of them


def test_a_gain_within_the_noise_changes_nothing():
    order = [Matvec(1, 4), Matvec(2, 8)]
    alone = clock({how: 1.0 + i for i, how in enumerate(order)})
    for gain, expected in ((MARGIN / 2, order[0]), (MARGIN * 2, order[1])):

        def step(tokens, gain=gain):
            how = choose_kernel(DOWN, tokens, "cpu").how
            return sample({order[0]: 100.0, order[1]: 100.0 * (1 - gain)}.get(how, 500.0))

        assert tune([DOWN], [1], CPU, timer=alone, step=step, in_step=[1]).table[DOWN][1].how == expected


def test_the_shipped_choices_are_kept_where_a_step_likes_them():
    def step(tokens):
        return sample(50.0 if choose_kernel(DOWN, tokens, "cpu").how == USUAL else 60.0)

    alone = clock({USUAL: 40.0})  # the slowest of all
    found = tune([DOWN], [1], CPU, timer=alone, step=step, in_step=[1])
    assert found.table[DOWN][1] == TunedEntry(USUAL, 40.0, "cpu", "in a step")
    assert (found.steps[0].us, found.steps[0].shipped_us) == (50.0, 50.0)


def test_a_step_that_does_not_run_leaves_what_was_best_alone():
    alone = clock({Matvec(2, 8): 3.0})
    found = tune([DOWN], [1], CPU, timer=alone, step=lambda tokens: "no memory", in_step=[1])
    assert found.table[DOWN][1] == TunedEntry(Matvec(2, 8), 3.0, "cpu", "alone") and found.steps == ()
    assert [failure.text() for failure in found.failures] == ["a step of 1 token: in a step: no memory"] * 2
    with pytest.raises(GraftError, match="step="):
        tune([DOWN], [1], CPU, timer=alone, in_step=[1])


@pytest.mark.parametrize("format", ["plain", "int8", "fp8", "int4"])
@pytest.mark.parametrize("tokens", [1, 3, 5, 128])
def test_candidates_are_distinct_and_can_run(format, tokens):
    for shape in (LinearShape(4096, 4096, format, False, False), LinearShape(96, 1020, format, True, True)):
        ways = list(candidates(shape, tokens))
        assert len(ways) == len(set(ways)) and None in ways
        assert all(how_problem(how, shape, tokens) is None for how in ways)
        assert all(how.tokens >= tokens for how in ways if isinstance(how, Gemm))
        assert any(isinstance(how, Gemm | IntegerGemm) for how in ways) or (tokens == 1 and format != "int4")


def test_bytes_of_weights_and_scales():
    assert weight_bytes(UP) == 2 * 14336 * 4096 * 2
    assert weight_bytes(LinearShape(64, 256, "int8", False, False)) == 64 * (256 + 4)
    assert weight_bytes(LinearShape(64, 256, "int4", False, False)) == 64 * (128 + 2 * 2)


def test_without_a_gpu_it_refuses():
    with pytest.raises(NoGpu, match="torch sees none"):
        tune([DOWN], [1], CPU)


@pytest.fixture(scope="module")
def quantized():
    return graft.LLM(tiny("llama"), quantize="int8", kv_cache_memory="1MiB", max_num_seqs=2, backend="eager")


def test_the_shapes_of_a_model_come_from_its_graph(quantized):
    shapes = model_shapes(quantized.graph_module)
    config = quantized.model.module.config
    hidden, middle, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    assert shapes[LinearShape(hidden, middle, "int8", False, False)] == layers
    nodes = [n for n in quantized.graph_module.graph.nodes if n.target is torch.ops.graft.fused_linear.default]
    assert sum(shapes.values()) == len(nodes) > layers
    plain = graft.LLM(tiny("llama"), kv_cache_memory="1MiB", max_num_seqs=2, device="cpu", backend="eager")
    assert model_shapes(plain.graph_module) == {} and choice_note(plain.graph_module, "gpu") is None


def test_4_bit_weights_keep_their_depth():
    weight, scale = pack_int4(torch.zeros(64, 640)), torch.ones(64, 5)
    made = make_fx(lambda x, w, s: torch.ops.graft.fused_linear(x, w, None, s, activation="silu"))
    graph = made(torch.ones(1, 3, 640), weight, scale)
    assert model_shapes(graph) == {LinearShape(32, 640, "int4", True, False): 1}


def test_the_report_tells_where_choices_come_from(quantized):
    module = quantized.graph_module
    shapes = list(model_shapes(module))
    total = len(shapes)
    one, many = ({count: TunedEntry(Gemm(), 1.0, "gpu") for count in counts} for counts in ((1,), (1, 64)))
    assert choice_note(module, "gpu") == (  # the shipped table has 8-bit weights for one token
        f"fused_linear: {total} take their nearest, {total} for one token alone, and torch's or the default kernel"
        " runs more; `graft tune MODEL` measures"
    )
    with overridden(dict.fromkeys(shapes[1:], many)):
        assert choice_note(module, "gpu") == (
            f"fused_linear: {total - 1} of {total} shapes measured on gpu, 1 takes its nearest;"
            " `graft tune MODEL` measures"
        )
    with overridden({**dict.fromkeys(shapes, many), shapes[0]: one}):
        assert "1 for one token alone" in choice_note(module, "gpu")
    with overridden(dict.fromkeys(shapes, many)):
        assert choice_note(module, "gpu") == f"fused_linear: {total} of {total} shapes measured on gpu"
        assert "measured on gpu (this is other)" in choice_note(module, "other")
    assert choice_notes(module, CPU, {}) == [] and not any("fused_linear:" in n for n in quantized.report.notes)
    named = OpKernels((Ran(("library",), "existing", note="named"),))
    assert choice_notes(module, torch.device("cuda"), {"graft::fused_linear": named}) == []


def test_a_step_that_is_not_recorded_gives_no_time(quantized):
    from graft.bench.tune.timers import DecodeTimer

    assert DecodeTimer(quantized)(2) == (
        "no decode step was a capture: decode: no CUDA graphs, because the model is on cpu"
    )


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom graft.cli.app import app\n"
        "assert 'Token counts' in CliRunner().invoke(app, ['tune', '--help']).output\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def invoke(*args):
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_needs_a_gpu_and_sensible_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = invoke("tune", "tiny-llama")
    assert refused.exit_code == 2 and "torch sees none here" in refused.stderr
    for counts in ("0,1", "many"):
        assert invoke("tune", "tiny-llama", "--tokens", counts).exit_code == 2


@pytest.fixture
def pretend(monkeypatch, quantized):
    """A machine with a GPU whose clock prefers one kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "my gpu")
    monkeypatch.setattr(command, "load_llm", lambda *args, **options: quantized)

    def measure(llm, shapes, counts, device, in_place, progress, keep):
        timer = clock({Matvec(2, 8): 3.0, Matvec(1, 4): "OutOfResources"})
        return tune(shapes, counts, CPU, progress, timer=timer, keep=keep, step=lambda _: sample(70.0), in_step=[1])

    monkeypatch.setattr(command, "measure", measure)


def test_the_command_writes_a_table_that_lookups_read(pretend, cache, quantized, tmp_path):
    shape = next(iter(model_shapes(quantized.graph_module)))
    before = choose_kernel(shape, 1, "my gpu")
    told = invoke("tune", "tiny-llama", "--tokens", "1,4")
    assert told.exit_code == 0, told.stderr
    assert shape.key() in told.stdout and "matvec(rows=2, warps=8)" in told.stdout and "3.33x" in told.stdout
    assert "did not run" in told.stdout and "matvec(rows=1, warps=4): OutOfResources" in told.stdout
    assert "P99" in told.stdout and " 79" in told.stdout and "the fastest alone" in told.stdout
    path = cache / "tuned" / "my_gpu.json"
    assert set(read_table(path)[shape]) == {1, 4}
    assert choose_kernel(shape, 1, "my gpu").how == Matvec(2, 8) != before.how
    other = tmp_path / "mine.json"
    write_table({DOWN: {1: TunedEntry(None, 1.0, "cpu")}}, other)
    document = json.loads(invoke("tune", "tiny-llama", "--tokens", "1", "-o", str(other), "--json").stdout)
    assert document["file"] == str(other) and document["failures"]
    row = next(row for row in document["rows"] if row["shape"] == shape.key())
    assert row["kind"] == "matvec" and row["us"] == 3.0 and row["measured"] == "in a step" and row["calls"] > 0
    assert document["tried"][0] == {
        "tokens": 1, "shape": None, "what": "the fastest alone", "us": 70.0, "p50": 71.0, "p99": 79.0,
    }  # fmt: skip
    assert any(one["shape"] == shape.key() and "(" in one["what"] for one in document["tried"])
    assert set(read_table(other)) == {DOWN, *model_shapes(quantized.graph_module)}


def test_a_file_that_cannot_be_merged_into_is_told_first(pretend, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load_llm", lambda *args, **options: pytest.fail("loaded"))
    path = tmp_path / "mine.json"
    path.write_text("{")
    refused = invoke("tune", "tiny-llama", "-o", str(path))
    assert refused.exit_code == 2 and "mine.json: not JSON" in refused.stderr and path.read_text() == "{"


def test_ops_shows_choices_below_the_kernels():
    told = invoke("ops", "fused_linear", "--device", "cpu")
    assert told.exit_code == 0, told.stderr
    lines = told.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if "by tokens of a call" in line)
    assert any(line.strip().startswith("reference") for line in lines[:start])
    first = next(line for line in lines[start:] if line.strip().startswith("plain 4096x14336: 1 "))
    assert ", more: library; measured on NVIDIA H200" in first
    rows = json.loads(invoke("ops", "fused_linear", "--device", "cpu", "--json").stdout)["items"]
    choices = next(row for row in rows if row["kernel"] == "matvec")["choices"]
    assert {"shape", "first", "last", "kind", "device"} <= set(choices[0]) and choices[0]["first"] == 1
    assert all(choice["kernel"] == row["kernel"] for row in rows for choice in row.get("choices", ()))
    assert {row["kernel"] for row in rows if "choices" in row} == {
        "matvec",
        "int4_gemm",
        "integer_gemm",
        "balanced_gemm",
        "gemm",
        "library",
    }
    assert "by tokens" not in invoke("ops", "rope", "--device", "cpu").stdout
