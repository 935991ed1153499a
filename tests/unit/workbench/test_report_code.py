"""What a report puts first and beside the graph: launches, bytes, checks; two sides of a change; sources and code."""

from __future__ import annotations

import json
import linecache
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graft.base.errors import DumpError
from graft.bench.kernels.kernel_times import KernelTime, StepTimes
from graft.ir.trace import export_graph
from graft.passes.report import MatchRecord, NumericCheck, TransformRecord
from graft.workbench.report import collect
from graft.workbench.report import headline as headline_module
from graft.workbench.report.code import generated, node_lines, op_kernels
from graft.workbench.report.headline import checked_share, headline
from graft.workbench.report.kernel_file import KernelFile
from graft.workbench.report.page import less, percent, size
from graft.workbench.report.records import match_rows
from graft.workbench.report.sides import AROUND, SideRow, folded_rows, paired
from graft.workbench.report.sources import SourceLines, enclosing
from report_cases import Plain, dump_stack


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return collect(dump_stack(tmp_path_factory.mktemp("stack")))


# ── what counts first ───────────────────────────────────────────────────────────────────────────────────────────


def test_launches_and_bytes_of_a_token_before_and_after(data):
    before, after = data.headline.cost
    assert (before.launches, after.launches) == (1 + 10 * 9, 1 + 10 * 9 - 9 * 5 - 8)
    assert before.bytes > after.bytes > after.weights == 10 * 4 * (8 + 8 * 8)


def test_launches_and_bytes_are_those_of_the_calls():
    gm = export_graph(Plain().eval(), (torch.randn(1, 4),))
    counted = headline_module.token_cost(gm)
    weights = 4 * (16 + 4)
    assert (counted.launches, counted.weights) == (2, weights)
    assert counted.bytes == weights + 4 * (4 + 4) + 4 * (4 + 4)


def test_a_graph_that_cannot_be_counted_says_why(monkeypatch):
    def refuse(_):
        raise DumpError("no shapes here")

    monkeypatch.setattr(headline_module, "restore_values", refuse)
    gm = export_graph(Plain().eval(), (torch.randn(1, 4),))
    found = headline(gm, gm, (), None)
    assert found.cost is None and found.no_cost == "no shapes here"


def test_the_share_of_matches_that_are_checked_or_proved():
    plain = MatchRecord("%a", "m", ("a",), ("b",))
    checked = replace(plain, numeric_check=NumericCheck(0.0, 1.0, "random"))
    proved = replace(plain, proved="the same operations")
    records = [
        TransformRecord("one", "fuse", "applied", (plain, checked, checked)),
        TransformRecord("two", "fuse", "applied", (proved,)),
        TransformRecord("three", "fuse", "no_match"),
    ]
    share = checked_share(records)
    assert (share.matches, share.checked, share.proved, share.neither) == (4, 2, 1, ("one",))
    assert [row.numeric_check for row in match_rows(records[1])] == ["1 proved: the same operations"]
    assert checked_share([]).percent(0) == 0.0 and share.percent(share.checked) == 50.0


def test_the_slowest_kernels_come_first():
    rows = tuple(KernelTime(f"k{us}", "", 1.0, float(us), 1.0, 1.0, 1.0) for us in (3, 9, 1, 7, 5, 8))
    step = StepTimes(1, 16, 20.0, 4, "a GPU", True, 33.0, 33.0, 33.0, 1.0, 6.0, 1e6, 2.0, rows)
    gm = export_graph(Plain().eval(), (torch.randn(1, 4),))
    found = headline(gm, gm, (), KernelFile("k.json", {}, (step,)))
    assert [row.name for row in found.slowest] == ["k9", "k8", "k7", "k5", "k3"]
    assert headline(gm, gm, (), None).slowest == ()


