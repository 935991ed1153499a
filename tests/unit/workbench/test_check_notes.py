"""graft check --run-tests and graft note diff: what ran, and what changed from one note to the next."""

from __future__ import annotations

import json
import subprocess

import pytest
from typer.testing import CliRunner

from graft.base.errors import UsageError
from graft.cli.app import app
from graft.passes.config import DEFAULTS
from graft.workbench.check.note_diff import diff_notes
from graft.workbench.check.since import PatchReview, review_patch, touched
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


@pytest.fixture
def no_plugins(monkeypatch):
    """Of what is installed: five processes would import all of them."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_tests_are_counted_as_they_ran(tmp_path, no_plugins):
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
    file.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.exit('enough')\ndef test_c(): assert 0\n"
    )
    cut = run_tests([file], tmp_path).line()
    assert cut.verdict == "fail" and "pytest ended with" in cut.reason  # what did not run did not pass
    assert run_tests([], tmp_path).line().verdict == "fail"


def test_tests_that_hang_are_ended(tmp_path, no_plugins):
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


# ── --since ─────────────────────────────────────────────────────────────────────────────────────────────────────


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_a_patch_is_named_by_what_it_touches(tmp_path, monkeypatch):
    listing = "transforms:\n  fuse_one: {stage: match, enabled: false}\n  fuse_two: {stage: match, enabled: true}\n"
    (tmp_path / "graft.yaml").write_text(listing)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "graft.yaml").write_text(
        listing.replace("enabled: false}", "enabled: true}  # × 1.2 on a CPU").replace(
            "fuse_two: {stage: match, enabled: true", "fuse_two: {stage: match, enabled: false"
        )
    )
    (tmp_path / "new.txt").write_text("not added yet")
    found = review_patch("HEAD", tmp_path)
    assert found.changed == 2 and not found.transforms
    assert [(t.transform, t.before, t.after, t.reason) for t in found.toggles] == [
        ("fuse_one", False, True, "× 1.2 on a CPU"),
        ("fuse_two", True, False, ""),
    ]
    assert found.warnings == ["fuse_two was switched without a reason beside it"]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "--since", "HEAD"])
    assert done.exit_code == 0 and "fuse_one: off → on in graft.yaml: × 1.2 on a CPU" in done.output
    told = json.loads(CliRunner().invoke(app, ["check", "--since", "HEAD", "--json"]).stdout)
    assert told["schema"] == "check-since/1" and [one["transform"] for one in told["toggles"]] == [
        "fuse_one",
        "fuse_two",
    ]
    done = CliRunner().invoke(app, ["check", "--since", "nowhere"])
    assert done.exit_code == 2 and done.output.startswith("graft: error: --since: ")
    done = CliRunner().invoke(app, ["check", "fuse_rope", "--since", "HEAD", "--set", "a=b"])
    assert done.exit_code == 2 and "leave out TRANSFORM, --set" in done.output


def test_transforms_and_their_tests_are_told_apart():
    root = DEFAULTS.parents[3]
    own = [root / "src/graft/passes/library/rope/fuse_rope.py", root / "src/graft/ops/swiglu/op.py"]
    tests = [root / "tests/unit/passes/library/rope/test_fuse_rope_refusals.py"]
    found = {one.transform: one for one in touched([*own, *tests], root)}
    assert set(found) == {"fuse_rope", "fuse_swiglu"}
    assert found["fuse_rope"].tests == ("tests/unit/passes/library/rope/test_fuse_rope_refusals.py",)
    review = PatchReview("HEAD", 3, tuple(found.values()), ())
    assert review.warnings[0].startswith("2 transforms in one patch: fuse_rope, fuse_swiglu")
    assert review.warnings[1:] == ["fuse_swiglu: the patch changes no test of it"]
