"""The testing kit: each helper passes where it should, and fails with its message where it should."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graft.base.errors import UnknownTransform
from graft.ir.nodes import calls, is_op
from graft.passes.base import BaseTransform, Outcome, Stage, TransformConfig
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord
from graft.testing import (
    assert_fuses,
    assert_matches_eager,
    assert_metadata_preserved,
    assert_not_fuses,
    assert_refused_or_harmless,
    assert_same_numbers,
    matrix,
    try_transform,
)
from graft.testing.negatives import negatives, positive
from testing_kit_cases import Gated, X

aten = torch.ops.aten


@pytest.fixture
def registered():
    """Registers transforms for one test."""
    added = []

    def add(name, transform):
        TransformRegistry.register(name)(transform)
        added.append(name)
        return {"transforms": {name: {"stage": "match"}}}

    yield add
    for name in added:
        del TransformRegistry._known[name]


def rewriting(pattern, replacement, **options):
    class Small(PatternTransform):
        def rewrites(self):
            return [Rewrite(pattern, replacement, {"x": "b s d"}, **options)]

    return Small


def wave(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


def doubled(x: Tensor) -> Tensor:
    return 2 * torch.sin(x)


def off(x: Tensor) -> Tensor:
    return torch.sin(x) * 2.001


# ── assert_fuses ────────────────────────────────────────────────────────────────────────────────────────────────


def test_assert_fuses_counts_checks_and_gives_the_graph():
    trial = assert_fuses(Gated(layers=2), (X,), "fuse_swiglu", count=2)
    assert trial.called.count("graft.swiglu") == 2 and "aten.silu" in trial.before
    assert all(match.numeric_check for match in trial.record.matches)
    assert torch.equal(trial(X), Gated(layers=2)(X))
    assert not assert_fuses(Gated(), (X,), "fuse_swiglu", verify="structure").record.matches[0].numeric_check


def test_assert_fuses_says_what_it_found_and_what_came_near():
    with pytest.raises(AssertionError) as failed:
        assert_fuses(Gated(keep=True), (X,), "fuse_swiglu", count=1)
    text = str(failed.value)
    assert text.startswith("expected: fuse_swiglu matches Gated once\nfound:    it matched 0 times\n")
    assert (
        "near miss at %mul" in text and "has a second reader" in text and "2 of 2 calls of plain silu fitted" in text
    )
    assert "%silu = aten.silu(%linear) : f32[2, 3, 8]" in text and "what to do: compare the pattern" in text
    with pytest.raises(AssertionError, match="matches Gated 3 times\nfound:    it matched 2 times\n  matched %mul"):
        assert_fuses(Gated(layers=2), (X,), "fuse_swiglu", count=3)


def test_a_replacement_that_is_off_is_told_with_the_error(registered):
    config = registered("fuse_wave", rewriting(wave, off))
    with pytest.raises(
        AssertionError, match=r"it failed, and the graph was put back\n.*is off by .*\nwhat to do: corr"
    ):
        assert_fuses(wave, (X,), "fuse_wave", config=config)
    assert assert_fuses(wave, (X,), "fuse_wave", config=config, verify="structure").record.matches


def test_transforms_run_alongside_in_the_pipelines_order():
    def normed(x):
        return torch.rms_norm(x + x.sin(), (8,), torch.ones(8), 1e-6)

    module = nn.RMSNorm(8, eps=1e-6)
    fused = assert_fuses(
        lambda x: module(x + x.sin()), (X,), "fuse_add_rms_norm", alongside=["fuse_rms_norm"], count=1
    )
    assert fused.called[:2] == ["aten.sin", "graft.add_rms_norm"]
    assert_not_fuses(normed, (X,), "fuse_add_rms_norm")


def test_an_unknown_transform_is_an_error_that_names_the_mark(registered):
    with pytest.raises(UnknownTransform, match=r"needs_transform\); did you mean 'fuse_swiglu'"):
        assert_fuses(Gated(), (X,), "fuse_swiglue")
    registered("fuse_wave", rewriting(wave, doubled))
    with pytest.raises(UnknownTransform, match="or config=…, with its stage"):
        assert_fuses(wave, (X,), "fuse_wave")


# ── assert_not_fuses ────────────────────────────────────────────────────────────────────────────────────────────


def test_assert_not_fuses_holds_reason_and_graph():
    trial = assert_not_fuses(Gated(keep=True), (X,), "fuse_swiglu", reason="second reader")
    assert trial.after == trial.before


def test_assert_not_fuses_shows_the_match_or_the_other_reason():
    with pytest.raises(
        AssertionError, match=r"leaves Gated alone\nfound:    it matched once\n  matched %mul.* as plain silu"
    ):
        assert_not_fuses(Gated(), (X,), "fuse_swiglu")
    with pytest.raises(
        AssertionError, match=r"says why: 'a broadcast'\nfound:    it gave another reason: .*second r"
    ):
        assert_not_fuses(Gated(keep=True), (X,), "fuse_swiglu", reason="a broadcast")


def test_assert_not_fuses_sees_a_change_without_a_match(registered):
    class Silent(BaseTransform):
        def apply(self, gm, context):
            for node in calls(gm.graph):
                if is_op(node, aten.sin.default):
                    node.target = aten.cos.default
            return Outcome(reason="nothing to see here")

    config = registered("silent", Silent)
    with pytest.raises(AssertionError, match="was changed, and it reports no match"):
        assert_not_fuses(wave, (X,), "silent", config=config)


def test_assert_not_fuses_tells_a_refusal_of_verification_from_one_of_the_pattern(registered):
    config = registered("fuse_wave", rewriting(wave, off))
    with pytest.raises(AssertionError, match="it matched, and what it made was refused"):
        assert_not_fuses(wave, (X,), "fuse_wave", config=config)


# ── metadata ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_metadata_of_our_fusions_is_preserved():
    assert_metadata_preserved(Gated(layers=2), (X,), "fuse_swiglu", count=2)
    free = ({0: torch.export.Dim("b"), 1: torch.export.Dim("s")},)
    assert_metadata_preserved(nn.RMSNorm(8, eps=1e-6), (X,), "fuse_rms_norm", dynamic_shapes=free)


class Careless(BaseTransform):
    """Makes sin(x) anew without the editor; what it forgets is told by `lost`."""

    lost: tuple[str, ...] = ()

    def apply(self, gm, context):
        node = next(n for n in calls(gm.graph) if is_op(n, aten.sin.default))
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(aten.sin.default, node.args)
        new.meta = {k: v for k, v in {**node.meta, "made_by": self.name}.items() if k not in self.lost}
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        successors = ((node.name, new.name),)
        return Outcome((MatchRecord(f"%{node.name}", "", (node.name,), (new.name,), successors=successors),))


class Wave(nn.Module):
    def forward(self, x):
        return torch.sin(x) * 2


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("made_by", r"says it was made by \(nobody\), not by careless"),
        ("stack_trace", r"has the source line \(none\), what it replaced has test_testing_kit.py:\d+"),
    ],
)
def test_lost_metadata_is_named(registered, lost, message):
    config = registered("careless", type("Lossy", (Careless,), {"lost": (lost,)}))
    with pytest.raises(AssertionError, match=message) as failed:
        assert_metadata_preserved(Wave(), (X,), "careless", config=config)
    assert "1 of these are lost or wrong" in str(failed.value) and "Editor.call" in str(failed.value)
    TransformRegistry._known["careless"].lost = ()
    assert_metadata_preserved(Wave(), (X,), "careless", config=config)


def test_a_module_path_that_is_lost_is_named(registered):
    config = registered("careless", type("Lossy", (Careless,), {"lost": ("nn_module_stack",)}))
    with pytest.raises(AssertionError, match=r"has the module \(none\), what it replaced has 0"):
        assert_metadata_preserved(nn.Sequential(Wave()), (X,), "careless", config=config)


def test_a_shape_rule_that_lies_is_found_by_running_the_graph(registered):
    library = torch.library.Library("graft_kit_test", "FRAGMENT")
    library.define("lies(Tensor x) -> Tensor")
    library.impl("lies", lambda x: (2 * torch.sin(x)).double(), "CompositeExplicitAutograd")
    torch.library.register_fake("graft_kit_test::lies", lambda x: torch.empty_like(x), lib=library)

    def lying(x: Tensor) -> Tensor:
        return torch.ops.graft_kit_test.lies(x)

    config = registered("fuse_wave", rewriting(wave, lying))
    with pytest.raises(AssertionError, match=r"recorded as f32\[2, 3, 8\], and running it gives f64\[2, 3, 8\]"):
        assert_metadata_preserved(Wave(), (X,), "fuse_wave", config=config, verify="structure")


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────


@matrix(devices=("cpu", "cuda"))
def test_eager_against_compiled(dtype, device):
    wrong = Gated()
    wrong.up.weight.data *= 1.02
    assert_matches_eager(Gated(), (X,), "fuse_swiglu", dtype=dtype, device=device, wrong=wrong)


def test_other_numbers_are_told_with_their_place():
    bad = X.clone()
    bad[1, 2, 3] += 1
    with pytest.raises(AssertionError, match=r"bit for bit\nfound: .* at \(1, 2, 3\)"):
        assert_same_numbers(bad, X)
    with pytest.raises(AssertionError, match=r"within 2 roundings of the dtype\nfound: .* times what is allowed"):
        assert_same_numbers((X, [bad]), (X, [X]), roundings=2)
    assert_same_numbers(X * (1 + 2**-23), X, roundings=2, wrong=X * (1 + 2**-18))
    with pytest.raises(AssertionError, match=r"float64 .*, not torch.float32"):
        assert_same_numbers(X.double(), X)
    with pytest.raises(AssertionError, match="2 results, not 1"):
        assert_same_numbers([X, X], [X])
    nan = torch.tensor([float("nan"), 1.0])
    assert_same_numbers(nan, nan.clone())
    with pytest.raises(AssertionError, match="instead of nan"):
        assert_same_numbers(torch.ones(2), nan, roundings=100)


def test_a_comparison_that_lets_a_wrong_variant_pass_fails():
    with pytest.raises(AssertionError, match=r"the wrong variant is rejected .*\nfound:    it passes"):
        assert_same_numbers(X, X, roundings=4, wrong=X * (1 + 2**-23))
    with pytest.raises(AssertionError, match="it passes, so this comparison would let a defect through"):
        assert_matches_eager(Gated(), (X,), "fuse_swiglu", roundings=1, wrong=Gated())


def test_numbers_without_a_fusion_show_nothing():
    with pytest.raises(AssertionError, match=r"found:    fuse_swiglu did not match\n.*second reader"):
        assert_matches_eager(Gated(keep=True), (X,), "fuse_swiglu")


# ── generated negatives ─────────────────────────────────────────────────────────────────────────────────────────


def test_generated_negatives_fail_with_the_case_and_the_graph():
    def product(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x) * y

    def wrong(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x) * y * float(y.shape[0] > 1)

    class Product(PatternTransform):
        name = "product"

        def rewrites(self):
            return [Rewrite(product, wrong, {"x": "b d", "y": "b d"})]

    transform = Product(TransformConfig(Stage.MATCH))
    assert assert_refused_or_harmless(transform, positive(transform.rewrites()[0])).matches
    with pytest.raises(AssertionError, match=r"product: broadcast y.*\nfound:    it fused, and the graph gives 0"):
        for case in negatives(transform.rewrites()[0]):
            assert_refused_or_harmless(transform, case)


def test_helpers_take_plain_functions_and_keyword_arguments():
    trial = try_transform(lambda x, y: F.silu(x) * y, (X,), "fuse_swiglu", kwargs={"y": X})
    assert len(trial.record.matches) == 1 and trial.name == "<lambda>"


def test_four_lines_say_it_all_before_the_rest():
    """Expected, found, the nearest reason, what to do; then the graph, and no other traceback in front."""
    with pytest.raises(AssertionError) as caught:
        assert_fuses(Gated(keep=True), (X,), "fuse_swiglu", count=1)
    starts = ["expected: ", "found: ", "  near miss at ", "what to do: "]
    lines = str(caught.value).splitlines()
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=False)] == [True] * 4
    assert "  the graph:" in lines[4:] and caught.value.__cause__ is None
