"""Backend cuda_graph on a CPU: keys, staging, snapshots and results are the code of the GPU, replays direct calls."""

from __future__ import annotations

import copy
from operator import getitem

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

import graft
from cuda_graph_cases import CASES, Attend, OwnCaches, at, caches, compiled_attend, seeded, token
from graft.backends import lower
from graft.backends.buffers import elements_are_apart, row_of
from graft.backends.capturable import capture_device
from graft.backends.keys import Arguments, ModuleTensors
from graft.base.errors import CaptureRefused, UsageError
from graft.ir.trace import export_graph

aten = torch.ops.aten


@pytest.mark.some(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_replays_equal_eager(case):
    case("cpu")


def test_the_report_says_what_is_bound_and_that_nothing_is_captured():
    _, compiled = compiled_attend("cpu", reuse_outputs=True)
    assert compiled.backend == "cuda_graph"
    bound, reused, direct = compiled.report.notes[-3:]
    assert bound == "cuda_graph: written in place, bound by address: input k, input v"
    assert "next replay overwrites" in reused and "nothing is captured" in direct


def test_reuse_outputs_is_for_cuda_graphs_alone():
    with pytest.raises(UsageError, match="reuse_outputs is for backend='cuda_graph'"):
        graft.compile(nn.Linear(2, 2), (torch.randn(1, 2),), reuse_outputs=True)


@torch.no_grad()
def test_a_failed_capture_leaves_the_state_as_it_was():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, cache, pos, x):
            self.steps.add_(1)
            cache.mul_(2)
            return cache.index_copy_(0, pos, x).sum()

    cache, x = torch.ones(4, 2), torch.ones(1, 2)
    compiled = graft.compile(Fails(), (cache.clone(), at(0, "cpu"), x), backend="cuda_graph")
    with pytest.raises(IndexError):
        compiled.variants[0].call(cache, at(7, "cpu"), x)  # past the checks, which would refuse it
    assert torch.equal(cache, torch.ones(4, 2)) and compiled.graph_module.steps == 0
    assert compiled.replays.count == compiled.replays.alive == 0
    assert compiled(cache, at(1, "cpu"), x) == 14 and compiled.graph_module.steps == 1


class Shares(nn.Module):
    """Reads x after it has written the cache."""

    def forward(self, cache, x):
        cache.add_(1)
        return x * 2


@torch.no_grad()
def test_an_input_in_memory_that_the_graph_writes_is_not_staged():
    lowered = lower(export_graph(Shares(), (torch.zeros(4), torch.zeros(2))), "cuda_graph")
    cache, other = torch.zeros(4), torch.zeros(4)
    for _ in range(3):
        assert torch.equal(lowered.call(cache, cache[1:3]), Shares()(other, other[1:3]))
        assert torch.equal(cache, other)
    assert lowered.call.replays.staged_bytes == 0
    lowered.call(cache, torch.zeros(2))
    assert lowered.call.replays.staged_bytes == 8
    assert lowered.call.replays.events[-1] == "capture 2: input x: no longer shares memory that the graph writes"


@torch.no_grad()
def test_a_tensor_of_another_device_is_refused_before_anything_is_written():
    lowered = lower(export_graph(Shares(), (torch.zeros(4), torch.zeros(2))), "cuda_graph")
    cache = torch.zeros(4)
    with pytest.raises(CaptureRefused, match="input x is on meta, the graph is captured on cpu"):
        lowered.call(cache, torch.zeros(2, device="meta"))
    assert torch.equal(cache, torch.zeros(4))


def masked_row(x):
    y = x.clone()
    y[x[:, 0] > 0] = x[0]
    return y


@pytest.mark.parametrize(
    ("function", "node"),
    [
        (lambda x: x * x.sum().item(), "item"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select"),
        (lambda x: x.repeat_interleave(x[:, 0].long().abs(), 0), "repeat_interleave"),
        (masked_row, "index_put_"),
        (lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), "cond"),
    ],
)
def test_what_a_replay_cannot_do_is_refused_with_node_and_line(function, node):
    class Calls(nn.Module):
        def forward(self, x):
            return function(x)

    with pytest.raises(CaptureRefused, match=rf"%{node} .*use backend='eager'"):
        graft.compile(Calls(), (torch.randn(4, 3),), backend="cuda_graph")


