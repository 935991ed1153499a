"""fuse_all_reduce_norm: the sum over the ranks goes into the residual's norm; what must not, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graft.passes.library.shard.fuse_all_reduce_norm as fusion
from decode_cases import transformed
from graft.base.errors import TransformError
from graft.ir.nodes import calls, is_op
from graft.ops.ranks import as_rank, run_as_ranks
from graft.passes.config import load_config
from graft.passes.registry import TransformRegistry
from graft.testing.negatives import assert_refused_or_harmless, negatives, variants
from marks import short
from rank_cases import logits_of, parts_of, sharded, together, whole_graph

NAME = "fuse_all_reduce_norm"
ON = (
    f"transforms.{NAME}.enabled=true",
    f"transforms.{NAME}.stage=fuse",
    f"transforms.{NAME}.after=[fuse_add_rms_norm]",
)
ops = torch.ops.graft
FUSED, EXCHANGE, ADD_NORM = (op.default for op in (ops.all_reduce_add_norm, ops.all_reduce, ops.add_rms_norm))


def count(gm, target):
    return sum(is_op(node, target) for node in calls(gm.graph))


# family → sums of an attention or an MLP that are fused, of four; the rest have a call between sum and residual
FOUND = {"llama": 4, "qwen3": 4, "lfm2": 5, "mixtral": 2, "gpt-oss": 0, "granite": 0, "gemma-2": 0, "olmo-2": 0}


@pytest.mark.parametrize("family", short(FOUND, "llama", "mixtral"))
@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_compute_the_same_with_fewer_calls(family, world):
    plain, _ = parts_of(whole_graph(family), world)
    made = [sharded(whole_graph(family), rank, world, *ON) for rank in range(world)]
    fused = [part for part, _ in made]
    record, found = made[0][1].transforms[NAME], FOUND[family]
    assert len(record.matches) == count(fused[0], FUSED) == found
    assert count(fused[0], EXCHANGE) == count(plain[0], EXCHANGE) - found
    assert record.status == ("applied" if found else "no_match")
    if found:
        logits = together(fused)
        assert all(torch.equal(one, logits[0]) for one in logits)
        assert torch.equal(logits[0], together(plain)[0]), "the same sums in the same order"


def test_what_reads_the_sum_instead_is_told():
    said = {family: reasons(whole_graph(family)) for family in ("mixtral", "gpt-oss", "gemma-2")}
    assert any("is read by" in one and "aten.reshape, not by graft::add_rms_norm" in one for one in said["mixtral"])
    assert any("aten.add.Tensor, not by" in one for one in said["gpt-oss"])  # a bias
    assert any("graft.rms_norm, not by" in one for one in said["gemma-2"])
    assert any("is read by 2 calls" in one for one in said["mixtral"])  # the embedding's


def reasons(gm):
    _, report = sharded(gm, 0, 2, *ON)
    return [miss.reason for miss in report.transforms[NAME].near_misses]


def test_one_rank_is_skipped():
    _, report = transformed(Layer("plain", world=0), (torch.randn(2, 3, 8), torch.randn(2, 3, 8)), NAME)
    record = report.transforms[NAME]
    assert record.status == "skipped" and "no graft::all_reduce" in record.reason


class Layer(torch.nn.Module):
    """A sum over two ranks and what follows it, in one of several ways."""

    def __init__(self, kind, world=2):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(0)))
        self.kind, self.world = kind, world

    def forward(self, x, residual):
        total = ops.all_reduce(x, self.world) if self.world else x * 2
        left, right = (residual, total) if self.kind == "swapped" else (total, residual)
        weight = self.weight.to(residual.dtype)
        normed, both = ops.add_rms_norm(left, right, weight, 1e-5, 1.0, True, self.kind == "wide")
        if self.kind == "two readers":
            return normed, both, total
        return (normed,) if self.kind == "normed alone" else (normed, both)


def layer(kind, residual=None):
    x = torch.randn(2, 3, 8)
    gm, report = transformed(Layer(kind), (x, x + 1 if residual is None else residual), NAME)
    return gm, report.transforms[NAME]


@pytest.mark.parametrize("kind", ["plain", "swapped", "wide", "normed alone"])
def test_every_spelling_is_found_and_checked_with_two_ranks(kind):
    gm, record = layer(kind)
    assert count(gm, FUSED) == 1 and count(gm, EXCHANGE) == count(gm, ADD_NORM) == 0
    (match,) = record.matches
    assert match.numeric_check.share < 1 and match.numeric_check.trials > 10
    parts, residual = [torch.randn(2, 3, 8) for _ in range(2)], torch.randn(2, 3, 8)
    with torch.no_grad():
        found = run_as_ranks([lambda x=x: [t.detach() for t in gm(x, residual)] for x in parts])
        expected = Layer(kind, world=0)(sum(parts) / 2, residual)
    for one in found:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "residual", "said"),
    [
        ("two readers", None, "read by"),
        ("plain", torch.randn(1, 3, 8), "broadcast"),
        ("plain", torch.randn(2, 3, 8, dtype=torch.float64), "torch.float32, the residual torch.float64"),
    ],
    ids=["a second reader", "a residual that is broadcast", "two dtypes"],
)
def test_what_would_be_something_else_stays(kind, residual, said):
    gm, record = layer(kind, residual)
    assert count(gm, FUSED) == 0 and count(gm, EXCHANGE) == 1
    assert any(said in miss.reason for miss in record.near_misses)


class Twice:
    """As if another rank had the same part."""

    rank, world, broken = 0, 2, False

    def all_reduce(self, x):
        return x * 2


def test_whatever_else_is_changed_stays_or_keeps_the_numbers():
    (rewrite,) = fusion.REWRITES
    transform = TransformRegistry.get(NAME)(load_config().transforms[NAME])
    with as_rank(Twice()):
        cases = [case for path in variants(rewrite) for case in negatives(rewrite, path)]
        for case in cases:
            assert_refused_or_harmless(transform, case)
    assert {case.kind for case in cases} >= {"second reader", "dtype", "broadcast"}


def own_part_alone(x, residual, weight, world, eps, offset, cast_last, wide):
    return ops.add_rms_norm(x, residual, weight, eps, offset, cast_last, wide)


def residual_of_each_rank(x, residual, weight, world, eps, offset, cast_last, wide):
    return ops.all_reduce_add_norm(x + residual, residual, weight, world, eps, offset, cast_last, wide)


@pytest.mark.parametrize("wrong", [own_part_alone, residual_of_each_rank])
def test_the_check_finds_a_wrong_replacement(monkeypatch, wrong):
    monkeypatch.setattr(fusion, "REWRITES", (replace(fusion.REWRITES[0], replacement=wrong),))
    with pytest.raises(TransformError, match=r"the replacement at .* is"):
        layer("plain")


def test_a_part_that_another_rank_has_gives_other_logits():
    """The comparison above sees a sum that leaves a rank out."""
    parts = [sharded(whole_graph("llama"), rank, 2, *ON)[0] for rank in range(2)]
    right = together(parts)[0]
    fused = next(node for node in calls(parts[1].graph) if is_op(node, FUSED))
    with parts[1].graph.inserting_before(fused):
        fused.args = (parts[1].graph.call_function(torch.ops.aten.neg.default, (fused.args[0],)), *fused.args[1:])
    parts[1].recompile()
    assert (together(parts)[0] - right).abs().max() > 1e-2
    assert torch.allclose(right, logits_of(whole_graph("llama")), atol=2e-5)
