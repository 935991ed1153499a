"""`graft check`: the list for a transform, and each point of it failing where it must (R55)."""

from __future__ import annotations

import pytest
from check_cases import scale

from graft.transforms.config import load_config
from graft.workbench.check import Request, check
from graft.workbench.check.bisect import bound

CONFIG = load_config()
LIST = [
    "registered",
    "listed",
    "docstring",
    "documented",
    "negative tests",
    "matches",
    "dumps",
    "numerics",
    "metadata",
]


def checked(transform="", model="tiny-llama", **options):
    return check(model, Request(CONFIG, transform, **options))


def verdicts(report, name):
    return {line.check: line.verdict for line in next(c for c in report.checks if c.name == name).lines}


def failed(report, name):
    return {check for check, verdict in verdicts(report, name).items() if verdict == "fail"}


def test_a_good_transform_passes_every_point_r55():
    report = checked("fuse_rms_norm")
    assert verdicts(report, "fuse_rms_norm") == dict.fromkeys(LIST, "pass")
    assert report.ok and report.whole[0].verdict == "pass" and report.bisection is None


@pytest.mark.parametrize(
    ("name", "matches", "number"),
    [("fuse_rms_norm", 5, 4), ("fuse_rope", 4, 2), ("fuse_residual_into_matvec", 4, 3), ("merge_qkv", 2, 2)],
)
def test_a_wrong_match_is_found_by_halves_r55(monkeypatch, name, matches, number):
    scale(monkeypatch, name, 1.1, at=[number - 1])
    report = checked(name)
    assert failed(report, name) == {"numerics"} and "1 of" in report.failures[0]
    found = report.bisection
    assert found.transform == name
    assert (found.number, found.matches, found.why_no_match) == (number, matches, "")
    assert found.runs <= found.bound == bound(14, matches)
