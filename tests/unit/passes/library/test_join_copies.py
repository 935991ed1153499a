"""join_copies: what is filled part by part is one cat, and what is not wholly filled, or read meanwhile, is left."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graft.base.errors import TransformError
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.library.join_copies import JoinCopies
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from marks import examples

load_all()
aten = torch.ops.aten


class Filled(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.fill = fill

    def forward(self, x, y):
        return self.fill(x, y)


def join(fill):
    """The graph and its record; it gives what the program gives, in the same layout."""
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 2)
    gm = export_graph(Filled(fill), (x, y))
    known = {name: {"enabled": name == "join_copies"} for name in TransformRegistry.names()}
    report = run_pipeline(gm, load_config({"verify": "matches", "transforms": known}))
    found, expected = gm(x.clone(), y.clone()), fill(x.clone(), y.clone())
    for got, right in zip(*(one if isinstance(one, tuple) else (one,) for one in (found, expected)), strict=True):
        assert torch.equal(got, right) and got.stride() == right.stride()
    return gm, report.transforms["join_copies"]


def targets(gm):
    return [node.target for node in calls(gm.graph)]


def beside(x, y, make=lambda x: x.new_empty(2, 3, 6)):
    new = make(x)
    new[..., :4] = x
    new[..., 4:] = y
    return new * 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.new_empty(2, 3, 6),
        lambda x: x.new_zeros(2, 3, 6),
        lambda x: torch.empty_like(torch.cat([x, x[..., :2]], -1)),
        lambda x: torch.zeros_like(torch.cat([x, x[..., :2]], -1)),
    ],
)
def test_parts_become_one_cat(make):
    gm, record = join(lambda x, y: beside(x, y, make))
    assert len(record.matches) == 1 and aten.copy_.default not in targets(gm)
    cat = [node for node in calls(gm.graph) if is_op(node, aten.cat.default)][-1]
    assert [source.name for source in cat.args[0]] == ["x", "y"]
    assert record.matches[0].numeric_check is not None


def test_the_order_is_that_of_the_axis_and_a_later_write_is_into_the_result():
    def fill(x, y):
        new = x.new_empty(2, 3, 6)
        new[:, :, 4:] = y
        new[:, :, 0:4] = x + 1
        new.add_(1)
        return new

    gm, record = join(fill)
    assert len(record.matches) == 1 and aten.add_.Tensor in targets(gm)


def test_a_later_write_into_one_result_is_seen_by_the_next():
    def fill(x, y):
        new, other = x.new_empty(2, 3, 6), x.new_empty(2, 3, 8)
        new[..., :4] = x
        new[..., 4:] = y
        other[..., :6] = new
        new.add_(1)
        other[..., 6:] = y
        return new, other

    _, record = join(fill)
    (miss,) = record.near_misses
    assert len(record.matches) == 1 and "is written in place between" in miss.reason


def test_any_axis():
    def fill(x, y):
        new = x.new_empty(5, 3, 4)
        new[:2] = x
        new[2:4] = x * 2
        new[4:] = x[:1]
        return new

    gm, record = join(fill)
    assert (
        len(record.matches) == 1 and len(next(n for n in calls(gm.graph) if is_op(n, aten.cat.default)).args[0]) == 3
    )


def unwritten(x, y):
    new = x.new_zeros(2, 3, 7)
    new[..., :4] = x
    new[..., 5:] = y
    return new


def twice(x, y):
    new = x.new_empty(2, 3, 5)
    new[..., :4] = x
    new[..., 3:] = y
    return new


def early(x, y):
    new = x.new_zeros(2, 3, 6)
    new[..., :4] = x
    half = new * 2
    new[..., 4:] = y
    return new, half


def casting(x, y):
    new = x.new_empty(2, 3, 6)
    new[..., :4].copy_(x.double())
    new[..., 4:] = y
    return new


def of_its_own(x, y):
    new = torch.zeros(2, 3, 6)
    new[..., :4] = x
    new[..., 4:] = y
    return new


def repeating(x, y):
    new = x.new_empty(2, 3, 6)
    new[..., :4].copy_(x[:1])
    new[..., 4:] = y
    return new


def from_itself(x, y):
    new = x.new_zeros(2, 3, 8)
    new[..., :4] = x
    new[..., 4:] = new[..., :4]
    return new


def source_written_between(x, y):
    new, x = x.new_empty(2, 3, 6), x * 1
    new[..., :4] = x
    x.mul_(2)
    new[..., 4:] = y
    return new, x


def like_a_transposed_one(x, y):
    new = torch.empty_like(torch.cat([x, y], -1).transpose(0, 1))
    new[..., :4] = x.transpose(0, 1)
    new[..., 4:] = y.transpose(0, 1)
    new.transpose(0, 1).reshape(2, 18).add_(1)  # a view, as it lies
    return new


def from_channels_last(x, y):
    image = x.new_ones(2, 3, 4, 4).to(memory_format=torch.channels_last) * x[0, 0, 0]
    new = x.new_empty(2, 6, 4, 4)
    new[:, :3] = image
    new[:, 3:] = image * 2
    return new


def two_axes(x, y):
    new = x.new_zeros(2, 3, 4)
    new[:1] = x[:1]
    new[:, :2] = x[:, :2]
    return new


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (unwritten, "positions 4 to 5 of axis 2 are not written"),
        (twice, "positions 3 to 4 of axis 2 are written twice"),
        (early, "before all of it is written"),
        (casting, "casts torch.float64"),
        (of_its_own, "has a dtype of its own"),
        (lambda x, y: beside(x, y, lambda x: x.new_empty(2, 3, 6, dtype=torch.float64)), "has a dtype of its own"),
        (repeating, r"repeats \[1, 3, 4\] over \[2, 3, 4\]"),
        (from_itself, "before all of it is written|into another"),
        (source_written_between, "is written in place between"),
        (two_axes, "along the axes 0 and 1"),
        (like_a_transposed_one, "which cat would not give it"),
        (from_channels_last, "which cat would not give it"),
    ],
)
def test_what_is_something_else_is_left_alone_and_told(fill, reason):
    gm, record = join(fill)
    assert not record.matches and aten.copy_.default in targets(gm)
    (miss,) = record.near_misses
    assert re.search(reason, miss.reason), miss.reason


def test_nothing_to_join_says_so():
    _, record = join(lambda x, y: (x + 1, y))
    assert (record.status, record.reason) == ("no_match", "no new tensor is filled part by part")


def test_the_check_finds_parts_in_the_wrong_order(monkeypatch):
    right = JoinCopies.write

    def reversed_parts(self, run, match):
        return right(self, run, replace(match, tensors=dict(reversed(match.tensors.items()))))

    def fill(x, y):
        new = x.new_empty(2, 3, 8)
        new[..., :4] = x
        new[..., 4:] = x * 2
        return new

    monkeypatch.setattr(JoinCopies, "write", reversed_parts)
    with pytest.raises(TransformError, match=r"the replacement at %new_empty .* is off by"):
        join(fill)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.randoms(use_true_random=False), st.integers(0, 2))
def test_any_parts_in_any_order_or_it_is_told(sizes, order, hole):
    """hole: positions at the end that nobody writes."""
    total, edges = sum(sizes), [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    parts = list(enumerate(sizes))
    order.shuffle(parts)

    def fill(x, y):
        new = x.new_zeros(2, 3, total + hole)
        for number, size in parts:
            new[..., edges[number] : edges[number + 1]] = x[..., :size] * (number + 1)
        return new

    _, record = join(fill)
    assert len(record.matches) == (hole == 0) and len(record.near_misses) == (hole > 0)
