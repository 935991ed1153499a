"""Which accesses to one memory must keep their order, and that no rewrite breaks it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graft.base.errors import TransformError
from graft.ir.edit import Editor
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op, output_node
from graft.ir.trace import export_graph
from graft.memory.hazards import check_order, hazards
from graft.passes.base import BaseTransform, Outcome, Stage, TransformConfig
from graft.passes.config import PipelineConfig
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.passes.report import MatchRecord

aten = torch.ops.aten
load_all()


class Program(nn.Module):
    def __init__(self, function):
        super().__init__()
        memory = torch.zeros(4, 6)
        self.function = function
        self.register_buffer("state", memory)
        self.register_buffer("tied", memory[1])
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x, pos):
        return self.function(self, x, pos)


def graph_of(function):
    return export_graph(Program(function), (torch.ones(4, 6), torch.tensor([1])))


def pairs(function):
    return [(h.first.name, h.second.name, h.kind) for h in hazards(graph_of(function).graph)]


def test_reads_and_writes_of_one_memory():
    def function(self, x, pos):
        before = x.sum()
        x.index_copy_(0, pos, x[:1] * 2)
        after = x.mean()
        x.add_(1)
        return before + after

    assert pairs(function) == [
        ("sum_1", "index_copy_", "write after read"),
        ("mul", "index_copy_", "write after read"),
        ("index_copy_", "mean", "read after write"),
        ("index_copy_", "add_", "write after write"),
        ("mean", "add_", "write after read"),
        ("add_", "output", "read after write"),
    ]


def test_functional_graphs_have_none():
    assert pairs(lambda s, x, p: x.index_copy(0, p, x[:1]) + s.state) == []


def test_parts_that_are_apart_are_free_and_overlapping_ones_are_not():
    def function(self, x, pos):
        x[0].zero_()
        x[1:3].add_(1)
        return x[0].sum() + x[2:].sum()

    found = pairs(function)
    assert ("zero_", "sum_1", "read after write") in found and ("add_", "sum_2", "read after write") in found
    assert ("zero_", "add_", "write after write") not in found and ("zero_", "sum_2", "read after write") not in found


def test_attributes_in_one_memory_and_lists_of_tensors():
    def function(self, x, pos):
        torch._foreach_add_([self.state, x], 1)
        return self.tied.sum() + x.sum()

    found = pairs(function)
    assert ("_foreach_add_", "sum_1", "read after write") in found
    assert ("_foreach_add_", "sum_2", "read after write") in found


def test_an_order_that_does_not_hold_is_named():
    gm = graph_of(lambda s, x, p: (x.sum(), x.add_(1), x.mean())[2])
    assert check_order(gm.graph, lambda first, second: first < second) == []
    (late,) = check_order(gm.graph, lambda first, second: second.op == "output")
    assert late.text().startswith("%mean") and "must stay after %add_" in late.text() and ".py:" in late.text()


def test_cost_is_linear_in_the_number_of_reads():
    def function(self, x, pos):
        total = x.sum()
        for step in range(60):
            x.index_copy_(0, pos, x[:1] + step)
            total = total + x.sum()
        return total

    assert len(pairs(function)) <= 60 * 5  # not 60 * 60


# ── rewrites that would change what somebody sees ───────────────────────────────────────────────────────────────


def program(self, x, pos):
    held = x * 2
    before = self.state.sum()
    self.state.index_copy_(0, pos, x[:1])
    return held + self.state + before, held.mean()


def the(gm, target):
    return next(node for node in calls(gm.graph) if is_op(node, target))


def move_a_read_down(gm, editor):
    write, read = the(gm, aten.index_copy_.default), the(gm, aten.sum.default)
    new = editor.call(aten.sum.default, read.args, before=write.next, like=read)
    editor.replace(read, new)
    editor.graph.erase_node(read)
    return (read.name,), (new.name,)


def move_the_same_read_down(gm, editor):
    the(gm, aten.index_copy_.default).append(the(gm, aten.sum.default))
    return (), ()


def move_a_read_up(gm, editor):
    write, read = the(gm, aten.index_copy_.default), the(gm, aten.add.Tensor)
    new = editor.call(aten.add.Tensor, (read.args[0], write.args[0]), before=write, like=read)
    editor.replace(read, new)
    editor.graph.erase_node(read)
    return (read.name,), (new.name,)


def overwrite_a_live_value(gm, editor):
    read = the(gm, aten.add.Tensor)
    new = editor.call(aten.add_.Tensor, read.args, before=read, like=read)
    editor.replace(read, new)
    editor.graph.erase_node(read)
    return (read.name,), (new.name,)


def write_a_parameter(gm, editor):
    read = the(gm, aten.sum.default)
    with gm.graph.inserting_before(read):
        weight = gm.graph.get_attr("weight")
    weight.meta["val"] = read.args[0].meta["val"]
    return (), (editor.call(aten.zero_.default, (weight,), before=read, like=read).name,)


def write_an_input(gm, editor):
    read = the(gm, aten.mul.Tensor)
    new = editor.call(aten.mul_.Tensor, read.args, before=read, like=read)
    editor.replace(read, new)
    editor.graph.erase_node(read)
    return (read.name,), (new.name,)


def lose_a_write(gm, editor):
    write = the(gm, aten.index_copy_.default)
    write.replace_all_uses_with(write.args[0])
    gm.graph.erase_node(write)
    return (write.name,), ()


def drop_a_clone(gm, editor):
    read = the(gm, aten.mul.Tensor)
    editor.replace(read, next(n for n in gm.graph.nodes if n.target == "state"))
    return (read.name,), ()


BREAKS = {
    move_a_read_down: "%index_copy_ .* now comes before %sum_default .*: the write after read of %state",
    move_the_same_read_down: "%index_copy_ .* now comes before %sum_1 .*: the write after read of %state",
    move_a_read_up: "%add_tensor .* now comes before %index_copy_ .*: the read after write of %state",
    overwrite_a_live_value: "overwrites %mul, which %mean .* still reads",
    write_a_parameter: "writes to the parameter weight",
    write_an_input: "writes to %x, which the graph did not write before",
    lose_a_write: "the write of %index_copy_ .* to %state is lost",
    drop_a_clone: "%index_copy_ .* overwrites %state, which %\\w+ .* still reads",
}


@pytest.fixture
def broken(request):
    def apply(self, gm, context):
        replaced, made = request.param(gm, Editor(gm, self.name))
        return Outcome((MatchRecord("x", "", replaced, made),))

    cls = type("test_broken", (BaseTransform,), {"apply": apply, "__doc__": "For a test."})
    TransformRegistry.register("test_broken")(cls)
    yield request.param
    del TransformRegistry._known["test_broken"]


@pytest.mark.parametrize("broken", BREAKS, indirect=True, ids=lambda f: f.__name__)
def test_a_rewrite_that_changes_what_is_seen_is_rolled_back(broken):
    gm = graph_of(program)
    gm.register_parameter("weight", nn.Parameter(torch.ones(4, 6)))
    text = graph_text(gm.graph)
    config = PipelineConfig({"test_broken": TransformConfig(Stage.MATCH)})
    with pytest.raises(TransformError, match=BREAKS[broken]):
        run_pipeline(gm, config)
    assert graph_text(gm.graph) == text
    assert output_node(gm.graph)
