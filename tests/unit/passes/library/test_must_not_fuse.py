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
from graft.testing.negatives import assert_refused_or_harmless, negatives, positive, variants
from marks import firsts

load_all()
CONFIG = load_config()
TRANSFORMS = [TransformRegistry.get(name)(CONFIG.transforms[name]) for name in TransformRegistry.names()]
# those for a device run in decode steps alone, on a batch's layout: their negatives are in their own files; so are
# those of a transform that adds inputs, of one for a kind of CPU and of one for several ranks
OWN = ("insert_kv_cache", "insert_state_cache", "widen_linear", "fuse_all_reduce_norm")
PATTERN_KINDS = [t for t in TRANSFORMS if isinstance(t, PatternTransform) and t.name not in OWN]
KINDS = [t for t in PATTERN_KINDS if not hasattr(t.config, "devices")]
PATTERNS = [(t, rewrite, path) for t in KINDS for rewrite in t.rewrites() for path in variants(rewrite)]
IDS = [f"{t.name}:{r.pattern.__name__}{''.join(map(str, path.whole))}" for t, r, path in PATTERNS]
READERS = ("second reader", "returned")
CASTS = ("cast read", "cast returned")  # of an input: it stays for its other readers


def names(record):
    """The patterns that matched, whatever they chose."""
    return [match.pattern.split()[0] for match in record.matches]


@pytest.mark.some(8)
@pytest.mark.parametrize(("transform", "rewrite", "path"), firsts(PATTERNS, lambda p: p[0].name), ids=IDS)
def test_changed_patterns_are_refused_or_harmless(transform, rewrite, path):
    plain = assert_refused_or_harmless(transform, positive(rewrite, path=path))
    if rewrite.refuse:
        assert not plain.matches and rewrite.refuse in plain.reason
        return
    assert rewrite.pattern.__name__ in names(plain), f"refused as it is: {plain.reason}"
    tried, refused = Counter(), Counter()
    for case in negatives(rewrite, path):
        record = assert_refused_or_harmless(transform, case)
        tried[case.kind] += 1
        refused[case.kind] += rewrite.pattern.__name__ not in names(record)
        if case.kind == "dropout":
            assert record.matches or record.near_misses, f"{case.name}: refused without a near miss"
        if case.kind in READERS and not rewrite.allow_readers:
            own = [m for m in record.matches if m.pattern.split()[0] == rewrite.pattern.__name__]
            over = [m for m in own if case.at[1:] in m.replaced and m.name != case.at[1:]]  # a result may be read
            assert not over, f"{case.name}: fused although the value is read elsewhere"
            assert record.matches or record.near_misses, f"{case.name}: refused without a near miss"
    assert tried["dtype"] or len(rewrite.shapes) == 1
    assert all(refused[kind] for kind in READERS if tried[kind])


def test_every_kind_of_change_is_made():
    rewrite = next(r for _, r, _ in PATTERNS if r.pattern.__name__ == "rms_norm")
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
