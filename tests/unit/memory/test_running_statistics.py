"""Normalization in training mode writes its running statistics, though the schemas of the ops do not say so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graft
from graft.ir.effects import UNDECLARED_WRITES, effects, is_mutating, mutated_args
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from marks import short
from state_cases import whole

aten = torch.ops.aten
X = [whole(4, 6, 5, seed=step) for step in range(3)]
WRITTEN = {"norm.running_mean", "norm.running_var"}
KINDS = {
    "batch": (nn.BatchNorm1d, aten.batch_norm.default),
    "instance": (
        lambda size: nn.InstanceNorm1d(size, affine=True, track_running_stats=True),
        aten.instance_norm.default,
    ),
}


class ReadsTwice(nn.Module):
    """The same expression of the running mean before the write and after it."""

    def __init__(self, kind):
        super().__init__()
        self.norm = KINDS[kind][0](6)

    def forward(self, x):
        before = self.norm.running_mean + 1
        y = self.norm(x)
        return y, before, self.norm.running_mean + 1


def state_of(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("backend", short(["eager", "inductor", "cuda_graph"], "eager", "cuda_graph"))
@pytest.mark.parametrize("kind", KINDS)
def test_training_mode_writes_as_eager_does(kind, backend):
    module = ReadsTwice(kind).train()
    eager, start = copy.deepcopy(module), state_of(module)
    compiled = graft.compile(module, (X[0],), backend=backend)
    torch.testing.assert_close(state_of(module), start, rtol=0, atol=0)
    for x in X:
        with torch.no_grad():
            expected = eager(x)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(state_of(module), state_of(eager))
    assert not torch.equal(module.norm.running_mean, start["norm.running_mean"])
    kinds = {alias.input: alias.kind for alias in compiled.aliases}
    assert {name: kinds.get(name) for name in WRITTEN} == dict.fromkeys(WRITTEN, "user")
    compiled.reset()
    torch.testing.assert_close(state_of(module), start, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_mode_writes_nothing(kind):
    module = ReadsTwice(kind).eval()
    start = state_of(module)
    compiled = graft.compile(module, (X[0],), backend="eager")
    _, before, after = compiled(X[0])
    assert torch.equal(before, after) and not compiled.aliases
    torch.testing.assert_close(state_of(module), start, rtol=0, atol=0)
    (call,) = (node for node in calls(compiled.graph_module.graph) if is_op(node, KINDS[kind][1]))
    assert not is_mutating(call) and not mutated_args(call)


def test_a_result_that_nobody_reads_leaves_the_write():
    class Observes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            self.norm(x)
            return x + 1

    graph = export_graph(Observes().train(), (X[0],)).graph
    (call,) = (node for node in calls(graph) if is_op(node, aten.batch_norm.default))
    assert {str(argument.target) for argument in mutated_args(call)} == WRITTEN
    graph = export_graph(Observes().eval(), (X[0],)).graph
    assert not [node for node in calls(graph) if is_op(node, aten.batch_norm.default)]


def test_without_statistics_nothing_is_written():
    graph = export_graph(nn.BatchNorm1d(6, track_running_stats=False).train(), (X[0],)).graph
    (call,) = (node for node in calls(graph) if is_op(node, aten.batch_norm.default))
    assert not is_mutating(call) and not mutated_args(call)


@pytest.mark.parametrize("name", UNDECLARED_WRITES)
def test_the_table_names_arguments_that_the_ops_have_and_do_not_declare(name):
    packet = getattr(aten, name.removeprefix("aten::"))
    arguments, flag = UNDECLARED_WRITES[name]
    for overload in packet.overloads():
        op = getattr(packet, overload)
        found = effects(op)
        assert tuple(place.name for place in found.undeclared) == arguments
        assert (found.flag.name if found.flag else None) == flag
        declared = {a.name for a in op._schema.arguments if a.alias_info is not None}
        assert not declared & set(arguments)
