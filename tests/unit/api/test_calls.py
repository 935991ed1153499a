"""What a compiled module may be called with, and what it makes of it: forms of arguments, layouts, copies, traces."""

from __future__ import annotations

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim

import graft
from graft.base.errors import PositionError, ReadOnlyInput, ReplacedBuffer, SharedMemoryError, UsageError
from marks import short


class Nested(nn.Module):
    def forward(self, state, pair, *, scale=1.0, last=None):
        state["k"].add_(pair[0])
        return state["k"] - state["v"] * pair[1][0] * scale


def nested_call():
    return {"k": torch.ones(3), "v": torch.zeros(3)}, (torch.ones(3), [torch.ones(3)])


def test_nested_inputs_are_taken_by_their_keys():
    compiled = graft.compile(Nested(), nested_call())
    state, pair = nested_call()
    other = {"v": torch.zeros(3), "k": torch.ones(3)}  # another order, the same cache is written
    assert torch.equal(compiled(other, pair), Nested()(state, pair))
    assert torch.equal(other["k"], state["k"]) and not other["v"].any()
    for call, message in (
        (({"k": torch.ones(3), "w": torch.zeros(3)}, pair), r"was a dict of \['k', 'v'\]"),
        ((state, (torch.ones(3), [torch.ones(3), torch.ones(3)])), r"input pair\[1\] was a list of 1"),
        ((state, [torch.ones(3), [torch.ones(3)]]), "input pair was a tuple of 2"),
        ((state, (torch.ones(3), torch.ones(3))), r"input pair\[1\] was a list of 1"),
        ((torch.ones(3), pair), "input state was a dict"),
    ):
        with pytest.raises(UsageError, match=message):
            compiled(*call)


def test_one_tensor_as_two_examples_stays_two_inputs():
    class Two(nn.Module):
        def forward(self, a, b):
            return a + 2 * b

    x, y = torch.ones(3), torch.full((3,), 5.0)
    compiled = graft.compile(Two(), (x, x))
    assert torch.equal(compiled(y, x), Two()(y, x)) and torch.equal(compiled(x, x), Two()(x, x))


def test_arguments_by_position_or_by_name():
    compiled = graft.compile(Nested(), nested_call())
    state, pair = nested_call()
    expected = Nested()(*nested_call())
    assert torch.equal(compiled(state, pair=pair), expected)
    assert torch.equal(compiled(**dict(zip(("pair", "state"), reversed(nested_call()), strict=True))), expected)
    assert torch.equal(compiled(*nested_call(), scale=1.0, last=None), expected)  # their defaults
    for kwargs in ({"scale": 2.0}, {"last": torch.ones(3)}, {"nothing": 1}):
        with pytest.raises(UsageError, match="keyword arguments"):
            compiled(*nested_call(), **kwargs)
    with pytest.raises(UsageError, match="compiled with 2 inputs"):
        compiled(state)


