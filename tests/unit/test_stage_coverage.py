"""The map of stages and tests is the generated one, and what it names is there."""

from __future__ import annotations

import pytest

import stage_coverage
from graft import testing
from graft.workbench.stages.questions import QUESTIONS


def test_the_page_is_the_generated_one():
    assert stage_coverage.PAGE.read_text() == stage_coverage.page(), "run: python tests/stage_coverage.py --write"


def test_every_stage_has_a_row_and_every_question_a_place():
    assert {one.stage for one in stage_coverage.TABLE} == set(range(1, 8))
    offered = {name for one in stage_coverage.TABLE for name in one.offers}
    assert {f"graft stages ask {name}" for name in QUESTIONS} <= offered


@pytest.mark.parametrize("row", stage_coverage.TABLE, ids=lambda row: row.kind)
def test_what_a_row_names_is_there(row):
    for name in row.offers:
        assert name in testing.__all__ or name.startswith("graft "), name
    helpers = [name for name in row.offers if name in testing.__all__]
    files = [stage_coverage.ROOT / test for test in row.tests]
    assert all(path.exists() for path in files)
    sources = "".join(path.read_text() for path in files if path.is_file())
    assert all(name in sources for name in helpers), "a helper that none of the named tests uses"
    assert row.gap or (row.offers and row.tests), "a row without an offer or a test says what is missing"
