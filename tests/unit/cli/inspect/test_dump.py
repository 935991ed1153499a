"""`graft dump` as people call it: --verify, the graphs behind --native, and a table that fits a terminal."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from graft.cli.app import app
from graft.cli.show import headed_table, pipeline_table
from graft.passes.report import Report, TransformRecord
from graft.workbench.report.code import node_lines
from graft.workbench.runs import open_run

HEADS = ("stage", "transform", "status", "matches", "nodes", "seconds")


def dump(folder, *options):
    done = CliRunner().invoke(app, ["dump", "tiny-llama", "-o", str(folder), "--dtype", "float32", *options])
    assert done.exit_code == 0, done.output
    return done


def checks(folder):
    return [m.numeric_check for r in open_run(folder).report.transforms.values() for m in r.matches]


SLOW = ("fuse_rms_norm", "fuse_rope", "fuse_add_rms_norm", "merge_qkv", "merge_gate_up")  # to check


def test_verify_checks_the_matches_of_a_dump(tmp_path):
    off = [word for name in SLOW for word in ("--set", f"transforms.{name}.enabled=false")]
    told = dump(tmp_path / "run", "--verify", *off)
    assert any(checks(tmp_path / "run")) and "fuse_swiglu: 2 checked numerically" in told.stdout
    run = open_run(tmp_path / "run")
    assert run.manifest.config["verify"] == "matches"
    assert all(m.numeric_check or r.unchecked for r in run.report.transforms.values() for m in r.matches)


def test_without_verify_nothing_is_checked(tmp_path):
    told = dump(tmp_path / "run", "--json")
    assert not any(checks(tmp_path / "run")) and json.loads(told.stdout)["model"] == "tiny-llama"


def test_the_cpp_of_a_dump_is_that_of_its_last_graph(tmp_path):
    dump(tmp_path / "run", "--native")
    names = {node.name for node in open_run(tmp_path / "run").steps[-1].graph().graph.nodes}
    generated = node_lines((tmp_path / "run" / "native.cpp").read_text().splitlines())
    assert len(generated) > 8 and set(generated) <= names
    dump(tmp_path / "run")
    assert not (tmp_path / "run" / "native.cpp").exists(), "that of another run stayed"


def printed(table, width):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


RECORDS = st.builds(
    TransformRecord,
    st.from_regex(r"[a-z_]{1,45}", fullmatch=True),
    st.sampled_from(("match", "fuse", "state", "schedule")),
    st.sampled_from(("applied", "no_match", "skipped", "disabled", "rolled_back")),
    seconds=st.floats(0, 999),
    nodes_before=st.integers(0, 99999),
    nodes_after=st.integers(0, 99999),
)


@given(st.lists(RECORDS, min_size=1, max_size=5), st.integers(66, 200))
def test_no_heading_of_the_pipeline_is_cut(records, width):
    lines = printed(pipeline_table(Report("a model", {record.name: record for record in records})), width)
    assert lines[1].split() == list(HEADS) and max(map(len, lines)) <= width
    text = "".join("".join(lines).split())
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_usual_rows_stand_on_one_line_at_80_columns(width):
    record = TransformRecord("fuse_residual_into_matvec", "schedule", "no_match", nodes_before=1889, nodes_after=1434)
    lines = printed(pipeline_table(Report("m", {record.name: record})), width)
    assert lines[2].split() == ["schedule", record.name, "no_match", "0", "1889", "→", "1434", "0.000"]


def test_a_narrow_table_would_be_seen():
    """The check above can fail: columns that may not fold are cut."""
    table = headed_table("transform", "seconds >")
    for column in table.columns:
        column.no_wrap, column.overflow, column.min_width = True, "ellipsis", None
    table.add_row("x" * 100, "0.000")
    assert "…" in "".join(printed(table, 40))