def test_keywords_that_double_star_takes_and_named_tuples():
    class Pair(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor

    class Many(nn.Module):
        def forward(self, x, **others):
            return x * others["a"] - others["b"]

    given = {"a": torch.full((3,), 2.0), "b": torch.ones(3)}
    compiled = graft.compile(Many(), (torch.ones(3),), given)
    assert torch.equal(compiled(torch.ones(3), b=given["b"], a=given["a"]), torch.ones(3))

    class Named(nn.Module):
        def forward(self, pair):
            return pair.a - pair.b

    pair = Pair(torch.ones(3), torch.zeros(3))
    assert torch.equal(graft.compile(Named(), (pair,))(pair), torch.ones(3))


@pytest.mark.parametrize("backend", short(["eager", "inductor", "cuda_graph"], "eager", "cuda_graph"))
def test_a_copy_that_contiguous_makes_is_not_forgotten(backend):
    class Contiguous(nn.Module):
        def forward(self, cache, x):
            flat = cache.contiguous()
            flat.add_(x)
            return flat * 1

    compiled = graft.compile(Contiguous(), (torch.zeros(3, 4), torch.ones(3, 4)), backend=backend)
    for make in (lambda: torch.zeros(3, 4), lambda: torch.zeros(4, 3).t(), lambda: torch.zeros(3, 4)):
        got, expected = make(), make()
        assert torch.equal(compiled(got, torch.ones(3, 4)), Contiguous()(expected, torch.ones(3, 4)))
        assert torch.equal(got, expected)
    assert len(compiled.variants) == 2 and any("not contiguous" in note for note in compiled.report.notes)


def strides(x):
    return x.stride(1) * x, x.sum() * x.stride()[0]


def views(x):
    y = x.t().contiguous()
    y.add_(1)
    return y, x[:, ::2].is_contiguous()


def channels(x):
    return x.is_contiguous(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last) + 1


LAYOUTS = {
    strides: [torch.ones(3, 4), torch.ones(4, 3).t(), torch.ones(3, 8)[:, ::2], torch.ones(4, 3).t()],
    views: [torch.ones(3, 4), torch.ones(4, 3).t(), torch.ones(3, 8)[:, ::2]],
    channels: [torch.ones(2, 3, 4, 4), torch.ones(2, 4, 4, 3).permute(0, 3, 1, 2), torch.ones(2, 3, 4, 4).mT],
}


@pytest.mark.parametrize("program", LAYOUTS)
@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_what_a_program_reads_of_strides_is_that_of_the_call(program, backend, tmp_path):
    """The second and the third are not contiguous, each in its own way."""
    values = LAYOUTS[program]
    compiled = graft.compile(program, (values[0],), backend=backend)
    for value in values:
        for given in (value, value.clone()):
            got, wanted = compiled(copy.deepcopy(given)), program(copy.deepcopy(given))
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
            assert [t.stride() for t in got if isinstance(t, torch.Tensor)] == [
                t.stride() for t in wanted if isinstance(t, torch.Tensor)
            ]
    assert len(compiled.variants) == 3
    compiled.save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    pairs = [[call(copy.deepcopy(value)) for value in values] for call in (loaded, program)]
    torch.testing.assert_close(*pairs, rtol=0, atol=0)
    with pytest.raises(UsageError, match="contiguous, which the program asks for"):
        loaded(torch.ones(2, 3, 8, 4)[:, :, ::2] if program is channels else torch.ones(3, 12)[:, ::3])


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_where_a_tensor_starts_is_that_of_the_call(backend):
    def program(x):
        return x.storage_offset() + x, x.as_strided((2,), (1,), 1)

    memory = torch.arange(12.0)
    compiled = graft.compile(program, (memory[:6],), backend=backend)
    for start in (0, 2, 4, 2):
        torch.testing.assert_close(compiled(memory[start : start + 6]), program(memory[start : start + 6]))
    assert compiled.variants[1].made_by == "input x starts at 2 of its storage, which the program asks for"
    assert len(compiled.variants) == 3
    other = torch.arange(20.0, 32.0)
    torch.testing.assert_close(compiled(other[2:8]), program(other[2:8]))


def attend(query, key=None):
    if key is None or query is key:
        return query * 10
    return query + key


def compares_parts(pairs):
    return sum(a * 2 if a is b else a - b for a, b in pairs)


def test_a_program_that_compares_objects_takes_no_tensor_twice(tmp_path):
    """The graph has the answer for different ones, and gave that result."""
    x = torch.ones(3)
    compiled = graft.compile(attend, (x, torch.ones(3)))
    compiled.save(tmp_path / "saved")
    for call in (compiled, graft.load(tmp_path / "saved")):
        assert torch.equal(call(x, x.view_as(x)), attend(x, torch.ones(3)))
        with pytest.raises(UsageError, match=r"query and key are one tensor, and .* by `is` \(test_calls.py:\d+\)"):
            call(x, x)
    with pytest.raises(UsageError, match="query and key are one tensor"):
        graft.compile(attend, (x, x))
    parts = graft.compile(compares_parts, ([(x, torch.ones(3)), (x + 1, x + 2)],))
    with pytest.raises(UsageError, match=r"pairs\[1\]\[0\] and pairs\[1\]\[1\] are one tensor"):
        y = x + 1
        parts([(x, torch.ones(3)), (y, y)])


def test_sizes_are_inputs_and_modules_are_none():
    x = torch.ones(3)
    compiled = graft.compile(lambda x, size: x.expand(size) * 2, (x, torch.Size([2, 3])))
    assert torch.equal(compiled(x, torch.Size([2, 3])), torch.full((2, 3), 2.0))
    with pytest.raises(UsageError, match=r"size\[0\] is 4, but 2 is fixed"):
        compiled(x, torch.Size([4, 3]))
    with pytest.raises(UsageError, match="layer is a module, whose parameters no graph takes as an input"):
        graft.compile(lambda x, layer: layer(x), (x, nn.ReLU()))


def test_one_tensor_twice_is_taken_where_nothing_is_compared():
    def program(x, y, mode=None):
        return x * y if mode is None else x

    class Elsewhere(nn.Module):
        def same(self, x, y):
            return x is y

        def forward(self, x, y):
            return program(x, y)

    x = torch.full((3,), 2.0)
    for one in (program, Elsewhere()):  # `same` is not called
        assert torch.equal(graft.compile(one, (x, x))(x, x), x * x)


def test_layouts_that_nobody_asks_for_need_no_variant():
    class Plain(nn.Module):
        def forward(self, cache, x):
            cache.add_(x)
            return (cache * 2).transpose(0, 1).contiguous()

    compiled = graft.compile(Plain(), (torch.zeros(3, 4), torch.ones(3, 4)))
    got = torch.zeros(4, 3).t()
    compiled(got, torch.ones(3, 4))
    assert got.sum() == 12 and len(compiled.variants) == 1


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        self.steps += 1
        return self.linear(x) * self.steps if x.shape[0] == 1 else self.linear(x)


def counting():
    module = Counts().eval()
    return module, graft.compile(module, (torch.ones(3, 3),), dynamic_shapes={"x": {0: Dim.DYNAMIC}})


def test_what_cannot_be_kept_is_refused():
    module, compiled = counting()
    for action in (copy.deepcopy, pickle.dumps, lambda c: c.double(), lambda c: c.to(torch.bfloat16)):
        with pytest.raises(UsageError, match="compile"):
            action(compiled)
    module.steps = torch.tensor(7.0)  # the state is shared, and would be no more
    with pytest.raises(ReplacedBuffer, match="steps"):
        compiled(torch.ones(3, 3))


@torch.no_grad()
def test_a_trace_of_a_compiled_module_takes_the_way_of_its_sizes():
    module, compiled = counting()
    with torch.no_grad():
        with pytest.raises(UsageError, match="call the compiled module with such sizes before"):
            torch.export.export(compiled, (torch.ones(1, 3),), strict=False)
        compiled(torch.ones(1, 3))
        program = torch.export.export(compiled, (torch.ones(1, 3),), strict=False).module()
        twin = copy.deepcopy(module)
        assert torch.equal(program(torch.ones(1, 3)), twin(torch.ones(1, 3)))
        traced = torch.compile(compiled, backend="eager")
        twin = copy.deepcopy(module)
        for size in (3, 1, 2):
            assert torch.equal(traced(torch.ones(size, 3)), twin(torch.ones(size, 3)))
    with pytest.raises(UsageError, match="has the shape"):
        torch.export.export(compiled, (torch.ones(3, 4),), strict=False)


def test_positions_of_sums_are_checked():
    class Adds(nn.Module):
        def forward(self, k, v, position, x):
            k[0] = 7.0
            v.index_add_(0, position, x)
            return v.scatter_add_(0, position[:, None].expand(1, 3), x).sum()

    k, v, x = torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(1, 3)
    compiled = graft.compile(Adds(), (k.clone(), v.clone(), torch.tensor([1]), x))
    with pytest.raises(PositionError, match="position 4 of v"):
        compiled(k, v, torch.tensor([4]), x)
    assert not k.any() and not v.any()


def test_counters_in_shared_memory_are_not_guessed():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(2, dtype=torch.long))
            self.register_buffer("view", self.n[:1])
            self.register_buffer("k", torch.zeros(4, 3))

        def forward(self, x):
            self.view.add_(1)
            self.k.index_copy_(0, self.n[:1], x)
            return self.k * 1

    compiled = graft.compile(Tied(), (torch.ones(1, 3),))
    assert any("written through another buffer of the same memory" in note for note in compiled.report.notes)


