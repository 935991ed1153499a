"""Where the time of a decode step goes: sums, overlap, gaps, and what each kernel must read."""

from __future__ import annotations

import io
import json
from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import graft
from graft.backends.native.call import RegionCall
from graft.base.errors import OutOfCache
from graft.bench.kernels import kernel_bytes
from graft.bench.kernels.kernel_bytes import WeightRead, linear_weights, weights_read
from graft.bench.kernels.kernel_times import (
    KernelTime,
    Launch,
    StepTimes,
    added_times,
    cpu_calls,
    gpu_launches,
    grid_text,
    kernel_rows,
    kernel_times,
    union,
)
from graft.bench.limits.roofline import Roofline
from graft.bench.limits.traffic import step_bytes
from graft.bench.plan import Cell
from graft.cli.app import app
from native_cases import needs_compiler

ROOF = Roofline(10.0, 1.0, "", "")


@cache
def engine() -> graft.LLM:
    return graft.LLM("tiny-llama", dtype="float32", device="cpu", backend="eager")


def kernel(name: str, start: float, duration: float, grid=(4, 1, 1), **more):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"grid": grid}, **more}


def test_kernels_copies_and_nothing_else_are_taken_from_a_trace():
    events = [
        kernel("matvec", 1.0, 2.0, (4096, 1, 1)),
        kernel("copy", 3.0, 1.0, cat="gpu_memcpy", args={}),
        kernel("aten::mm", 0.0, 9.0, cat="cpu_op"),
        kernel("a step", 0.0, 9.0, cat="gpu_user_annotation"),
        {"ph": "i", "cat": "kernel", "name": "a mark", "ts": 1.0},
    ]
    assert gpu_launches(events) == [Launch("matvec", "4096", 1.0, 2.0), Launch("copy", "", 3.0, 1.0)]
    assert grid_text([8, 32, 1]) == "8×32" and grid_text([1, 1, 1]) == "1" and grid_text(None) == ""


def test_kernels_that_overlap_are_busy_once():
    """With programmatic dependent launch a kernel begins before the one ahead has ended."""
    launches = [
        Launch("a", "", 0.0, 4.0),
        Launch("b", "", 3.0, 3.0),
        Launch("c", "", 8.0, 1.0),
        Launch("d", "", 8.2, 0.5),
    ]
    assert union(launches) == pytest.approx(6.0 + 1.0) and sum(one.duration for one in launches) == 8.5


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20))
def test_busy_time_is_the_number_of_covered_instants(spans):
    covered = {instant for start, length in spans for instant in range(start, start + length)}
    assert union([Launch("k", "", float(s), float(d)) for s, d in spans]) == len(covered)


def test_a_kernel_adds_what_those_before_it_leave_uncovered():
    """b begins under a and ends after it, c runs inside d, e ends with nothing left to add."""
    launches = [
        Launch("a", "", 0.0, 4.0),
        Launch("b", "", 3.0, 3.0),
        Launch("d", "", 8.0, 4.0),
        Launch("c", "", 9.0, 1.0),
        Launch("e", "", 11.0, 1.0),
    ]
    assert added_times(launches) == [4.0, 2.0, 3.0, 1.0, 0.0]
    assert added_times(launches[::-1])[-2:] == [2.0, 4.0], "in whatever order a trace lists them"
    assert added_times([]) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20))
def test_what_kernels_add_is_the_busy_time(spans):
    """And of each no more than it takes, and no less than what it runs alone."""
    launches = [Launch("k", "", float(s), float(d)) for s, d in spans]
    added = added_times(launches)
    assert sum(added) == union(launches)
    for index, (launch, more) in enumerate(zip(launches, added, strict=True)):
        alone = union(launches) - union(launches[:index] + launches[index + 1 :])
        assert alone <= more <= launch.duration


def test_rows_are_per_step_and_by_grid():
    launches = [Launch("matvec", "8", 0, 2.0), Launch("matvec", "4", 2, 1.0)] * 3 + [Launch("rope", "1", 9, 3.0)]
    rows = kernel_rows(launches, 3, 10.0, [0.5, 1.0] * 3 + [6.0])
    assert [(r.name, r.grid, r.calls, r.us, r.us_each, r.added_us) for r in rows] == [
        ("rope", "1", pytest.approx(1 / 3), 1.0, 3.0, 2.0),
        ("matvec", "4", 1.0, 1.0, 1.0, 1.0),
        ("matvec", "8", 1.0, 2.0, 2.0, 0.5),
    ]
    assert [r.percent for r in rows] == pytest.approx([20.0, 10.0, 5.0]), "of what they add"