def test_numbers_read_well():
    assert size(15_040_000_000, 15_020_000_000) == "15.04 → 15.02 GB"
    assert size(15_041_000_000, 15_040_000_000) == "15.041 → 15.040 GB"
    assert size(382_460, 366_940) == "382 → 367 kB" and size(68_980, 53_470) == "69.0 → 53.5 kB"
    assert size(999) == "999 B" and size(0) == "0 B" and size(2_000_000, 1_000) == "2.00 → 0.00 MB"
    assert (less(4, 1), less(1000, 1001), less(3, 3)) == ("75 % fewer", "0.10 % more", "as many")
    assert percent(321, 322) == "99.7 %" and percent(0, 3) == "0 %" and percent(3, 3) == "100 %"
    assert percent(0, 0) == "none to check"


# ── two sides ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_before_and_after_stand_side_by_side(data):
    view = next(one for one in data.transforms if one.record.name == "fuse_rms_norm")
    assert len(view.sides) == len(view.drawings)
    rows = view.sides[0]
    left = [row.left.text for row in rows if row.left and row.kind in ("removed", "replaced")]
    right = [row.right.text for row in rows if row.right and row.kind in ("added", "replaced")]
    assert len(left) == 6 and any("aten.rsqrt" in text for text in left)
    assert len(right) == 1 and "graft.rms_norm" in right[0]
    changed = [row for row in rows if row.kind == "changed"]
    assert changed and all(row.left.name == row.right.name and row.left.text != row.right.text for row in changed)


LETTERS = st.lists(st.sampled_from(("same", "removed", "added", "changed")), max_size=40)


@given(LETTERS)
def test_every_node_is_on_its_side_once(kinds):
    rows = [SideRow(kind, *cells(kind, number)) for number, kind in enumerate(kinds)]
    made = list(paired(rows))
    assert [row.left for row in made if row.left] == [row.left for row in rows if row.left]
    assert [row.right for row in made if row.right] == [row.right for row in rows if row.right]
    folded = folded_rows(made)
    shown = sum(row.kind != "gap" for row in folded) + sum(row.count for row in folded)
    assert shown == len(made) and [r for r in folded if r.kind not in ("gap", "same")] == [
        r for r in made if r.kind != "same"
    ]
    for number, row in enumerate(made):
        near = any(one.kind != "same" for one in made[max(0, number - AROUND) : number + AROUND + 1])
        assert (row in folded) == near


def cells(kind, number):
    cell = (kind, number)
    return (None if kind == "added" else (*cell, "left"), None if kind == "removed" else (*cell, "right"))


# ── sources and code ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_functions_that_nodes_come_from_are_there_whole(data):
    (file,) = [one for one in data.code["sources"] if one["file"] == "report_cases.py"]
    texts = dict(file["blocks"])
    norm = next(text for text in texts.values() if "torch.rsqrt" in text)
    assert norm.startswith("    def forward(") and norm.endswith("inner if self.leaks else x") and file["note"] == ""
    real = Path(__file__).parents[2].joinpath("cases", "report_cases.py").read_text().splitlines()
    for first, text in texts.items():
        assert text.split("\n") == real[first - 1 : first - 1 + text.count("\n") + 1]
    sources = {text for text in data.graphs["strings"] if text.startswith("report_cases.py:")}
    assert sources == {f"report_cases.py:{line}" for line in file["lines"]}


def traced(path, line, text):
    trace = f'File "{path}", line {line}, in forward\n    {text}'
    return SimpleNamespace(nodes=[SimpleNamespace(meta={"stack_trace": trace})])


def read(path, line, text):
    lines = SourceLines()
    lines.read(traced(path, line, text))
    return lines.pack()


