"""The alias map: decided at compile time, with the reason for every cache that is not in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graft
from graft.ir.trace import export_graph
from graft.memory.alias_map import Alias, state_records
from graft.passes.report import Report


class State(nn.Module):
    """One of everything: caches of the caller and of the module, a counter, a rolling window, a functional update."""

    def __init__(self, length=16):
        super().__init__()
        self.register_buffer("cache_v", torch.zeros(1, 2, length, 4))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("window", torch.zeros(1, 2, 4, 4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, cache_k, moved, x):
        cache_k[:, :, self.steps] = x
        self.cache_v = self.cache_v.index_copy(2, self.steps, x)
        moved.copy_(torch.slice_scatter(moved, x, 2, 3, 4))
        self.window.copy_(torch.cat([self.window[:, :, 1:], x], 2))
        self.steps += 1
        return (cache_k.sum() + self.cache_v.sum() + moved.sum() + self.window.sum()) * self.table


def inputs(length=16):
    return torch.zeros(1, 2, length, 4), torch.zeros(1, 2, length, 4), torch.ones(1, 2, 1, 4)


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["eager", "inductor", "cuda_graph"])
def test_every_written_input_and_buffer_has_its_kind(backend):
    compiled = graft.compile(State(), inputs(), backend=backend)
    assert {alias.input: alias.kind for alias in compiled.aliases} == {
        "cache_k": "kv_cache_update",
        "cache_v": "kv_cache_update",
        "moved": "kv_cache_update",
        "window": "user",
        "steps": "user",
    }
    nodes = {node.name for node in compiled.graph_module.graph.nodes}
    assert {alias.output for alias in compiled.aliases} <= nodes
    owners = {record.input: record.owner for record in compiled.report.state}
    assert owners["cache_k"] == owners["moved"] == "caller" and owners["cache_v"] == owners["steps"] == "module"
    how = {record.input: record.how for record in compiled.report.state}
    assert how == dict.fromkeys(how, "in place") | {"window": "copied back"}
    assert Report.from_json(compiled.report.to_json()) == compiled.report
    before = compiled.aliases
    k, moved, x = inputs()
    for step in range(3):
        compiled(k, moved, x)
        assert compiled.steps == step + 1 and k[:, :, step].all()
    assert compiled.aliases == before  # decided when it was compiled


def test_a_cache_that_is_not_aliased_is_in_the_report_with_the_reason():
    class Old(nn.Module):
        """Needs the old value after the update: a copy there must be."""

        def forward(self, cache, x):
            new = cache.index_copy(1, torch.tensor([2]), x)
            old = cache.sum()
            cache.copy_(new)
            return new.sum() - old + (cache * 2).sum()

    class Returned(nn.Module):
        def forward(self, cache, x):
            new = cache.index_copy(1, torch.tensor([2]), x)
            cache.copy_(new)
            return new

    for module, reason in ((Returned(), "returned"), (Old(), r"the old value of %cache is read by %sum")):
        got, expected = torch.ones(2, 4), torch.ones(2, 4)
        compiled = graft.compile(module, (got, torch.ones(2, 1)))
        (record,) = compiled.report.state
        assert record.how == "copied back" and reason in record.reason
        assert compiled.aliases == ()
        results = []
        for value in (1.0, 2.0):
            x = torch.full((2, 1), value)
            results.append((compiled(got, x), module(expected, x)))
            assert torch.equal(got, expected)
        assert all(torch.equal(*pair) for pair in results)  # the second call leaves the first result alone


def test_a_functional_module_has_no_aliases():
    class Functional(nn.Module):
        def forward(self, cache, x):
            copied = cache.clone()
            copied.index_copy_(1, torch.tensor([1]), x)
            return cache.index_copy(1, torch.tensor([2]), x), copied

    cache, x = torch.zeros(2, 4), torch.ones(2, 1)
    compiled = graft.compile(Functional(), (cache, x))
    assert compiled.aliases == () and compiled.report.state == ()
    compiled(cache, x)
    assert not cache.any()


def test_a_write_of_all_and_a_write_at_a_place_are_a_user_s():
    class Both(nn.Module):
        def forward(self, cache, x):
            cache.mul_(2)
            cache[:, 1:2] = x
            return cache.sum()

    gm = export_graph(Both(), (torch.ones(2, 4), torch.ones(2, 1)))
    aliases, records = state_records(gm, {}, {})
    assert [(alias.input, alias.kind) for alias in aliases] == [("cache", "user")]
    assert isinstance(aliases[0], Alias) and len(records[0].writes) == 2


class LargeResults(TorchDispatchMode):
    """Every op that makes, or writes, as many bytes as a cache has."""

    def __init__(self, size):
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        fresh = not func._schema.is_mutable or func is torch.ops.aten.copy_.default
        views = any(item.alias_info is not None for item in func._schema.returns)
        large = isinstance(result, torch.Tensor) and result.nbytes >= self.size
        if large and fresh and (func is torch.ops.aten.copy_.default or not views):
            self.found.append(str(func))
        return result


class Decode(nn.Module):
    """Caches of all three kinds, none of which is read as a whole."""

    def __init__(self, length):
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 2, length, 4))

    def forward(self, cache, moved, x, position):
        cache.index_copy_(2, position, x)
        moved.copy_(torch.ops.aten.index_put(moved, [None, None, position], x))
        self.cache = torch.index_copy(self.cache, 2, position, x)
        return cache[:, :, :4].sum() + moved[:, :, :4].sum() + self.cache[:, :, :4].sum()


@pytest.mark.parametrize("aliased", [True, False])
def test_no_byte_of_an_aliased_cache_is_copied(aliased):
    length = 4096
    off = {"transforms": {"update_state_in_place": {"enabled": False}}}
    cache, moved, x = inputs(length)
    args = cache, moved, x, torch.tensor([5])
    compiled = graft.compile(Decode(length), args, config=None if aliased else off)
    with LargeResults(cache.nbytes) as large:
        compiled(*args)
    assert (large.found == []) is aliased  # without the transform, the counter sees the copies
    assert cache[:, :, 5].all() and moved[:, :, 5].all() and compiled.cache[:, :, 5].all()


@pytest.mark.exhaustive
def test_compiled_kernels_allocate_no_cache():
    length = 4096
    cache, moved, x = inputs(length)
    args = cache, moved, x, torch.tensor([5])
    compiled = graft.compile(Decode(length), args, backend="inductor")
    compiled(*args)
    for memory, module in ((True, compiled), (False, Functional())):
        with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
            module(*args)
        taken = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
        assert (taken < cache.nbytes) is memory  # a functional step allocates its caches anew
    assert cache[:, :, 5].all()


class Functional(nn.Module):
    def forward(self, cache, moved, x, position):
        return cache.index_copy(2, position, x), moved.index_copy(2, position, x)
