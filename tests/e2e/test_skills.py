"""Every command block of every skill, run in order, and what is shown under it compared with what was printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import graft
import tutorial_runner
from processes import run_python
from tutorial_runner import blocks

SOURCE = Path(graft.__file__).parents[1]
SKILLS = sorted((SOURCE.parent / "skills").glob("*/SKILL.md"))
# the others compile, capture, or start pytest in processes of their own
SHORT = {"explore-the-codebase", "tune-a-triton-kernel"}
RUNNER = Path(tutorial_runner.__file__)


def marked(file: Path):
    name = file.parent.name
    return pytest.param(file, id=name, marks=() if name in SHORT else pytest.mark.exhaustive)


@pytest.mark.parametrize("file", map(marked, SKILLS))
def test_a_skill_followed_word_for_word(file, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = run_python(RUNNER, file, tmp_path, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = re.search(r"followed (\d+) commands, compared (\d+) lines(.*)", done.stdout)
    assert told, done.stdout
    ran = [block for block in blocks(file) if block.kind == "bash" and not block.needs]
    left = [block for block in blocks(file) if block.kind == "bash" and block.needs]
    assert int(told[1]) == sum(len(block.commands) for block in ran) > 0 and int(told[2]) > 0
    assert told[3].count("left out: ") == len(left)
    print(told[0])  # with what was left out, and why: pytest -s


def test_the_page_for_agents_names_every_skill_and_no_other():
    text = (SOURCE.parent / "AGENTS.md").read_text().partition("| to | take |")[2]
    named = [name for row in re.findall(r"^\| [^|-][^|]* \| ([^|]+) \|$", text, re.M) for name in row.split(", ")]
    assert sorted(named) == [file.parent.name for file in SKILLS]
