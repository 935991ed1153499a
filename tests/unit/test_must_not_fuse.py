"""Generated negatives for every pattern of the registry: refused with the reason, or fused without any harm.

Each pattern is traced, checked to match as it is, and then changed at one place at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from graft.graph.text import graph_text
from graft.testing.negatives import negatives, positive
from graft.transforms.config import PipelineConfig, load_config
from graft.transforms.pipeline import run_pipeline
from graft.transforms.registry import TransformRegistry, load_all

load_all()
CONFIG = load_config()
PATTERNS = [
    (name, rewrite)
    for name in TransformRegistry.names()
    for rewrite in getattr(TransformRegistry.get(name)(CONFIG.transforms[name]), "rewrites", lambda: [])()
]
IDS = [f"{name}:{rewrite.pattern.__name__}" for name, rewrite in PATTERNS]
READERS = ("second reader", "returned")


def alone(name):
    return PipelineConfig({name: replace(CONFIG.transforms[name], enabled=True, after=(), before=())})


def attempt(name, case):
    """The record of the transform on a case, after the checks that hold for every case."""
    text, expected = graph_text(case.module.graph), case.run()
    record = run_pipeline(case.module, alone(name)).transforms[name]
    if not record.matches:
        assert record.reason, f"{case.name}: refused without a reason"
        assert graph_text(case.module.graph) == text, f"{case.name}: refused, and yet the graph changed"
        return record
    exact = all(by_name(name, match.pattern).exact for match in record.matches)
    for got, wanted in zip(case.run(), expected, strict=True):
        bound = 0 if exact else 2 * torch.finfo(wanted.dtype).eps
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound, msg=lambda m: f"{case.name}: {m}")
    return record


def by_name(name, pattern):
    return next(r for n, r in PATTERNS if n == name and r.pattern.__name__ == pattern)


@pytest.mark.parametrize(("name", "rewrite"), PATTERNS, ids=IDS)
def test_changed_patterns_are_refused_or_harmless_r26(name, rewrite):
    plain = attempt(name, positive(rewrite))
    if rewrite.refuse:
        assert not plain.matches and rewrite.refuse in plain.reason
        return
    assert rewrite.pattern.__name__ in [match.pattern for match in plain.matches], f"refused as it is: {plain.reason}"
    tried, refused = Counter(), Counter()
    for case in negatives(rewrite):
        record = attempt(name, case)
        tried[case.kind] += 1
        refused[case.kind] += not record.matches
        if case.kind == "dropout":
            assert record.matches or record.near_misses, f"{case.name}: refused without a near miss"
        if case.kind in READERS and not rewrite.allow_readers:
            over = [m for m in record.matches if m.pattern == rewrite.pattern.__name__ and case.at[1:] in m.replaced]
            assert not over, f"{case.name}: fused although the value is read elsewhere"
            assert record.matches or record.near_misses, f"{case.name}: refused without a near miss"
    assert tried["dtype"] or len(rewrite.shapes) == 1
    assert all(refused[kind] for kind in READERS if tried[kind])