def test_an_op_counts_without_what_it_calls():
    def op(name, start, duration, tid=1):
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "tid": tid}

    events = [
        op("linear", 0, 10),
        op("t", 1, 2),
        op("mm", 4, 5),
        op("resize", 5, 1),
        op("add", 10, 3),
        op("x", 4, 1, 2),
    ]
    own = {call.name: call.duration for call in cpu_calls(events)}
    assert own == {"linear": 3, "t": 2, "mm": 4, "resize": 1, "add": 3, "x": 1}


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

LLAMA_8B = Counter(
    {
        WeightRead(6144, 6144 * 8192): 32,
        WeightRead(4096, 4096 * 8192): 32,
        WeightRead(28672, 28672 * 8192): 32,
        WeightRead(4096, 4096 * 28672): 32,
        WeightRead(128256, 128256 * 8192): 1,
    }
)


@pytest.mark.parametrize(
    ("grid", "calls", "expected"),
    [
        ("6144", 32, 32 * 6144 * 8192),
        ("14336", 32, 32 * 28672 * 8192),  # two rows a program: gate and up
        ("4096", 64, 32 * 4096 * (8192 + 28672)),  # o and down in one kernel
        ("4096", 32, None),  # one of the two, and nothing says which
        ("128256", 1, 128256 * 8192),
        ("132", 32, None),  # programs that stay and take row after row
        ("6144", 31, None),
        ("", 32, None),
    ],
)
def test_bytes_are_given_where_only_one_choice_of_weights_fits(grid, calls, expected):
    assert weights_read(KernelTime("matvec_kernel", grid, calls, 1.0, 1.0, 1.0, 1.0), LLAMA_8B) == expected
    assert weights_read(KernelTime("rope_kernel", grid, calls, 1.0, 1.0, 1.0, 1.0), LLAMA_8B) is None


@pytest.mark.exhaustive
def test_bytes_and_rates_of_a_table(monkeypatch):
    monkeypatch.setattr(kernel_bytes, "cache_bytes", lambda module, context, layers: 1e6 * context)
    weight, count = max(linear_weights(engine()).items(), key=lambda item: item[0].rows)
    rows = [
        KernelTime("fused_linear_matvec", str(weight.rows), count, 2.0, 2.0, 2.0, 1.0),
        KernelTime("attention_split", "8×2", 2, 5.0, 2.5, 5.0, 1.0),
        KernelTime("attention_combine", "8", 2, 1.0, 0.5, 1.0, 1.0),
    ]
    linear, split, combine = kernel_bytes.kernel_bytes(rows, engine(), Cell(2, 16), 10.0)
    assert linear.bytes == count * weight.bytes and linear.gb_per_s == pytest.approx(linear.bytes / 2e-6 / 1e9)
    assert split.bytes == 2e7 and split.gb_per_s == pytest.approx(4000) and combine.bytes is None


# ── a real step ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_on_a_cpu_by_op():
    step = kernel_times(engine(), Cell(2, 16), 5, ROOF)
    assert step.steps == 5 and not step.on_gpu and step.context == 16 + 1 + 3 + 5
    assert step.sum_us == pytest.approx(sum(row.us for row in step.rows)) and step.busy_us == step.sum_us
    assert step.gap_us == pytest.approx(step.wall_us - step.busy_us)
    assert step.step_bytes == pytest.approx(step_bytes(engine().model.module, 2, step.context))
    assert step.floor_us == pytest.approx(step.step_bytes / 10e9 * 1e6)
    products = sum(row.calls for row in step.rows if row.name in ("aten::mm", "aten::addmm"))
    assert products == 9, "two layers of four merged linears, and the head"
    assert engine().engine.idle, "its requests are gone"
    assert kernel_times(engine(), Cell(1, 240), 50, ROOF).steps == (256 - 240 - 7 - 2) // 2, "the context ends"


