"""Parts of patterns that are repeated, constant, of sizes that follow from others, or that write."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graft.ir.patterns.match import Finder
from graft.ir.patterns.words import constant, repeated
from pattern_cases import W, X, find, graph_of, names, ops, rewritten

# ── repeated ────────────────────────────────────────────────────────────────────────────────────────────────────


def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, ...]:
    e = x.exp()
    return tuple(F.linear(e, w, b) for w, b in repeated(weights, biases))


def linears_merged(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(ops.linear(x.exp(), w, b) for w, b in zip(weights, biases, strict=True))


LINEARS = X | {"weights": "n d *3", "biases": "n *3"}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_part_is_found_as_often_as_it_is_there(count):
    sizes = [(4 + i, 8) for i in range(count)]
    gm = graph_of(lambda x, *ws: tuple(F.linear(x.exp(), w) for w in ws), *sizes)
    matches, _ = Finder(linears, LINEARS).find(gm.graph)
    assert [len(match.outputs) for match in matches] == [count]
    assert [match.literals for match in matches] == [{f"biases[{i}]": None for i in range(count)}]
    gm, found = rewritten(linears, linears_merged, LINEARS, gm)
    assert found == 1 and names(gm).count("graft.linear") == count and "linear" not in names(gm)


def test_more_parts_than_the_pattern_has_are_refused():
    sizes = [(4 + i, 8) for i in range(4)]
    matches, misses = find(linears, LINEARS, lambda x, *ws: tuple(F.linear(x.exp(), w) for w in ws), *sizes)
    assert not matches and any("second reader" in miss.reason for miss in misses)


def chain(x: Tensor, weights: list[Tensor]) -> Tensor:
    for w in repeated(weights):
        x = F.linear(x, w).relu()
    return x.tanh()


@settings(max_examples=8, deadline=None)
@given(st.integers(min_value=1, max_value=4))
def test_a_chain_is_taken_as_long_as_it_is(count):
    def body(x, *ws):
        for w in ws:
            x = F.linear(x, w).relu()
        return x.tanh()

    (match,), _ = find(chain, X | {"weights": "d d *4"}, body, *[(8, 8)] * count)
    assert len(match.nodes) == 2 * count + 1 and len(match.tensors) == count + 1


# ── constant ────────────────────────────────────────────────────────────────────────────────────────────────────


def stored(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, constant(weight)).relu().exp()


def test_a_constant_is_a_parameter():
    assert len(find(stored, X | W, lambda x, w: F.linear(x, w).relu().exp(), (4, 8))[0]) == 1
    matches, misses = find(stored, X | W, lambda x, w: F.linear(x, w.sin()).relu().exp(), (4, 8))
    assert not matches and "the weight %sin" in misses[0].reason and "not a parameter" in misses[0].reason


# ── sizes that follow from others ───────────────────────────────────────────────────────────────────────────────


def halves(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, -1)
    return ops.swiglu(gate, up)


def test_a_size_may_be_a_multiple_of_another():
    shapes = X | {"weight": "2*n d"}
    assert len(find(halves, shapes, lambda x, w: ops.swiglu(*F.linear(x, w).chunk(2, -1)), (12, 8))[0]) == 1

    def uneven(x, w):
        y = F.linear(x, w)
        return ops.swiglu(y[..., :6], y[..., 1:7])

    assert find(halves, shapes, uneven, (12, 8))[0] == []


# ── ops that write ──────────────────────────────────────────────────────────────────────────────────────────────


def write_then_read(cache: Tensor, x: Tensor) -> Tensor:
    cache.copy_(x)
    return cache.exp().sin()


def written_late(cache: Tensor, x: Tensor) -> Tensor:
    cache.copy_(x)
    return x.exp().sin()


WRITES = {"cache": "b d", "x": "b d"}


def buffers():
    return torch.zeros(2, 4), torch.randn(2, 4)


def test_a_write_is_part_of_a_pattern():
    def body(cache, x):
        cache.copy_(x)
        return cache.exp().sin()

    gm = graph_of(body, inputs=buffers())
    matches, _ = Finder(write_then_read, WRITES).find(gm.graph)
    assert [len(match.nodes) for match in matches] == [3]
    gm, _ = rewritten(write_then_read, written_late, WRITES, gm)
    cache, x = buffers()
    torch.testing.assert_close(gm(cache, x), x.exp().sin())
    assert torch.equal(cache, x)


BETWEEN = {
    "reads a view of it": lambda cache, x: ((s := cache[0]), cache.copy_(x), s.sum(), cache.exp().sin())[2:],
    "reads what is written": lambda cache, x: (cache.copy_(x), (y := cache.exp()), cache.sum(), y.sin())[2:],
    "writes it again": lambda cache, x: (cache.copy_(x), (y := cache.exp()), cache.add_(1), y.sin())[3:],
    "writes what the match reads": lambda cache, x: (cache.copy_(x), x.add_(1), (y := cache.exp()), y.sin())[3:],
}


@pytest.mark.parametrize("name", BETWEEN)
def test_nobody_may_touch_what_a_match_writes_meanwhile(name):
    matches, misses = find(write_then_read, WRITES, BETWEEN[name], inputs=buffers())
    assert not matches
    assert any(reason in misses[0].reason for reason in ("second reader", "in between needs", "written in place"))


def test_a_write_that_is_missing_or_elsewhere_does_not_match():
    assert find(write_then_read, WRITES, lambda c, x: (c.exp().sin(), x), inputs=buffers())[0] == []
