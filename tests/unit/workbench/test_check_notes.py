"""graft check --run-tests and graft note diff: what ran, and what changed from one note to the next."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from graft.base.errors import UsageError
from graft.cli.app import app
from graft.workbench.check.note_diff import diff_notes
from graft.workbench.check.tests_run import run_tests

NOTE = """# fuse_mine on tiny-llama: accepted

float32 on cpu; graft 0.1.0.

## Candidate

relu becomes one op.

## Tests

- `test_fuse_mine.py::test_it`

## Open risks

- no GPU
"""
TESTS = """import pytest


def test_good():
    pass


def test_bad():
    assert 1 == 2, "numbers are off"


def test_elsewhere():
    pytest.skip("no GPU")
"""


def test_tests_are_counted_as_they_ran(tmp_path):
    file = tmp_path / "test_fuse_mine.py"
    file.write_text(TESTS)
    found = run_tests([file], tmp_path)
    assert (found.passed, found.failed, found.skipped, found.ok) == (1, 1, 1, False)
    line = found.line()
    assert line.verdict == "fail" and "1 passed, 1 failed, 1 skipped; first: test_bad: " in line.reason
    file.write_text(TESTS.replace("1 == 2", "1 == 1"))
    assert run_tests([file], tmp_path).line().verdict == "pass"
    file.write_text("def test_it(:\n")
    assert run_tests([file], tmp_path).failed == 1  # it cannot be collected
    assert run_tests([], tmp_path).line().verdict == "fail"


def test_tests_that_hang_are_ended(tmp_path):
    file = tmp_path / "test_fuse_mine.py"
    file.write_text("import time\ndef test_it():\n    time.sleep(900)\n")
    assert "took longer than 3 s" in run_tests([file], tmp_path, limit=3.0).problem


def test_notes_are_compared_by_section(tmp_path):
    before, after = tmp_path / "a.md", tmp_path / "b.md"
    before.write_text(NOTE)
    after.write_text(
        NOTE.replace(": accepted", ": not accepted").replace("- no GPU", "- it drifts") + "\n## More\n\nx\n"
    )
    found = diff_notes(before, after)
    changed = {one.title: (one.status, one.removed, one.added) for one in found.sections if one.status != "same"}
    assert changed == {
        "Open risks": ("changed", ("- no GPU",), ("- it drifts",)),
        "More": ("only after", (), ("x",)),
    }
    assert found.verdict == ("accepted", "not accepted") and not found.same and diff_notes(before, before).same
    done = CliRunner().invoke(app, ["note", "diff", str(before), str(after)])
    assert done.exit_code == 0 and "fuse_mine on tiny-llama: accepted → not accepted" in done.output
    assert "  - - no GPU\n  + - it drifts\n" in done.output
    data = json.loads(CliRunner().invoke(app, ["note", "diff", str(before), str(after), "--json"]).stdout)
    assert data["same"] is False and data["sections"][0] == {
        "title": "Versions", "status": "same", "removed": [], "added": []
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# another page\n", "is no note of graft check"),
        ("", "is no note of graft check"),
        (NOTE.replace("tiny-llama", "tiny-qwen3"), "compare notes of one"),
    ],
)
def test_other_files_are_no_notes(text, told, tmp_path):
    (tmp_path / "a.md").write_text(NOTE)
    (tmp_path / "b.md").write_text(text)
    with pytest.raises(UsageError, match=told):
        diff_notes(tmp_path / "a.md", tmp_path / "b.md")
    with pytest.raises(UsageError, match="cannot be read"):
        diff_notes(tmp_path / "a.md", tmp_path / "missing.md")


def test_run_tests_needs_a_transform():
    done = CliRunner().invoke(app, ["check", "--run-tests"])
    assert done.exit_code == 2 and "--run-tests is about one transform" in done.output
