"""Keys of dicts and of `**kwargs` in another order than a module was compiled for: another way through it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from torch import nn

import graft
from graft.api.call_form import CallForm
from graft.base.errors import CaptureError, GradientsRefused, UsageError


def join(state, **more):
    return torch.cat([*state["all"].values(), *more.values()])


def test_another_order_of_keys_is_another_way_through_a_program(tmp_path):
    """It may go through them; the first graph gave its own order's result."""
    a, b = torch.zeros(2), torch.ones(2)
    first, other = ({"all": {"a": a, "b": b}},), ({"all": {"b": b, "a": a}},)
    compiled = graft.compile(join, first, {"p": a, "q": b})
    for state, more in product((first, other), ({"p": a, "q": b}, {"q": b, "p": a})):
        assert torch.equal(compiled(*state, **more), join(*state, **more))
    made_by = [variant.made_by for variant in compiled.variants]
    assert len(made_by) == 4 and made_by[1] == "the keyword arguments are in another order: 'q', 'p'"
    assert "the keys of state.all are in another order: 'b', 'a'" in made_by
    compiled.save(tmp_path / "saved")
    for state, more in product((first, other), ({"p": a, "q": b}, {"q": b, "p": a})):
        assert torch.equal(graft.load(tmp_path / "saved")(*state, **more), join(*state, **more))
    compiled = graft.compile(join, first, {"p": a, "q": b})
    compiled.save(tmp_path / "first", overwrite=True)
    for module in (compiled, graft.load(tmp_path / "first")):
        module.freeze()
        with pytest.raises(UsageError, match=r"the keys of state.all are in another order: 'b', 'a'"):
            module(*other, p=a, q=b)


def test_an_exported_program_takes_its_inputs_by_their_keys():
    class Joined(nn.Module):
        def forward(self, state):
            return join(state)

    a, b = torch.zeros(2), torch.ones(2)
    program = torch.export.export(Joined(), ({"all": {"a": a, "b": b}},))
    other = {"all": {"b": b, "a": a}}
    assert torch.equal(graft.compile(program)(other), program.module()(other))


def test_an_ordered_dict_arrives_as_one():
    def ends(given):
        assert type(given) is OrderedDict
        rest = given.copy()
        return rest.popitem(last=False)[1] + 2 * rest.popitem()[1], given

    a, b = torch.zeros(2), torch.ones(2)
    compiled = graft.compile(ends, (OrderedDict(a=a, b=b),))
    found, returned = compiled(OrderedDict(a=a, b=b))
    assert torch.equal(found, a + 2 * b) and type(returned) is OrderedDict
    assert torch.equal(compiled(OrderedDict(b=b, a=a))[0], b + 2 * a)
    with pytest.raises(UsageError, match="was a OrderedDict when it was compiled, and is a plain"):
        compiled({"a": a, "b": b})


def test_an_order_of_keys_is_no_way_around_the_contract():
    a, b = torch.zeros(2), torch.ones(2)
    compiled = graft.compile(lambda d: torch.cat(list(d.values())), ({"a": a, "b": b},))
    for keys in ("ab", "ba"):
        for wrong, problem in (
            (torch.ones(2).double(), "d.b is torch.float64 on cpu, but was torch.float32"),
            (torch.ones(3), "d.b"),
        ):
            with pytest.raises(UsageError, match=problem):
                compiled({key: wrong if key == "b" else a for key in keys})
    assert len(compiled.variants) == 1
    assert torch.equal(compiled({"b": b, "a": a}), torch.cat([b, a])) and len(compiled.variants) == 2


def test_gradients_are_those_of_the_order():
    def forward(d, w):
        return [value * w if index == 0 else value * 2 for index, value in enumerate(d.values())]

    a, b, w = torch.ones(2), torch.ones(2), torch.ones(2, requires_grad=True)
    compiled = graft.compile(forward, ({"a": a, "b": b}, w), grad="honour")
    for given in ({"a": a, "b": b}, {"b": b, "a": a.clone().requires_grad_()}):
        carries = [result.requires_grad for result in forward(given, w)]
        assert [result.requires_grad for result in compiled(given, w)] == carries


def test_the_input_that_requires_gradients_is_named_in_any_order():
    a, b = torch.zeros(2), torch.ones(2)
    compiled = graft.compile(lambda d: torch.cat(list(d.values())), ({"a": a, "b": b},))
    with pytest.raises(GradientsRefused, match=r"d\.b requires gradients"):
        compiled({"b": b.clone().requires_grad_(), "a": a})


def test_sizes_stay_those_of_their_keyword():
    def forward(x, **more):
        return torch.cat([x, *more.values()])

    x, p, q = torch.ones(5), torch.ones(6), torch.ones(7)
    shapes = [None, {0: torch.export.Dim.DYNAMIC}, None]
    compiled = graft.compile(forward, (x,), {"p": p, "q": q}, dynamic_shapes=shapes)
    for more in ({"p": torch.ones(9), "q": q}, {"q": q, "p": torch.ones(9)}, {"q": q, "p": torch.ones(8)}):
        assert torch.equal(compiled(x, **more), forward(x, **more))
    assert len(compiled.variants) == 2


@dataclass
class Batch:
    ids: torch.Tensor
    more: dict = field(default_factory=dict)


def test_fields_of_a_dataclass_have_the_order_of_the_class():
    def forward(batch, given):
        return batch.ids + sum(given.values())

    x = torch.ones(2)
    compiled = graft.compile(forward, (Batch(x), {"a": x}))
    other = object.__new__(Batch)
    other.more, other.ids = {}, x
    assert torch.equal(compiled(other, OrderedDict(a=x)), 2 * x) and len(compiled.variants) == 1


def test_a_program_that_reorders_its_argument_is_refused():
    def plain(d):
        d["a"] = d.pop("a")
        return d["a"] + 1

    def ordered(d):
        d.move_to_end("a")
        return d["a"] + 1

    def on_a_copy(d):
        return plain(dict(d))

    x = torch.ones(2)
    for program, given in ((plain, {"a": x, "b": x}), (ordered, OrderedDict(a=x, b=x))):
        with pytest.raises(CaptureError, match="changes the order of keys in the argument"):
            graft.compile(program, (given,))
    assert torch.equal(graft.compile(on_a_copy, ({"a": x, "b": x},))({"a": x, "b": x}), x + 1)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_call_looks_at_its_keys_once(gradients, monkeypatch):
    looked, look = [], CallForm.key_orders
    compiled = graft.compile(join, ({"all": {"a": torch.zeros(2), "b": torch.ones(2)}},))
    monkeypatch.setattr(CallForm, "key_orders", lambda *args: looked.append(1) or look(*args))
    with torch.set_grad_enabled(gradients):
        for keys in ("ab", "ba"):
            given = {"all": {key: torch.full((2,), float(ord(key))) for key in keys}}
            compiled(given)
            looked.clear()
            assert torch.equal(compiled(given), join(given)) and len(looked) == 1