def test_the_line_of_a_refusal_is_the_user_s():
    class Item(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    line = Item.forward.__code__.co_firstlineno + 1
    with pytest.raises(CaptureRefused, match=rf"test_replay.py:{line}"):
        graft.compile(Item(), (torch.randn(3),), backend="cuda_graph")


@torch.no_grad()
def test_filling_where_a_mask_is_set_asks_for_nothing():
    class Fill(nn.Module):
        def forward(self, x):
            x[x > 0] = 0.0
            return x.sum()

    compiled, x = graft.compile(Fill(), (torch.randn(4, 3),), backend="cuda_graph"), torch.randn(4, 3)
    expected = x.clamp(max=0)
    assert compiled(x) == expected.sum() and torch.equal(x, expected)


@torch.no_grad()
def test_inference_mode_and_no_grad_share_captures():
    _, compiled = compiled_attend("cpu")
    k, v = caches("cpu")
    with torch.inference_mode():
        compiled(token(0, "cpu"), k, v, at(0, "cpu"))
    compiled(token(1, "cpu"), k, v, at(1, "cpu"))
    assert compiled.replays.count == 1


def test_captures_are_not_copied():
    _, compiled = compiled_attend("cpu")
    with pytest.raises(UsageError, match="compile the module again"):
        copy.deepcopy(compiled.replays)


def test_constants_in_host_memory_are_part_of_the_key_by_value():
    """A graph on a GPU reads them while it is captured; the device alone is compared here."""
    module = nn.Module()
    module.scale = torch.tensor(2.0)
    state = ModuleTensors(module, ["scale"], torch.device("cuda", 0))
    arguments = Arguments((), state, frozenset(), torch.device("cuda", 0))
    first = arguments.key(state.read())
    assert arguments.key(state.read()) == first
    module.scale.fill_(3)
    second = arguments.key(state.read())
    assert first != second and arguments.changes(first, second) == "state scale: new value 3.0, was 2.0"
    module.scale = torch.tensor(2.0)
    assert arguments.key(state.read()) == first


def test_host_memory_in_a_graph_of_a_gpu_is_refused():
    """CapturedRun values are enough to see it: the tensors are fake."""
    graph = Graph()
    with FakeTensorMode():
        x, scale, rows = torch.empty(4, device="cuda"), torch.empty(()), torch.empty(4)
    nodes = [graph.placeholder("x"), graph.get_attr("scale")]
    nodes.append(graph.call_function(aten.mul.Tensor, tuple(nodes)))
    for node, value in zip(nodes, (x, scale, x), strict=True):
        node.meta["val"] = value
    assert capture_device(graph) == torch.device("cuda", 0)  # a constant number is part of the launch
    moved = graph.call_function(aten._to_copy.default, (nodes[1],), {"device": torch.device("cuda")})
    moved.meta["val"] = x
    with pytest.raises(CaptureRefused, match=r"%_to_copy.* copies %scale from CPU memory"):
        capture_device(graph)
    graph.erase_node(moved)
    fetched = graph.call_function(aten._to_copy.default, (nodes[2],), {"device": torch.device("cpu")})
    fetched.meta["val"] = rows
    with pytest.raises(CaptureRefused, match=r"%_to_copy.* moves values to CPU memory"):
        capture_device(graph)
    graph.erase_node(fetched)
    nodes[1].meta["val"] = rows
    with pytest.raises(CaptureRefused, match="%scale lies in CPU memory"):
        capture_device(graph)
    nodes[1].meta["val"] = scale
    with graph.inserting_after(nodes[0]):
        graph.placeholder("position").meta["val"] = scale
    with pytest.raises(CaptureRefused, match="%position is a CPU tensor"):
        capture_device(graph)


@pytest.mark.parametrize("place", range(3))
def test_the_state_of_random_numbers_is_not_captured(place):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(aten._flash_attention_forward.default, (x, x, x, None, None, 4, 4, 0.0, False, False))
    results = [graph.call_function(getitem, (call, index)) for index in range(3)]
    graph.output(results[place])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    if place < 2:
        capture_device(graph)
        return
    with pytest.raises(CaptureRefused, match=r"%_flash_attention_forward.* gives the state of its random numbers"):
        capture_device(graph)


def test_nested_and_moved_state_is_found():
    module = nn.Sequential(nn.Linear(2, 2))
    state = ModuleTensors(module, ["0.weight", "0.bias"], torch.device("cpu"))
    arguments = Arguments((), state, frozenset(), torch.device("cpu"))
    first = arguments.key(state.read())
    module[0].weight.data = module[0].weight.data.clone()  # the same parameter at another address
    assert arguments.changes(first, arguments.key(state.read())) == "state 0.weight: buffer was replaced"
    moved = arguments.key(state.read())
    module[0] = nn.Linear(2, 2)
    assert arguments.changes(moved, arguments.key(state.read())).count("buffer was replaced") == 2
    del module[0].bias
    with pytest.raises(UsageError, match=r"state 0.bias is not in the module any more"):
        state.read()


@pytest.mark.parametrize(
    ("tensor", "apart", "reach"),
    [
        (torch.zeros(3, 4), True, 12),
        (torch.zeros(3, 4).t(), True, 12),
        (torch.zeros(3, 4)[:, ::2], True, 11),
        (torch.zeros(3, 1).expand(3, 5), False, 3),
        (torch.zeros(8).unfold(0, 4, 2), False, 8),
        (torch.zeros(2, 0), True, 0),
        (torch.zeros(()), True, 1),
    ],
)
def test_layouts(tensor, apart, reach):
    assert elements_are_apart(tensor) is apart and row_of(tensor).shape == (reach,)


@torch.no_grad()
def test_buffers_of_a_model_keep_their_addresses():
    module = seeded(OwnCaches, "cpu")
    compiled = graft.compile(module, (token(0, "cpu"),), backend="cuda_graph")
    compiled(token(0, "cpu"))
    assert isinstance(module, Attend) and compiled.graph_module.k.data_ptr() == module.k.data_ptr()
    assert compiled.replays.staged_bytes == 2 * 8 * 4