def test_a_file_that_is_gone_or_changed_is_told_and_its_captured_lines_stay(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("def f(x):\n    return x.sin()\n")
    (whole,) = read(file, 2, "return x.sin()")
    assert whole["blocks"] == [[1, "def f(x):\n    return x.sin()"]] and whole["note"] == ""
    file.write_text("def f(x):\n    return x.cos()\n")
    (other,) = read(file, 2, "return x.sin()")
    assert other["blocks"] == [[2, "return x.sin()"]] and "has changed" in other["note"]
    file.unlink()
    (gone,) = read(file, 2, "return x.sin()")
    assert gone["blocks"] == [[2, "return x.sin()"]] and "not here" in gone["note"]
    assert read(file, 2, "") == []


def test_files_of_one_name_are_not_mixed_up(tmp_path):
    lines = SourceLines()
    for folder in ("a", "b"):
        lines.read(traced(tmp_path / folder / "model.py", 1, folder))
    assert lines.pack() == []


def test_the_innermost_function_is_shown():
    text = "def outer():\n    def inner():\n        return 1\n    return inner\nx = 1\n"
    assert enclosing(text, [3]) == [[2, "    def inner():\n        return 1"]]
    assert enclosing(text, [4, 3])[0][1].startswith("def outer") and enclosing(text, [5]) == [[5, "x = 1"]]
    linecache.clearcache()


def test_an_op_has_its_triton_and_its_cpp():
    found = op_kernels(["graft.rms_norm", "aten.linear", "graft.paged_attention", "graft.no_such_op"])
    assert set(found) == {"graft.rms_norm", "graft.paged_attention"}
    titles = {one["title"]: one for one in found["graft.rms_norm"]}
    assert titles["Triton"]["text"].startswith("@triton.jit\ndef rms_norm_kernel(")
    assert "def rms_norm_triton" not in titles["Triton"]["text"] and "rms_norm" in titles["C++"]["text"]
    others = found["graft.paged_attention"]  # it writes, and then runs what cached_attention has
    assert {one["title"] for one in others} == {"Triton", "C++"}
    assert {one["file"].split("/")[0] for one in others} == {"paged_attention", "cached_attention"}
    assert "@triton.jit" in others[0]["text"]


NATIVE_STEP = """\
  // ── model.layers.0 ──
  // 0: %rms_norm  model.layers.0.norm
  float* const b0 = call.arena;
  {
    rms_norm(a);
  }
  team.barrier();
  // 1: %linear_3  model.layers.0.proj
  {
    if (x) {
    }
  }
"""


def test_the_lines_of_generated_cpp_are_those_of_its_nodes(tmp_path):
    assert node_lines(NATIVE_STEP.splitlines()) == {"rms_norm": [2, 6], "linear_3": [8, 12]}
    assert generated(tmp_path) == []
    (tmp_path / "native.cpp").write_text(NATIVE_STEP)
    (found,) = generated(tmp_path)
    assert found["nodes"]["linear_3"] == [[8, 12]] and found["text"] == NATIVE_STEP and found["title"] == "C++"


TRITON = """\
async_compile = AsyncCompile()


# kernel path: /tmp/torchinductor/x.py
# Topologically Sorted Source Nodes: [silu, mul_14], Original ATen: [aten.silu, aten.mul]
# Source node to ATen node mapping:
#   silu => convert_element_type
triton_poi_fused_mul_silu_0 = async_compile.triton('triton_poi_fused_mul_silu_0', \'\'\'
import triton
@triton.jit
def triton_poi_fused_mul_silu_0(in_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
\'\'\', device_str='cuda')


def call(args):
    # Topologically Sorted Source Nodes: [linear_6], Original ATen: [aten.t, aten.mm]
    extern_kernels.mm(buf1, buf2, out=buf3)
    # Topologically Sorted Source Nodes: [silu, mul_14], Original ATen: [aten.silu, aten.mul]
    triton_poi_fused_mul_silu_0.run(buf0, 4, stream=stream0)
    del buf0
"""


def test_the_lines_of_inductors_triton_are_those_of_its_source_nodes(tmp_path):
    file = tmp_path / "output_code.py"
    file.write_text(TRITON)
    (found,) = generated(tmp_path, file)
    assert found["title"] == "Triton" and found["file"] == "output_code.py"
    assert found["nodes"] == {"silu": [[5, 13], [19, 20]], "mul_14": [[5, 13], [19, 20]], "linear_6": [[17, 18]]}
    (tmp_path / "inductor.py").write_text(TRITON)
    assert generated(tmp_path)[0]["file"] == "inductor.py"


def test_the_page_carries_the_code(data):
    assert json.dumps(data.code) and set(data.code) == {"sources", "generated", "ops"}
    assert set(data.code["ops"]) == {"graft.rms_norm", "graft.add_rms_norm"}
