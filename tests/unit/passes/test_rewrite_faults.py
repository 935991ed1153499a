"""The mutation score: of the numeric check over every kind of match, and of the results where none runs alone."""

from __future__ import annotations

import pytest

import graph_faults
from rewrite_faults import score


@pytest.mark.exhaustive
def test_every_wrong_variant_is_caught_or_has_its_reason():
    counts, survivors = score()
    assert counts["caught"] >= 300 and not survivors


@pytest.mark.exhaustive
def test_what_matches_cannot_show_the_results_do():
    counts, survivors = graph_faults.score()
    assert counts["caught"] >= 100 and not survivors