def test_every_timed_step_has_the_whole_batch(monkeypatch):
    """Prompts of a large batch take many steps, in which those that came first would decode, and end, before the last
    begins: the table of 448 sequences was one of 64, 32 and 16."""
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", backend="eager", max_num_batched_tokens=32)
    rows: list[int] = []
    step_with = llm.engine.step

    def step():
        grown = step_with()
        rows.append(len(llm.engine.scheduler.running))
        return grown

    monkeypatch.setattr(llm.engine, "step", step)
    found = kernel_times(llm, Cell(12, 40), 5, ROOF)
    assert found.steps == 5 and rows[-10:] == [12] * 10 and len(rows) > 15 + 10, "prompts took 15 steps"
    assert 40 + 1 + 3 + 5 <= found.context < 40 + 1 + 3 + 5 + 12


def test_a_batch_that_does_not_run_at_once_is_an_error():
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", backend="eager", max_num_seqs=4)
    with pytest.raises(OutOfCache, match="of a batch of 6 not every request decoded in every step"):
        kernel_times(llm, Cell(6, 16), 5, ROOF)
    assert llm.engine.idle


@needs_compiler
def test_a_native_step_by_kernel():
    llm = graft.LLM("tiny-llama", dtype="float32", device="cpu", backend="native")
    step = kernel_times(llm, Cell(2, 16), 5, ROOF)
    calls = {(row.name, row.grid): row.calls for row in step.rows if row.name.startswith("native ")}
    assert calls["native attention<float>", ""] == 2 and calls["native linear<WeightF32>", "32→128"] == 1
    assert sum(number for (name, _), number in calls.items() if "linear" in name) == 9
    assert all(row.us > 0 for row in step.rows if row.name == "native linear<WeightF32>")
    region = next(n.target for n in llm.engine.graph.graph.nodes if isinstance(n.target, RegionCall))
    assert region.stamps is None, "nobody asks any more"


@pytest.mark.exhaustive
def test_the_command_prints_a_table_or_json():
    small = ("bench", "tiny-llama", "--kernels", "--batch", "2", "--prompt", "16", "--new", "8")
    done = CliRunner().invoke(app, [*small, "--json"])
    document = json.loads(done.stdout)
    (step,) = document["steps"]
    assert step["batch"] == 2 and step["rows"][0]["added_us"] >= step["rows"][-1]["added_us"]
    assert document["setup"]["roofline"]["read_gb_per_s"] > 0


def test_the_table_says_what_it_leaves_out(capsys):
    from graft.cli.measure.bench_show import MOST_KERNELS, show_kernels

    step = kernel_times(engine(), Cell(1, 16), 2, ROOF)
    show_kernels(step, "tiny-llama")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{len(step.rows) - MOST_KERNELS} more:" in printed and "gaps are" in printed
    assert "aten::mm" in printed and "of the step" in printed


def test_the_kernel_table_fits_into_80_columns(monkeypatch):
    """The widest numbers of a step; long names are cut, numbers never."""
    from graft.cli.measure import bench_show

    rows = tuple(
        KernelTime(f"a_kernel_with_a_name_of_sixty_letters_that_goes_on_and_on_{i}", "32×4×16", 1234, 12345.6, 1234.5,
                  12345.6, 100.0, 140_000e6, 4230.4)
        for i in range(3)
    )  # fmt: skip
    step = StepTimes(64, 8065, 8100.5, 20, "NVIDIA H200", True, 12345.6, 12345.6, 12345.6, 0.5, 500, 16e9, 3500, rows)
    console = Console(width=80, record=True, highlight=False, file=io.StringIO())
    monkeypatch.setattr(bench_show, "out", console)
    bench_show.show_kernels(step, "llama-3.1-8b")
    printed = console.export_text()
    lines = printed[: printed.index("A step takes")].splitlines()
    head, *body = (line.split() for line in lines[1:])
    assert head == ["kernel", *bench_show.KERNEL_COLUMNS] and all(len(line) <= 80 for line in printed.splitlines())
    assert [row[-7:] for row in body] == [["1234", "12346", "1234", "12346", "100%", "140000", "4230"]] * 3
    assert "adds: by how much a kernel moves the end of the step" in " ".join(printed.split())