def test_a_cache_is_writable_where_it_is_called():
    class Writes(nn.Module):
        def forward(self, k, v):
            k.add_(1)
            return v.add_(1).sum()

    compiled, k = graft.compile(Writes(), (torch.zeros(3), torch.zeros(3))), torch.zeros(3)
    with torch.inference_mode():
        v = torch.zeros(3)
        compiled(k, v)
    with pytest.raises(ReadOnlyInput, match="inference_mode"):
        compiled(k, v)
    assert k.eq(1).all()
    with pytest.raises(ReadOnlyInput, match="overlaps itself"):
        compiled(torch.zeros(20).as_strided((3,), (0,)), torch.zeros(3))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"xs": {0: Dim.AUTO}}, r"names 'xs', which is no input of the call; did you mean 'x'\? Known: b, x"),
        ({"b": {"ids_": {0: Dim.AUTO}}}, r"names 'b.ids_', .* did you mean 'b.ids'"),
        ({"b": {0: Dim.AUTO}}, "names 'b.0'"),
        ({"b": {"pair": {0: Dim.AUTO}}}, "for b.pair is .* give a list, with one for each item"),
        ({"b": {"pair": [None]}}, "has 1 entries for b.pair, which has 2"),
        ({"b": [None]}, "for b is .* give a dict, with one for each key"),
        (({0: Dim.AUTO},), "dynamic_shapes has 1 entries, and the call 2 inputs"),
        ({"x": {0: Dim.AUTO}, "mask": None, "b": {"pair": [None, {}]}}, None),
    ],
)
def test_entries_of_dynamic_shapes_that_name_no_input_are_refused(shapes, message):
    def forward(x, b, mask=None):
        return x + b["ids"] + b["pair"][1]

    call = torch.ones(3), {"ids": torch.ones(1), "pair": [torch.ones(1), torch.ones(1)]}
    if message is None:
        compiled = graft.compile(forward, call, dynamic_shapes=shapes, backend="eager")
        assert compiled(torch.ones(5), call[1]).shape == (5,)
        return
    with pytest.raises(UsageError, match=message):
        graft.compile(forward, call, dynamic_shapes=shapes, backend="eager")


