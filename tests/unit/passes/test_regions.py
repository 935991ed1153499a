"""Regions that could be one call each: they grow over neighbours, never around a value they must wait for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.ir.nodes import calls, tensor_val
from graft.ir.trace import export_graph, trace_function
from graft.passes.elementwise import is_pointwise
from graft.passes.regions import MAX_NODES, Grower
from marks import examples

X, W = torch.randn(2, 3, 8), torch.randn(8, 8)


def grown(graph):
    keys = {node: tuple(tensor_val(node).shape) for node in calls(graph) if is_pointwise(node)}
    grower = Grower(graph, keys, "test")
    return grower.grow(), grower


def sizes(function, *args):
    found, grower = grown(trace_function(function, args).graph)
    return [len(region.nodes) for region in found], [miss.reason for miss in grower.misses]


def diamond(x):
    a = x.exp()
    return a.sin() * a.cos() + a


def shapes(x):
    v = x[0, 0]
    return (v.exp() + 1.0).sqrt() * (x.sigmoid() * x)


def residual(x, w):
    h = (x * 2.0).exp()
    return (h + h @ w).tanh()


def late(x, w):
    s = x.sigmoid()
    return x + s * ((x @ w) @ w)


def never(x, w):
    h = x * 2.0
    m = h @ w
    y = x @ w
    return m, h * y


def tight(x, w):
    h = x * 2.0
    y = x @ w
    m = h @ w
    return m, h * y


@pytest.mark.parametrize(
    ("function", "expected", "reason"),
    [
        (diamond, [5], ""),
        (shapes, [3, 3], ""),
        (late, [3], ""),
        (tight, [2], ""),
        (residual, [2, 2], "reads from it before"),
        (never, [], "reads from it before"),
    ],
)
def test_regions_have_a_place_to_stand(function, expected, reason):
    found, reasons = sizes(function, *((X, W) if function.__code__.co_argcount == 2 else (X,)))
    assert found == expected
    assert all(reason in told for told in reasons) and bool(reasons) is bool(reason)


def test_regions_are_limited_and_say_so():
    def long(x):
        for i in range(MAX_NODES + 10):
            x = x + float(i + 1)
        return x

    found, reasons = sizes(long, X)
    assert sorted(found) == [10, MAX_NODES] and "at most 64 ops" in reasons[0]


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", X.clone())

    def forward(self, x):
        a = self.state * x
        self.state.add_(1.0)
        return a + self.state


def test_a_write_in_between_keeps_both_sides_apart():
    found, grower = grown(export_graph(Counter(), (X,)).graph)
    assert found == [] and "is written in place between" in grower.misses[0].reason


OPS = (
    *(lambda a, _: a.exp(), lambda a, _: a.tanh(), lambda a, _: a * 2.0),
    *(lambda a, w: a @ w, lambda a, _: a.sum(-1, keepdim=True) + a),
)


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=9))
def test_every_region_can_run_as_one_call(program):
    """Each stands after all that it reads and before all who read it, and no node is in two."""

    def run(x, w):
        values = [x]
        for op, left, right in program:
            values.append(OPS[op](values[left % len(values)], w) + values[right % len(values)])
        return values[-1]

    graph = trace_function(run, (X, W)).graph
    found, grower = grown(graph)
    place = {node: region.position for region in found for node in region.nodes}
    assert len(place) == sum(len(region.nodes) for region in found)
    for region in found:
        assert all(place.get(node, grower.order[node]) < region.position for node in region.inputs())
        users = {user for node in region.outputs() for user in node.users if user not in region.nodes}
        assert all(place.get(user, grower.order[user]) > region.position for user in users)
