"""What a Rewrite says beyond its two functions: needs, new inputs, origins, shared values, explanations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Interpreter

from graft.base.errors import PatternError
from graft.ir.nodes import calls, is_op, module_path, placeholders, where
from graft.ir.patterns.match import Refused
from graft.ir.patterns.needs import any_of
from graft.ir.patterns.words import one_of
from graft.ir.trace import export_graph
from graft.passes.base import Context, Stage, TransformConfig
from graft.passes.patterns import PatternTransform, Rewrite
from pattern_cases import W, X, graph_of, names, ops

aten = torch.ops.aten
ADD, CAST, EXP, SIN = aten.add.Tensor, aten.to.dtype, aten.exp.default, aten.sin.default


def apply(gm, *rewrites, explained=(), explain=lambda node: None):
    """What a transform of these rewrites says of the graph, which it changes."""

    class Some(PatternTransform):
        name = "some"

        def rewrites(self):
            return rewrites

        def explain(self, node):
            explain(node)

    Some.explained = explained
    outcome = Some(TransformConfig(Stage.FUSE)).apply(gm, Context())
    gm.graph.lint()
    gm.recompile()
    return outcome


# ── needs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def summed(x: Tensor) -> Tensor:
    return (x.to(torch.float64) + 1).exp()


def untraceable(x: Tensor) -> Tensor:
    raise AssertionError("it was traced")


PAIR = ((ADD, CAST),)


def test_a_call_that_must_read_another_is_a_need():
    """Both ops are there, but no sum reads a cast: the pattern is not even traced, and the reason names the pair."""
    gm = graph_of(lambda x: ((x + 1).exp(), x.to(torch.float64)))
    outcome = apply(gm, Rewrite(untraceable, untraceable, X, needs=PAIR))
    assert outcome.reason == "the graph has no aten.add.Tensor of aten.to.dtype"
    gm = graph_of(lambda x: (x.to(torch.float64) + 1).exp())
    assert len(apply(gm, Rewrite(summed, summed, X, needs=PAIR)).matches) == 1


def test_a_dropout_in_between_is_told_and_not_taken_for_a_lack():
    def wave(x: Tensor) -> Tensor:
        return x.sin().exp()

    gm = graph_of(lambda x: F.dropout(x.sin(), 0.5, True).exp())
    (miss,) = apply(gm, Rewrite(wave, wave, X, needs=((EXP, SIN),))).near_misses
    assert "is aten.dropout, expected aten.sin" in miss.reason


def either(x: Tensor) -> Tensor:
    return one_of(lambda: x.exp(), lambda: x.sin()).relu()


@pytest.mark.parametrize("op", ["exp", "sin"])
def test_one_of_several_needs_is_enough(op):
    rewrite = Rewrite(either, either, X, needs=(any_of(EXP, SIN),))
    assert len(apply(graph_of(lambda x: getattr(x, op)().relu()), rewrite).matches) == 1
    missing = apply(graph_of(lambda x: x.cos().relu()), Rewrite(untraceable, untraceable, X, needs=rewrite.needs))
    assert missing.reason == "the graph has no aten.exp or aten.sin"


@pytest.mark.parametrize("wrong", [any_of(CAST, ADD), (EXP, SIN), aten.cos.default])
def test_a_need_that_the_pattern_does_not_have_is_an_error(wrong):
    gm = graph_of(lambda x: ((x.sin().exp() + 1).cos(), x.to(torch.float64)))
    with pytest.raises(PatternError, match="is said to need"):
        apply(gm, Rewrite(either, either, X, needs=(wrong,)))


# ── tensors that the graph has not ──────────────────────────────────────────────────────────────────────────────


def scaled(x: Tensor) -> Tensor:
    return x.exp() * 2.0


def rows_and_weight(x: Tensor, rows: Tensor, gain: Tensor) -> Tensor:
    return torch.index_select(x, 0, rows).exp() * gain


def make(run, match):
    like = match.anchor
    with like.meta["val"].fake_mode:
        example = torch.empty(2, dtype=torch.int64)
    gain = run.editor.parameter("new.gain", torch.full((8,), 2.0), before=like, like=like)
    return {"rows": run.editor.placeholder("rows", example), "gain": gain}


def test_a_replacement_may_take_a_new_input_and_a_new_weight():
    gm, x = graph_of(lambda x: x.exp() * 2.0), torch.randn(2, 3, 8)
    outcome = apply(gm, Rewrite(scaled, rows_and_weight, X, make=make))
    (match,) = outcome.matches
    assert match.made == ("index_select_default", "exp_default", "mul_tensor", "rows", "new_gain")
    assert [node.name for node in placeholders(gm.graph)] == ["inputs_0", "rows"]
    result = Interpreter(gm).run(x, torch.tensor([1, 0]))
    assert torch.equal(result[0] if isinstance(result, tuple) else result, x[[1, 0]].exp() * 2.0)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return x + self.second(self.first(x))


def residual(x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, weight) + r


def residual_fused(x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
    return ops.fused_linear(x, weight, residual=r)


@pytest.mark.parametrize(("origin", "module"), [("weight", "second"), ("", "")])
def test_a_new_call_comes_from_the_reader_of_the_origin(origin, module):
    gm = export_graph(Layers(), (torch.randn(2, 3, 8),))
    shapes = X | {"weight": "d d", "r": "b s d"}
    assert len(apply(gm, Rewrite(residual, residual_fused, shapes, origin=origin)).matches) == 1
    (fused,) = (node for node in calls(gm.graph) if is_op(node, ops.fused_linear.default))
    assert module_path(fused) == module


# ── values that several matches have, or that a match reads and makes ───────────────────────────────────────────


def activated(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.exp(), weight)


def activated_fused(x: Tensor, weight: Tensor) -> Tensor:
    return ops.linear(x.exp(), weight)


@settings(max_examples=6, deadline=None)
@given(st.integers(min_value=1, max_value=4), st.booleans())
def test_siblings_share_what_others_may_read(count, outside):
    """Any number of calls that read one value: each is a match where readers are allowed, and the value stays only
    for a reader from outside."""

    def body(x, *ws):
        e = x.exp()
        return (*(F.linear(e, w) for w in ws), *([e.sin()] if outside else []))

    gm, x = graph_of(body, *[(4 + i, 8) for i in range(count)]), torch.randn(2, 3, 8)
    expected = gm(x)
    outcome = apply(gm, Rewrite(activated, activated_fused, X | W, allow_readers=True))
    assert len(outcome.matches) == count and "linear" not in names(gm)
    assert names(gm).count("exp") == count + outside
    for got, wanted in zip(gm(x), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_value_of_the_match_is_no_input_of_it():
    gm = graph_of(lambda x, w: (y := F.linear(x, w)) + y, (8, 8))
    outcome = apply(gm, Rewrite(residual, residual_fused, X | {"weight": "d d", "r": "b s d"}, near=2))
    assert not outcome.matches and "%linear" in outcome.reason
    assert "is the r of the match, and a part of it" in outcome.reason


# ── what is left is explained ───────────────────────────────────────────────────────────────────────────────────


def test_what_is_left_is_explained_once():
    """The transform's own reason stands in for the matcher's at the same call; what fused is not explained."""

    def explain(node):
        raise Refused(node, f"{where(node)} is left")

    gm = graph_of(lambda x: (x.exp() * 2.0, x.sin() * 2.0, x.cos() * 2.0))
    rewrite = Rewrite(scaled, lambda x: x.exp2(), X, near=1)
    assert [miss.reason for miss in apply(gm, rewrite).near_misses] != []
    gm = graph_of(lambda x: (x.exp() * 2.0, x.sin() * 2.0, x.cos() * 2.0))
    outcome = apply(gm, rewrite, explained=(aten.mul.Tensor,), explain=explain)
    assert len(outcome.matches) == 1 and "mul" not in [miss.name for miss in outcome.near_misses]
    assert [(miss.name, miss.reason.endswith("is left")) for miss in outcome.near_misses] == [
        ("mul_1", True),
        ("mul_2", True),
    ]