def test_warm_says_what_it_takes():
    compiled = graft.compile(torch.neg, (torch.ones(3),), backend="eager")
    x = torch.ones(3)
    for wrong, name in ((x, "Tensor"), ([x], "call that is a Tensor"), ({"input": x}, "dict"), (None, "NoneType")):
        with pytest.raises(UsageError, match=rf"compiled\.warm\(\[\(x,\)\]\); it was given a {name}"):
            compiled.warm(wrong)
    compiled.warm([(torch.ones(3),), [torch.ones(3)]])


def test_arguments_that_are_left_away_have_their_defaults():
    def program(x, factor=2.0, *, shift=None, power=1):
        return x * factor**power if shift is None else x + shift

    compiled = graft.compile(program, (torch.ones(3), 2.0), {"shift": None, "power": 1})
    for call in (compiled(torch.ones(3)), compiled(x=torch.ones(3)), compiled(torch.ones(3), power=1)):
        torch.testing.assert_close(call, torch.full((3,), 2.0))
    other = graft.compile(program, (torch.ones(3), 3.0))
    with pytest.raises(UsageError, match=r"input factor is 2.0, but 3.0 is fixed"):
        other(torch.ones(3))


class ReadsAndWrites(nn.Module):
    """Reads its input before a write to its buffers, and after; two of these lie in one memory."""

    def __init__(self):
        super().__init__()
        memory = torch.zeros(8)
        for name, buffer in (("left", memory[:4]), ("right", memory[4:]), ("own", torch.zeros(4)), ("kept", memory)):
            self.register_buffer(name, buffer)

    def forward(self, x):
        before = x * 1
        self.left.add_(1)
        self.own.add_(1)
        return before, x * 2, self.kept[5] + 0


@pytest.mark.parametrize("backend", short(["eager", "inductor", "cuda_graph"], "eager", "cuda_graph"))
def test_an_input_in_a_buffer_that_is_written_is_refused(backend):
    """Inductor's code gave `before` from behind the write."""
    module = ReadsAndWrites()
    compiled = graft.compile(module, (torch.zeros(4),), backend=backend)
    for given, name in ((module.left.view(4), "left"), (module.kept[2:6], "left"), (module.own, "own")):
        with pytest.raises(SharedMemoryError, match=f"the buffer {name} is written and shares memory with x"):
            compiled(given)
    assert not module.kept.any() and not module.own.any()
    apart = module.right.clone()
    torch.testing.assert_close(compiled(module.right), (apart, apart * 2, torch.tensor(0.0)))  # nobody writes those
    compiled(torch.zeros(4))
