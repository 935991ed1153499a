"""graft.compile of plain functions: what they close over is state, as the buffers of a module are."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

import graft
from graft.base.errors import CaptureError, ChangedModule, UsageError
from graft.ir.nodes import where
from marks import short

X = torch.arange(6.0).reshape(2, 3)
TABLE = torch.arange(3.0)
CALLS = 0


def scaled(x, *, scale=2.0):
    return {"y": x * scale + TABLE}


def helper(x):
    TABLE.add_(1)
    return x * TABLE


def through_helper(x):
    return helper(x) + 1


def counted(x):
    global CALLS
    CALLS += 1
    return x * CALLS


@pytest.mark.parametrize("backend", short(["eager", "inductor"], "eager"))
def test_a_function_is_compiled_as_a_module_is(backend):
    compiled = graft.compile(scaled, (X,), {"scale": 3.0}, backend=backend)
    assert torch.equal(compiled(X, scale=3.0)["y"], scaled(X, scale=3.0)["y"])
    assert compiled.report.model == "scaled"
    with pytest.raises(UsageError, match="scale"):
        compiled(X, scale=4.0)
    free = graft.compile(scaled, (X,), dynamic_shapes={"x": {0: Dim.DYNAMIC}}, backend=backend)
    assert torch.equal(free(torch.ones(5, 3))["y"], scaled(torch.ones(5, 3))["y"])


@pytest.mark.parametrize("backend", short(["eager", "inductor"], "eager"))
def test_tensors_that_it_closes_over_are_written_in_place(backend):
    cache, twin = torch.zeros(4, 3), torch.zeros(4, 3)

    def step(memory, x, position):
        memory.index_copy_(0, position, x)
        return memory.sum(0)

    closed = lambda x, position: step(cache, x, position)  # noqa: E731
    compiled = graft.compile(closed, (X[:1], torch.tensor([0])), backend=backend)
    assert compiled.aliases[0].input == "cache" and compiled.aliases[0].kind == "kv_cache_update"
    for place in range(4):
        args = (X[:1] + place, torch.tensor([place]))
        assert torch.equal(compiled(*args), step(twin, *args))
        assert torch.equal(cache, twin)
    compiled.reset()
    assert not cache.any() and compiled.cache is cache


def test_tensors_that_a_helper_of_the_same_file_writes():
    before = TABLE.clone()
    compiled = graft.compile(through_helper, (X,))
    assert torch.equal(TABLE, before)  # capturing leaves it as it was
    assert torch.equal(compiled(X), X * (before + 1) + 1)
    assert torch.equal(TABLE, before + 1)
    TABLE.copy_(before)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(()))

    def encode(self, x):
        self.steps.add_(1)
        return self.linear(x) + self.steps


class Callable:
    def __init__(self):
        self.weight = torch.ones(3)

    def __call__(self, x):
        return x * self.weight


def partial_of(model):
    return functools.partial(lambda m, x, bias: m.encode(x) + bias, model, bias=TABLE)


@pytest.mark.parametrize("kind", ["method", "closure", "partial", "no_grad"])
def test_modules_that_it_closes_over(kind):
    torch.manual_seed(0)
    model, twin = Model().eval(), Model().eval()
    twin.load_state_dict(model.state_dict())
    make = {
        "method": lambda m: m.encode,
        "closure": lambda m: lambda x: m.encode(x),
        "partial": partial_of,
        "no_grad": lambda m: torch.no_grad()(lambda x: m.encode(x)),
    }[kind]
    compiled = graft.compile(make(model), (X,))
    for _ in range(2):
        assert torch.equal(compiled(X), make(twin)(X))
        assert torch.equal(model.steps, twin.steps)


def test_other_callables():
    assert torch.equal(graft.compile(Callable(), (X,))(X), X)
    assert torch.equal(graft.compile(torch.relu, (X - 2,))(X - 2), torch.relu(X - 2))
    with pytest.raises(UsageError, match="not a str"):
        graft.compile("relu", (X,))


def test_an_exported_program_is_taken_as_it_is_and_as_a_module():
    program = torch.export.export(nn.Linear(3, 3), (X,))
    assert torch.equal(graft.compile(program, (X,))(X), program.module()(X))
    assert torch.equal(graft.compile(program.module(), (X,))(X), program.module()(X))


def test_variables_that_it_sets_are_refused_and_stay():
    with pytest.raises(CaptureError, match="variable CALLS"):
        graft.compile(counted, (X,))
    assert CALLS == 0
    total = torch.zeros(())

    def running(x):
        nonlocal total
        total = total + x.sum()
        return total

    with pytest.raises(CaptureError, match="variable total"):
        graft.compile(running, (X,))
    assert type(total) is torch.Tensor and total == 0


def test_containers_that_it_fills_are_refused_and_stay():
    seen = []

    def collect(x):
        seen.append(x)
        return x + 1

    with pytest.raises(CaptureError, match="seen"):
        graft.compile(collect, (X,))
    assert seen == []


def test_branches_on_a_size_are_captured_for_functions_too():
    def branch(x):
        return x * 3 if x.shape[0] == 1 else x * 2

    compiled = graft.compile(branch, (X,), dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    for size in (2, 1, 5):
        assert torch.equal(compiled(torch.ones(size, 3)), branch(torch.ones(size, 3)))
    assert len(compiled.variants) == 2


def test_a_compiled_function_is_saved_and_loaded(tmp_path):
    cache = torch.zeros(2, 3)
    compiled = graft.compile(lambda x: cache.add_(x).sum(), (X,))
    compiled(X)
    compiled.save(tmp_path / "f")
    loaded = graft.load(tmp_path / "f")
    assert torch.equal(loaded(X), compiled(X))


def test_nodes_stand_in_the_line_of_the_function():
    """Not in that of graft's own `forward`, which calls it."""
    graph = graft.compile(scaled, (X,)).graph_module.graph
    told = [where(node) for node in graph.nodes if node.op == "call_function"]
    assert told and all("(test_functions.py:" in text for text in told), told


def test_operators_of_torch_that_it_closes_over_are_not_its_own_code():
    """flex_attention notes in a variable of its file that it has warned."""
    from torch.nn.attention.flex_attention import flex_attention

    def program(q):
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 0.5)

    q = torch.randn(1, 2, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(graft.compile(program, (q,))(q), program(q))


class Called:
    """An object that can be called, with a number and a tensor of its own."""

    def __init__(self):
        self.scale, self.weight = 2.0, torch.ones(3)

    def __call__(self, x):
        return x * self.scale + self.weight

    def run(self, x):
        return self(x)


@pytest.mark.parametrize("way", ["object", "method"])
@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("weight", torch.zeros(3))])
def test_what_an_object_holds_is_refused_when_it_changes(way, name, value):
    called, x = Called(), torch.ones(3)
    program = called if way == "object" else called.run
    compiled = graft.compile(program, (x,))
    called.weight.add_(1)  # written: followed
    assert torch.equal(compiled(x), program(x))
    setattr(called, name, value)
    with pytest.raises(ChangedModule, match=f"attribute self.{name} was"):
        compiled(x)


def test_a_function_that_keeps_its_results_is_told():
    @functools.lru_cache
    def table(size):
        return torch.ones(size)

    told = graft.compile(lambda x: x + table(3), (torch.ones(3),)).report.notes
    assert "asked: table keeps what it gave (functools.lru_cache); the graph computes it anew at each call" in told
