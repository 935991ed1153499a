"""Written buffers as inputs, and back as module state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import LiftError, UsageError
from graft.ir.io.serial import graph_from_json, graph_to_json
from graft.ir.io.text import graph_text
from graft.ir.trace import export_graph


class Cache(nn.Module):
    """Adds to its buffer and returns what it holds."""

    def __init__(self, buffer, persistent=True):
        super().__init__()
        self.register_buffer("cache", buffer, persistent=persistent)

    def forward(self, x):
        self.cache.add_(x)
        return self.cache * 2


class Nested(nn.Module):
    """Two submodules on one buffer, one with its own that is not saved, a weight, a buffer that is only read."""

    def __init__(self):
        super().__init__()
        shared = torch.zeros(3)
        self.a, self.b, self.c = Cache(shared), Cache(shared), Cache(torch.ones(3), persistent=False)
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x, *, scale=None, nested):
        y = self.a(x * self.weight) + self.b(x) + self.c(x) + self.table
        return {"y": y * scale, "z": (y + nested["p"][0], nested["p"][1])}


def run(module, calls):
    return [module(*args, **kwargs) for args, kwargs in calls]


def nested_calls(count=3):
    return [((torch.randn(3),), {"scale": torch.tensor(i + 1.0), "nested": {"p": (torch.ones(3), torch.ones(2))}})
            for i in range(count)]  # fmt: skip


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.named_buffers(remove_duplicate=False)}


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_threaded_buffers_see_the_eager_effect():
    module, eager = Nested(), Nested()
    eager.load_state_dict(module.state_dict())
    calls = nested_calls()
    lifted = graft.lift_buffers(module, *calls[0])
    assert [(b.input, b.buffer, b.names, b.persistent) for b in lifted.bindings] == [
        ("buf_b_cache", "b.cache", ("a.cache", "b.cache"), True),
        ("buf_c_cache", "c.cache", ("c.cache",), False),
    ]
    assert lifted.bindings[0].tensor is module.a.cache
    own = {b.input: b.tensor.clone() for b in lifted.bindings}
    kept = state_of(module)
    for (args, kwargs), expected in zip(calls, run(eager, calls), strict=True):
        assert_same(lifted.graph_module(*args, **kwargs, **own), expected)
    assert_same(own["buf_b_cache"], eager.a.cache)
    assert_same(own["buf_c_cache"], eager.c.cache)
    assert_same(state_of(module), kept)  # the module's own tensors were not handed in
    assert dict(lifted.graph_module.named_buffers()).keys() == {"table"}
    assert lifted.graph_module.weight is module.weight


def test_lift_then_inline_is_the_identity():
    module, eager = Nested(), Nested()
    eager.load_state_dict(module.state_dict())
    calls = nested_calls()
    captured = export_graph(module, *calls[0])
    lifted = graft.lift_buffers(captured)
    again = graft.inline_buffers(lifted.graph_module, lifted.bindings)
    assert graph_text(again.graph) == graph_text(captured.graph)
    assert again.code == captured.code
    assert again.state_dict().keys() == captured.state_dict().keys()
    assert_same(run(again, calls), run(eager, calls))
    assert_same(again.b.cache, eager.b.cache)
    assert again.b.cache is module.b.cache


GOLDEN = """\
%weight = self.weight : f32[3]
%table = self.table : f32[3]
%x = input : f32[3]
%scale = input : f32[]
%nested_p_0 = input : f32[3]
%nested_p_1 = input : f32[2]
%buf_b_cache = input : f32[3]
%buf_c_cache = input : f32[3]
%mul = aten.mul.Tensor(%x, %weight) : f32[3]
%add_ = aten.add_.Tensor(%buf_b_cache, %mul) : f32[3]
%mul_1 = aten.mul.Tensor(%add_, 2) : f32[3]
"""


def test_the_lifted_graph_as_text():
    args, kwargs = nested_calls(1)[0]
    lifted = graft.lift_buffers(Nested(), args, kwargs)
    assert graph_text(lifted.graph_module.graph, origin=False).startswith(GOLDEN)
    arguments = "self, x, scale, nested, buf_b_cache, buf_c_cache"
    assert f"def forward({arguments})" in lifted.graph_module.code


def test_tied_names_come_back_to_one_tensor_and_flags_stay():
    args, kwargs = nested_calls(1)[0]
    module = Nested()
    lifted = graft.lift_buffers(module, args, kwargs)
    again = graft.inline_buffers(lifted.graph_module, lifted.bindings)
    assert again.a.cache is again.b.cache is module.a.cache
    assert {"a.cache", "b.cache", "table", "weight"} == again.state_dict().keys()  # c.cache is not persistent
    assert again.c.cache is module.c.cache


@pytest.mark.parametrize("decomposed", [False, True])
def test_an_exported_program(decomposed):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Cache(torch.zeros(2, 3))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

        def forward(self, x):
            self.steps.add_(1)
            return self.inner(x) * self.steps, self.inner.cache

    module, eager = Steps(), Steps()
    x = torch.randn(2, 3)
    program = torch.export.export(module, (x,))
    if decomposed:
        program = program.run_decompositions()
        assert set(program.graph_signature.buffers_to_mutate.values()) == {"steps", "inner.cache"}
    lifted = graft.lift_buffers(program)
    assert {(b.buffer, b.persistent) for b in lifted.bindings} == {("steps", False), ("inner.cache", True)}
    own = {b.input: torch.zeros_like(b.tensor) for b in lifted.bindings}
    for _ in range(3):
        expected = eager(x)
        got = lifted.graph_module(x, **own)
        assert_same(tuple(got), tuple(expected))
    assert own["buf_steps"].item() == 3
    assert_same(own["buf_inner_cache"], eager.inner.cache)
    again = graft.inline_buffers(lifted.graph_module, lifted.bindings)
    again(x)
    assert again.steps.item() == 1 and again.steps is lifted.buffers["buf_steps"]


def test_nothing_written_nothing_lifted():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(3))

        def forward(self, x):
            return x + self.table.index_copy(0, torch.tensor([1]), x[:1])

    captured = export_graph(Reads(), (torch.randn(3),))
    lifted = graft.lift_buffers(captured)
    assert lifted.bindings == ()
    assert graph_text(lifted.graph_module.graph) == graph_text(captured.graph)
    assert lifted.graph_module.code == captured.code
    inlined = graft.inline_buffers(lifted.graph_module, ())
    assert graph_text(inlined.graph) == graph_text(captured.graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("returned", ["only", "first", "view", "none"])
def test_a_written_buffer_may_be_returned(dtype, returned):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(2, 4, dtype=dtype))

        def forward(self, x, at):
            self.kv.index_copy_(1, at, x)
            if returned == "none":
                return ()
            return {"only": self.kv, "first": (self.kv, x + 1), "view": (x + 1, self.kv[:, 1:])}[returned]

    module, eager = Returns(), Returns()
    example = (torch.ones(2, 1, dtype=dtype), torch.tensor([0]))
    lifted = graft.lift_buffers(module, example)
    kv = torch.zeros(2, 4, dtype=dtype)
    for step in range(4):
        args = (torch.full((2, 1), step + 1, dtype=dtype), torch.tensor([step]))
        assert_same(lifted.graph_module(*args, buf_kv=kv), eager(*args))
        assert_same(kv, eager.kv)
    if returned == "only":
        assert lifted.graph_module(*example, buf_kv=kv).data_ptr() == kv.data_ptr()
    assert module.kv.count_nonzero() == 0


def test_a_result_of_inlining_exports_saves_and_keeps_its_state(tmp_path):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Cache(torch.zeros(3)), Cache(torch.zeros(3), persistent=False)])

        def forward(self, x, *, k):
            return self.layers[1](self.layers[0](x)) + k

    x, k = torch.randn(3), torch.randn(3)
    lifted = graft.lift_buffers(Deep(), (x,), {"k": k})
    again = graft.inline_buffers(lifted.graph_module, lifted.bindings)
    program = torch.export.export(again, (x,), {"k": k})
    torch.export.save(program, tmp_path / "deep.pt2")
    loaded = torch.export.load(tmp_path / "deep.pt2").module()
    eager = Deep()
    for _ in range(3):
        assert_same(loaded(x, k=k), eager(x, k=k))
    buffers = dict(loaded.named_buffers())
    assert_same(buffers["layers.0.cache"], eager.layers[0].cache)
    assert_same(buffers["layers.1.cache"], eager.layers[1].cache)


def test_dynamic_sizes_stay_dynamic():
    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            self.seen.copy_(torch.cat([self.seen, x])[-4:])
            return x.sum() + self.seen

    dynamic = {"x": {0: torch.export.Dim("n", min=2, max=64)}}
    lifted = graft.lift_buffers(Window(), (torch.randn(5),), dynamic_shapes=dynamic)
    eager, seen = Window(), torch.zeros(4)
    for size in (5, 2, 9):
        x = torch.randn(size)
        assert_same(lifted.graph_module(x, seen), eager(x))  # by position, after the user's inputs, works too
        assert_same(seen, eager.seen)


def test_plain_graphs_without_nesting():
    captured = export_graph(Cache(torch.zeros(3)), (torch.ones(3),))
    plain = graph_from_json(graph_to_json(captured), dict(captured.named_buffers()))  # a dump keeps no nesting
    lifted = graft.lift_buffers(plain)
    assert [b.buffer for b in lifted.bindings] == ["cache"]
    own = torch.zeros(3)
    assert_same(lifted.graph_module(torch.ones(3), own)[0], torch.full((3,), 2.0))
    assert_same(own, torch.ones(3))
    inlined = graft.inline_buffers(lifted.graph_module, lifted.bindings)
    assert graph_text(inlined.graph) == graph_text(plain.graph)


def test_an_input_of_the_same_name_is_not_shadowed():
    class Shadow(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("x", torch.zeros(3))

        def forward(self, buf_x):
            self.x.add_(buf_x)
            return self.x + 1

    lifted = graft.lift_buffers(Shadow(), (torch.ones(3),))
    assert [b.input for b in lifted.bindings] == ["buf_x_2"]
    own = torch.zeros(3)
    assert_same(lifted.graph_module(torch.ones(3), buf_x_2=own), torch.full((3,), 2.0))


def test_a_written_parameter_is_refused_with_its_line():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x):
            self.w.add_(x)
            return self.w * x

    with pytest.raises(LiftError, match=r"%add_ \(test_lifting\.py:\d+\) writes to the parameter w"):
        graft.lift_buffers(Writes(), (torch.ones(3),))


def overlapping(left, right):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.zeros(6)
            self.register_buffer("left", memory[left])
            self.register_buffer("right", memory[right])

        def forward(self, x):
            self.left.add_(x)
            return self.right + x

    return Two()


def test_buffers_that_overlap_are_refused_and_neighbours_are_not():
    with pytest.raises(LiftError, match=r"left \(3,\) and right \(3,\) overlap"):
        graft.lift_buffers(overlapping(slice(0, 3), slice(1, 4)), (torch.ones(3),))
    lifted = graft.lift_buffers(overlapping(slice(0, 3), slice(3, 6)), (torch.ones(3),))
    assert [b.buffer for b in lifted.bindings] == ["left"]
    tied = graft.lift_buffers(overlapping(slice(0, 3), slice(0, 3)), (torch.ones(3),))
    assert [b.names for b in tied.bindings] == [("left", "right")]
    own = torch.zeros(3)
    assert_same(tied.graph_module(torch.ones(3), **{tied.bindings[0].input: own}), torch.full((3,), 2.0))


def test_what_cannot_be_lifted_or_inlined_says_so():
    module, x = Cache(torch.zeros(3)), torch.ones(3)
    with pytest.raises(UsageError, match=r"Cache must be captured first: lift_buffers\(module, args\)"):
        graft.lift_buffers(module)
    with pytest.raises(UsageError, match="captured already"):
        graft.lift_buffers(torch.export.export(module, (x,)), (x,))
    lifted = graft.lift_buffers(module, (x,))
    again = graft.inline_buffers(lifted.graph_module, lifted.bindings)
    with pytest.raises(LiftError, match="no input buf_cache for the buffer cache"):
        graft.inline_buffers(again, lifted.bindings)
    other = graft.lift_buffers(Cache(torch.zeros(3)), (x,))
    other.graph_module.register_buffer("cache", torch.zeros(3))
    with pytest.raises(LiftError, match="another cache already"):
        graft.inline_buffers(other.graph_module, other.bindings)
