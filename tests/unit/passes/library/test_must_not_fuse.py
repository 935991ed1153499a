"""Generated negatives for every pattern of the registry: refused with the reason, or fused without any harm.

Each pattern is traced, checked to match as it is, and then changed at one place at a time.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from graft.ir.nodes import calls
from graft.passes.base import Stage, TransformConfig
from graft.passes.config import load_config
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry, load_all
from graft.testing.negatives import assert_refused_or_harmless, negatives, positive
from marks import firsts

load_all()
CONFIG = load_config()
TRANSFORMS = [TransformRegistry.get(name)(CONFIG.transforms[name]) for name in TransformRegistry.names()]
# those for a device run in decode steps alone, on a batch's layout: their negatives are in their own files
KINDS = [t for t in TRANSFORMS if isinstance(t, PatternTransform) and not hasattr(t.config, "devices")]
PATTERNS = [(t, rewrite) for t in KINDS for rewrite in t.rewrites()]
IDS = [f"{transform.name}:{rewrite.pattern.__name__}" for transform, rewrite in PATTERNS]
READERS = ("second reader", "returned")
CASTS = ("cast read", "cast returned")  # of an input: it stays for its other readers


@pytest.mark.parametrize(("transform", "rewrite"), firsts(PATTERNS, lambda p: p[0].name, 3), ids=IDS)
def test_changed_patterns_are_refused_or_harmless(transform, rewrite):
    plain = assert_refused_or_harmless(transform, positive(rewrite))
    if rewrite.refuse:
        assert not plain.matches and rewrite.refuse in plain.reason
        return
    assert rewrite.pattern.__name__ in [match.pattern for match in plain.matches], f"refused as it is: {plain.reason}"
    tried, refused = Counter(), Counter()
    for case in negatives(rewrite):
        record = assert_refused_or_harmless(transform, case)
        tried[case.kind] += 1
        refused[case.kind] += rewrite.pattern.__name__ not in [match.pattern for match in record.matches]
        if case.kind == "dropout":
            assert record.matches or record.near_misses, f"{case.name}: refused without a near miss"
        if case.kind in READERS and not rewrite.allow_readers:
            over = [m for m in record.matches if m.pattern == rewrite.pattern.__name__ and case.at[1:] in m.replaced]
            assert not over, f"{case.name}: fused although the value is read elsewhere"
            assert record.matches or record.near_misses, f"{case.name}: refused without a near miss"
    assert tried["dtype"] or len(rewrite.shapes) == 1
    assert all(refused[kind] for kind in READERS if tried[kind])


def test_every_kind_of_change_is_made():
    rewrite = next(r for _, r in PATTERNS if r.pattern.__name__ == "gemma")
    kinds = Counter(case.kind for case in negatives(rewrite))
    assert set(kinds) == {*READERS, *CASTS, "dropout", "dim", "dtype", "computed weight", "broadcast"}
    inner = len(list(calls(positive(rewrite).module.graph))) - 1
    assert kinds["second reader"] == kinds["returned"] == inner - kinds["cast read"]
    assert kinds["dropout"] == inner and kinds["cast read"] == kinds["cast returned"] == 2  # of x and of the weight


def test_the_cases_catch_a_rewrite_that_is_wrong_when_broadcast():
    """As it is the rewrite is right; one of the changed graphs shows that it is not."""

    def wave(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * y

    def wrong(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * y * float(y.shape[0] > 1)

    class Wave(PatternTransform):
        name = "wave"

        def rewrites(self):
            return [Rewrite(wave, wrong, {"x": "b d", "y": "b d"})]

    transform = Wave(TransformConfig(Stage.MATCH))
    assert assert_refused_or_harmless(transform, positive(transform.rewrites()[0])).matches
    with pytest.raises(AssertionError, match="wave: broadcast y"):
        for case in negatives(transform.rewrites()[0]):
            assert_refused_or_harmless(transform, case)
