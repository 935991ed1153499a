"""The words of patterns: what each of them lets match, what it must not, and what it says about the difference."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graft.base.errors import PatternError
from graft.ir.patterns.words import choice, one_of, optional
from pattern_cases import GATES, W, X, find, graph_of, names, ops, rewritten

# ── one_of, choice ──────────────────────────────────────────────────────────────────────────────────────────────


def inverse_root(x: Tensor, eps: float) -> Tensor:
    v = x.pow(2).mean(-1, keepdim=True) + eps
    return one_of(lambda: x * torch.rsqrt(v), lambda: x / torch.sqrt(v), lambda: x * torch.reciprocal(torch.sqrt(v)))


SPELLINGS = {
    "rsqrt": lambda v: torch.rsqrt(v),
    "reciprocal": lambda v: torch.reciprocal(v.sqrt()),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_pattern_finds_every_spelling(spelling):
    def body(x):
        return x * SPELLINGS[spelling](x.pow(2).mean(-1, keepdim=True) + 1e-3)

    matches, _ = find(inverse_root, X, body)
    assert [match.literals for match in matches] == [{"eps": 1e-3}]


def test_a_near_miss_is_that_of_the_spelling_that_came_furthest():
    matches, misses = find(inverse_root, X, lambda x: x / torch.sqrt(x.pow(3).mean(-1, keepdim=True) + 1e-3))
    assert not matches and len(misses) == 1
    assert "expected the value 2, found 3" in misses[0].reason and misses[0].matched == 4


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return choice("activation", silu=lambda: F.silu(gate), gelu=lambda: F.gelu(gate)) * up


def gated_fused(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ops.swiglu(gate, up, activation)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_the_replacement_is_told_what_was_chosen(name):
    gm = graph_of(lambda x, y: getattr(F, name)(x) * y, inputs=(torch.randn(2, 4), torch.randn(2, 4)))
    gm, count = rewritten(gated, gated_fused, GATES, gm)
    (call,) = [n for n in gm.graph.nodes if n.target is ops.swiglu.default]
    assert count == 1 and (call.args[2:] or ("silu",)) == (name,)


def test_alternatives_of_other_dtypes_are_told_apart():
    """Each variant is traced by itself, so a cast in one of them is there."""

    def pattern(x: Tensor, y: Tensor) -> Tensor:
        return one_of(lambda: x.float() + y.float(), lambda: x + y).to(x.dtype).exp()

    def wide(x, y):
        return (x.float() + y.float()).bfloat16().exp()

    two = (torch.randn(2, 4).bfloat16(), torch.randn(2, 4).bfloat16())
    shapes = {"x": "b d", "y": "b d"}
    assert len(find(pattern, shapes, wide, inputs=two)[0][0].nodes) == 5
    assert len(find(pattern, shapes, lambda x, y: (x + y).exp(), inputs=two)[0][0].nodes) == 2
    assert find(pattern, shapes, lambda x, y: (x * y).exp(), inputs=two)[0] == []


def test_a_choice_without_alternatives_or_made_twice_is_an_error():
    def none(x: Tensor) -> Tensor:
        return choice("kind")

    def twice(x: Tensor) -> Tensor:
        both = [choice("kind", a=lambda: x.exp(), b=lambda: x.sin()) for _ in range(2)]
        return both[0] + both[1]

    for pattern, text in ((none, "at least one"), (twice, "made twice")):
        with pytest.raises(PatternError, match=text):
            find(pattern, X, lambda x: x.exp())


def test_a_pattern_that_stands_for_too_many_is_an_error():
    def pattern(x: Tensor) -> Tensor:
        for _ in range(7):
            x = one_of(lambda x=x: x, lambda x=x: x)
        return x.exp()

    with pytest.raises(PatternError, match="more than 64 variants"):
        find(pattern, X, lambda x: x.exp())


# ── optional ────────────────────────────────────────────────────────────────────────────────────────────────────


def scaled(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    y = F.linear(x, weight)
    y = optional(lambda: y * scale, y)
    return optional(lambda: y + bias, y).tanh()


SCALED = X | W | {"bias": "n"}
PRESENT = {
    "nothing": (lambda x, w, b: F.linear(x, w), None, 1.0),
    "a scale": (lambda x, w, b: F.linear(x, w) * 0.5, None, 0.5),
    "a bias": (lambda x, w, b: F.linear(x, w) + b, "bias", 1.0),
    "both": (lambda x, w, b: b + 0.5 * F.linear(x, w), "bias", 0.5),
}


@pytest.mark.parametrize("name", PRESENT)
def test_optional_parts_are_there_or_have_their_defaults(name):
    body, bias, scale = PRESENT[name]
    (match,), _ = find(scaled, SCALED, lambda x, w, b: body(x, w, b).tanh(), (8, 8), (8,))
    assert match.literals["scale"] == scale
    assert ("bias" in match.tensors) == (bias is not None) and (bias or match.literals["bias"] is None)


def test_an_argument_that_a_variant_does_not_read_needs_a_default():
    def pattern(x: Tensor, scale: float) -> Tensor:
        return optional(lambda: x * scale, x).exp()

    with pytest.raises(PatternError, match="never uses"):
        find(pattern, X, lambda x: x.exp())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias).relu()


def test_an_argument_of_an_op_may_be_left_out():
    (match,), _ = find(linear, SCALED, lambda x, w: F.linear(x, w).relu(), (4, 8))
    assert match.literals == {"bias": None}
    (match,), _ = find(linear, SCALED, lambda x, w, b: F.linear(x, w, b).relu(), (4, 8), (4,))
    assert set(match.tensors) == {"x", "weight", "bias"}


def test_one_that_may_not_be_none_must_be_there():
    def pattern(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias).relu()

    assert find(pattern, SCALED, lambda x, w: F.linear(x, w).relu(), (4, 8))[0] == []


def normed(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return ops.rms_norm(total, weight, eps), optional(lambda: total.exp())


def normed_fused(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    row, total = ops.add_rms_norm(x, y, weight, eps)
    return row, total.exp()


@pytest.mark.parametrize("read", [True, False])
def test_a_result_may_be_unread(read):
    def body(x, y, w):
        total = x + y
        row = ops.rms_norm(total, w, 1e-5)
        return (row, total.exp()) if read else row

    inputs = (torch.randn(2, 8), torch.randn(2, 8))
    gm = graph_of(body, (8,), inputs=inputs)
    expected = gm(*inputs)
    gm, count = rewritten(normed, normed_fused, {"x": "b d", "y": "b d", "weight": "d"}, gm)
    assert count == 1 and ("exp" in names(gm)) == read
    torch.testing.assert_close(gm(*inputs), expected)


def test_without_the_result_an_inner_value_is_read_by_none_else():
    def body(x, y, w):
        total = x + y
        return ops.rms_norm(total, w, 1e-5), total.sin()

    matches, misses = find(
        normed, {"x": "b d", "y": "b d", "weight": "d"}, body, (8,), inputs=(torch.randn(2, 8), torch.randn(2, 8))
    )
    assert not matches and "second reader" in misses[0].reason


# ── flags, names, numbers that may be None ──────────────────────────────────────────────────────────────────────


def activated(gate: Tensor, up: Tensor, activation: Literal["silu", "gelu", "gelu_tanh"], upcast: bool) -> Tensor:
    return ops.swiglu(gate, up, activation, upcast).relu()


@pytest.mark.parametrize("given", [(), ("gelu",), ("silu", True), ("gelu_tanh", True)])
def test_flags_and_names_are_captured_defaults_included(given):
    inputs = (torch.randn(2, 4), torch.randn(2, 4))
    (match,), _ = find(activated, GATES, lambda x, y: ops.swiglu(x, y, *given).relu(), inputs=inputs)
    assert match.literals == dict(
        zip(("activation", "upcast"), (*given, *("silu", False)[len(given) :]), strict=True)
    )


def test_a_name_that_is_not_listed_is_a_near_miss():
    def pattern(gate: Tensor, up: Tensor, activation: Literal["silu", "gelu"]) -> Tensor:
        return ops.swiglu(gate, up, activation).relu().exp().sin()

    inputs = (torch.randn(2, 4), torch.randn(2, 4))
    _, misses = find(pattern, GATES, lambda x, y: ops.swiglu(x, y, "gelu_tanh").relu().exp().sin(), inputs=inputs)
    assert "activation is gelu_tanh, not one of silu, gelu" in misses[0].reason


def test_three_flags_cannot_be_told_apart():
    def pattern(x: Tensor, a: bool, b: bool, c: bool) -> Tensor:
        return x.mean(-1, keepdim=a).sum() + x.sum(-1, keepdim=b).sum() + x.amax(-1, keepdim=c).sum()

    with pytest.raises(PatternError, match="tell them apart"):
        find(pattern, X, lambda x: x.exp())


# ── words and lists of patterns say the same ────────────────────────────────────────────────────────────────────


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(["exp", "sin", "tanh"]), st.booleans(), st.booleans(), st.booleans())
def test_words_find_what_the_spelled_out_patterns_find(op, scale, shift, other):
    """Every program of a family of programs: the pattern with words matches where one of its four spellings does."""

    def worded(x: Tensor, a: float = 1.0, b: float = 0.0) -> Tensor:
        y = x.exp()
        y = optional(lambda: y * a, y)
        return optional(lambda: y + b, y).relu()

    def body(x):
        y = getattr(x, op)()
        y = y * 0.5 if scale else y
        y = y - 0.25 if other else y
        return (y + 0.25 if shift else y).relu()

    matches, _ = find(worded, X, body)
    assert len(matches) == (op == "exp" and not other)
    if matches:
        assert matches[0].literals == {"a": 0.5 if scale else 1.0, "b": 0.25 if shift else 0.0}
