"""The final graph and report of every family on every route are those that were stored."""

from __future__ import annotations

import difflib
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from conftest import FAMILIES
from golden_graphs import ROUTES, golden, path_of
from marks import KINDS, short

PINNED = dict(re.findall(r"^(torch|transformers)==(\S+)", Path("constraints.txt").read_text(), re.MULTILINE))
# Transformers makes the rotary tables of its layer types in the order of a set
OF_A_SET = ("gemma-3",)


@pytest.mark.skipif(
    any(version(name).partition("+")[0] != wanted for name, wanted in PINNED.items()),
    reason="the texts are those of the versions in constraints.txt",
)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", short(FAMILIES, *KINDS))
def test_graph_and_report_are_the_stored_ones(family, route):
    if family in OF_A_SET and os.environ.get("PYTHONHASHSEED") != "0":
        pytest.skip("the order of a set decides; PYTHONHASHSEED=0")
    stored, now = path_of(family, route).read_text(), golden(family, route)
    if now != stored:
        lines = difflib.unified_diff(stored.splitlines(), now.splitlines(), "stored", "now", lineterm="", n=1)
        pytest.fail(
            "\n".join(
                [*list(lines)[:40], "PYTHONHASHSEED=0 python tests/golden_graphs.py --write stores what there is now"]
            )
        )


@pytest.mark.exhaustive
def test_another_graph_is_told_apart():
    assert golden("llama", "eager") != path_of("llama", "cuda").read_text()
