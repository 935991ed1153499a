"""The mutation score of the numeric check, over every kind of match of a few families."""

from __future__ import annotations

import pytest

from rewrite_faults import score


@pytest.mark.exhaustive
def test_every_wrong_variant_is_caught_or_has_its_reason():
    counts, survivors = score()
    assert counts["caught"] >= 300 and not survivors
