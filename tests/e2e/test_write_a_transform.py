"""The tutorial and its example, followed word for word, so that they cannot rot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import graft
import tutorial_runner
from graft import testing
from tutorial_runner import follow

SOURCE = Path(graft.__file__).parents[1]
TUTORIAL = SOURCE.parent / "docs" / "write_a_transform.md"
SHIP = SOURCE.parent / "docs" / "ship.md"
RUNNER = Path(tutorial_runner.__file__)
EXAMPLE = SOURCE.parent / "examples" / "write_a_transform.py"


def python(*args, cwd):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "GRAFT_CACHE_DIR": str(cwd)}
    return subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.exhaustive
def test_the_tutorial_followed_word_for_word_adds_a_working_fusion(tmp_path):
    done = python(RUNNER, TUTORIAL, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"followed 15 commands, compared 3\d lines", done.stdout), done.stdout
    assert (tmp_path / "my_fusions" / "fuse_soft_cap.py").exists()
    assert (tmp_path / "found_fusions" / "fuse_norm_add.py").exists()


@pytest.mark.exhaustive
def test_the_page_on_repro_and_exports_followed_word_for_word(tmp_path):
    done = python(RUNNER, SHIP, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"followed 9 commands, compared \d+ lines", done.stdout), done.stdout
    assert {"swiglu.py", "trace.json", "graphs.json", "model.pt2"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.exhaustive
def test_the_example_runs(tmp_path):
    done = python(EXAMPLE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout and "aten.tanh" in done.stdout and "graft.soft_cap" in done.stdout
    assert "matches=1" in done.stdout and "near miss" in done.stdout


def test_a_tutorial_that_has_rotted_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "doc.md"
    document.write_text(
        "```python\n# a.txt\none\n```\n\n```bash\ncat a.txt\necho two 2 three\n```\n\n"
        "```text\ntwo … three\none\n```\n"
    )
    assert str(follow(document)) == "followed 2 commands, compared 2 lines"
    document.write_text("```bash\necho one\n```\n\n```text\ntwo\n```\n")
    with pytest.raises(AssertionError, match="'two' is not in what was printed:\none"):
        follow(document)
    document.write_text("```bash\nfalse\n```\n")
    with pytest.raises(AssertionError, match="false"):
        follow(document)
    document.write_text("```bash exit=3\nexit 3\n```\n\n```bash server\nfalse\n```\n\n```text\nnever\n```\n")
    left_out = "left out: false (needs a server with a tokenizer in the background)"
    assert str(follow(document)) == f"followed 1 commands, compared 0 lines; {left_out}"
    document.write_text("```bash exit=3\nexit 0\n```\n")
    with pytest.raises(AssertionError, match="exit 0"):
        follow(document)


def test_what_runs_in_the_background_is_waited_for_and_must_end_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "doc.md"
    page = "```bash background\n{}\n```\n\n```text\nready at 1\n```\n\n```bash\nls\n```\n"
    waits = "while :; do sleep 0.1; done"
    document.write_text(page.format(f"sh -c 'trap \"exit 0\" TERM; sleep 0.2; echo ready at 1; {waits}'"))
    assert str(follow(document)) == "followed 2 commands, compared 1 lines"
    document.write_text(page.format(f"sh -c 'trap \"exit 3\" TERM; echo ready at 1; {waits}'"))
    with pytest.raises(AssertionError, match=r"ended with \[3\]"):
        follow(document)
    document.write_text(page.format("sh -c 'echo not at all'"))
    with pytest.raises(AssertionError, match="not at all"):
        follow(document)


def test_every_helper_is_documented():
    text = TUTORIAL.read_text()
    helpers = [name for name in testing.__all__ if name[0].islower()]
    missing = [name for name in helpers if f"`{name}" not in text and f"`@{name}" not in text]
    assert missing == ["assert_same_numbers", "try_transform"]
