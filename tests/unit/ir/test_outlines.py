"""Patterns from one trace: a site that fits costs no second one, and a guess that is wrong changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graft.ir.patterns import pattern as patterns
from pattern_cases import find, ops

NORM = {"x": "b s d", "weight": "d"}
INPUTS = (torch.randn(2, 3, 8), torch.randn(8))


@pytest.fixture
def traces(monkeypatch):
    """The names of the functions that were traced, in order."""
    seen, trace = [], patterns.trace
    monkeypatch.setattr(patterns, "trace", lambda f, *rest: (seen.append(f.__name__), trace(f, *rest))[1])
    return seen


def test_a_flag_that_is_found_costs_no_second_trace(traces):
    def norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast_last: bool) -> Tensor:
        return ops.rms_norm(x, weight, eps, offset, cast_last).relu()

    def body(x, w):
        return ops.rms_norm(x, w, 1e-3, 1.0, True).relu() + ops.rms_norm(x, w, 1e-4).relu()

    matches, _ = find(norm, NORM, body, inputs=INPUTS)
    assert [tuple(match.literals.values()) for match in matches] == [(1e-3, 1.0, True), (1e-4, 0.0, False)]
    assert traces == ["norm"] * 3, "one with made-up numbers, one for either site"


def test_where_nothing_comes_near_one_trace_is_all(traces):
    def norm(x: Tensor, weight: Tensor, eps: float, cast_last: bool) -> Tensor:
        return ops.rms_norm(x, weight, eps, 0.0, cast_last).exp().sin().relu()

    matches, misses = find(norm, NORM, lambda x, w: x.relu() + w, inputs=INPUTS)
    assert (matches, misses) == ([], []) and traces == ["norm"]


def test_a_cast_beside_a_flag_is_a_cast():
    def norm(x: Tensor, weight: Tensor, eps: float, cast_last: bool) -> Tensor:
        return ops.rms_norm(x.float(), weight, eps, 0.0, cast_last).to(torch.bfloat16)

    def body(x, w):
        return ops.rms_norm(x.float(), w, 1e-3, 0.0, True).bfloat16()

    shapes, inputs = {"x": "b s d", "weight": "d : float32"}, (INPUTS[0].bfloat16(), INPUTS[1])
    matches, _ = find(norm, shapes, body, inputs=inputs)
    assert [match.literals for match in matches] == [{"eps": 1e-3, "cast_last": True}]


def twice(x: Tensor, weight: Tensor, eps: float, cast_last: bool) -> Tensor:
    """The first flag has the argument's name and its made-up value, and is none of it."""
    return ops.rms_norm(ops.rms_norm(x, weight, eps, 0.0, False), weight, eps, 0.0, cast_last)


def inverted(x: Tensor, weight: Tensor, eps: float, cast_last: bool) -> Tensor:
    return ops.rms_norm(ops.rms_norm(x, weight, eps, 0.0, not cast_last), weight, eps, 0.0, cast_last)


@pytest.mark.parametrize("pattern", [twice, inverted])
@settings(max_examples=8, deadline=None)
@given(first=st.booleans(), second=st.booleans(), eps=st.sampled_from((1e-3, 0.3713, 0.7129)))
def test_a_wrong_guess_finds_what_two_traces_find(pattern, first, second, eps):
    def body(x, w):
        return ops.rms_norm(ops.rms_norm(x, w, eps, 0.0, first), w, eps, 0.0, second)

    matches, _ = find(pattern, NORM, body, inputs=INPUTS)
    fits = not first if pattern is twice else first is not second
    assert [match.literals for match in matches] == ([{"eps": eps, "cast_last": second}] if fits else [])


def test_a_near_miss_says_which_literal_is_wrong():
    """In the outline it is open, and everything fits."""

    def norm(x: Tensor, weight: Tensor, eps: float, cast_last: bool) -> Tensor:
        y = ops.rms_norm(ops.rms_norm(x, weight, eps, 0.0, True), weight, eps, 0.0, cast_last)
        return y.relu().exp()

    def body(x, w):
        return ops.rms_norm(ops.rms_norm(x, w, 1e-3, 0.0, True), w, 1e-3, 1.0).relu().exp()

    matches, misses = find(norm, NORM, body, inputs=INPUTS)
    assert not matches and "expected the value 0.0, found 1.0" in misses[0].reason
