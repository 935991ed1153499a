"""Passes of others as transforms: dumped, diffed, checked, recorded, rolled back."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, PatternMatcherPass, register_graph_pattern
from torch.fx import Graph, GraphModule, replace_pattern

import graft
from graft.base.errors import DuplicateTransform, ForeignPassError, TransformError
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.testing import assert_fuses, assert_not_fuses
from marks import examples

aten = torch.ops.aten


class Twice(nn.Module):
    def forward(self, x):
        return torch.relu(torch.relu(x)) + torch.relu(torch.relu(x * 2)).sin()


def drop_second_relu(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is aten.relu.default and node.args[0].target is aten.relu.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def on_module(gm):
    return replace_pattern(gm, chain(), once())


def chain():
    graph = Graph()
    inner = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    graph.output(graph.call_function(aten.relu.default, (inner,)))
    return GraphModule({}, graph)


def once():
    graph = Graph()
    graph.output(graph.call_function(aten.relu.default, (graph.placeholder("x"),)))
    return GraphModule({}, graph)


@pytest.fixture(autouse=True)
def the_registry_stays():
    """A pass that is tried is a transform for that time alone: configurations of others list all that is one."""
    load_all()
    before = TransformRegistry.names()
    yield
    assert TransformRegistry.names() == before


class AsCustomPass(CustomGraphPass):
    def __call__(self, graph):
        drop_second_relu(graph)

    def uuid(self):
        return "relu"


def matcher() -> PatternMatcherPass:
    found = PatternMatcherPass(pass_name="relu_twice")

    @register_graph_pattern(
        CallFunction(aten.relu.default, CallFunction(aten.relu.default, KeywordArg("x"))), pass_dict=found
    )
    def once(match, x):
        with match.graph.inserting_before(match.output_node()):
            new = match.graph.call_function(aten.relu.default, (x,))
        match.output_node().replace_all_uses_with(new)
        match.erase_nodes()

    return found


@pytest.mark.parametrize(
    "run", [drop_second_relu, on_module, AsCustomPass(), matcher()], ids=lambda run: type(run).__name__
)
def test_any_pass_is_a_transform(run):
    trial = assert_fuses(Twice(), (torch.randn(3, 4),), run, count=2)
    assert trial.called.count("aten.relu") == 2
    assert all(match.numeric_check is not None and match.numeric_check.trials > 1 for match in trial.record.matches)
    assert all(match.module == "" and "test_foreign.py" in match.anchor for match in trial.record.matches)
    assert_not_fuses(nn.Sigmoid(), (torch.randn(3),), run, reason="the pass changed nothing")


def sin_for_relu(graph: Graph) -> None:
    """Changes a node where it stands, and wrongly."""
    for node in graph.nodes:
        if node.target is aten.relu.default:
            node.target = aten.sin.default


def double(graph: Graph) -> None:
    """Right: the sum of a value and itself."""
    for node in list(graph.nodes):
        if node.target is aten.mul.Tensor and node.args[1] == 2:
            node.target, node.args = aten.add.Tensor, (node.args[0], node.args[0])


def test_nodes_that_are_changed_in_place_are_matches_and_checked():
    trial = assert_fuses(Twice(), (torch.randn(3, 4),), double, count=1)
    assert trial.called.count("aten.mul") == 0
    with pytest.raises(
        AssertionError, match=r"sin_for_relu.*matches Twice(.|\n)*it failed, and the graph was put back"
    ):
        assert_fuses(Twice(), (torch.randn(3, 4),), sin_for_relu)


def test_it_is_dumped_diffed_reported_and_rolled_back(tmp_path):
    graft.as_transform("my_relu", drop_second_relu)
    graft.as_transform("my_sin", sin_for_relu)
    try:
        with pytest.raises(DuplicateTransform):
            graft.as_transform("my_relu", drop_second_relu)
        config = {"verify": "matches", "transforms": {"my_relu": {"stage": "fuse"}}}
        compiled = graft.compile(Twice(), (torch.randn(3, 4),), config=config, dump_dir=tmp_path / "d")
        assert len(compiled.report.transforms["my_relu"].matches) == 2
        before, after = graft.open_run(tmp_path / "d").around("my_relu")
        assert graft.diff_graphs(before.graph().graph, after.graph().graph).counts["removed"] == 2
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x), Twice()(x))
        skipping = {"verify": "matches", "transforms": {"my_sin": {"stage": "fuse", "on_error": "skip"}}}
        compiled = graft.compile(Twice(), (x,), config=skipping)
        record = compiled.report.transforms["my_sin"]
        assert record.status == "rolled_back" and "my_sin" in record.name
        assert torch.equal(compiled(x), Twice()(x))
    finally:
        for name in ("my_relu", "my_sin"):
            TransformRegistry._known.pop(name)


def calls_a_function(graph: Graph) -> None:
    node = next(n for n in graph.nodes if n.target is aten.relu.default)
    with graph.inserting_before(node):
        node.replace_all_uses_with(graph.call_function(torch.relu, node.args))


def another_module(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, gm.graph)


def another_graph(graph: Graph) -> Graph:
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def adds_an_input(graph: Graph) -> None:
    node = next(n for n in graph.nodes if n.target is aten.relu.default)
    with graph.inserting_before(next(iter(graph.nodes))):
        new = graph.placeholder("more")
    node.replace_all_uses_with(new)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (calls_a_function, "which is no overload of an op; write torch.ops.aten"),
        (another_module, "returns another graph module"),
        (another_graph, "returns another graph, and has to change the one it is given"),
        (adds_an_input, "it adds %more, which is placeholder"),
        (lambda: None, "it takes no graph"),
        (3, "cannot be called"),
    ],
)
def test_what_cannot_run_is_refused(run, problem):
    with pytest.raises((AssertionError, ForeignPassError)) as refused:
        assert_fuses(Twice(), (torch.randn(3, 4),), run)
    assert problem in str(refused.value)


def commute(picks):
    """Swaps the operands of some additions and multiplications, and folds some `x * 1`: right whatever it picks."""

    def swap(graph):
        for number, node in enumerate([n for n in graph.nodes if n.target in (aten.add.Tensor, aten.mul.Tensor)]):
            if number in picks and isinstance(node.args[1], torch.fx.Node):
                with graph.inserting_before(node):
                    new = graph.call_function(node.target, (node.args[1], node.args[0]))
                node.replace_all_uses_with(new)

    return swap


STEPS = st.tuples(st.sampled_from([operator.add, operator.mul]), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=examples(20))
@given(st.lists(STEPS, min_size=2, max_size=6), st.sets(st.integers(0, 5)))
def test_a_right_pass_keeps_the_values_and_is_accounted_for(steps, picks):
    def program(x, y):
        values = [x, y]
        for op, left, right in steps:
            values.append(op(values[left % len(values)], values[right % len(values)]))
        return tuple(values[2:])

    class Program(nn.Module):
        def forward(self, x, y):
            return program(x, y)

    x, y = torch.randn(4), torch.randn(4)
    gm = export_graph(Program(), (x, y))
    name = "swapped"
    graft.as_transform(name, commute(picks))
    try:
        report = run_pipeline(gm, load_config({"verify": "matches", "transforms": {name: {"stage": "fuse"}}}))
    finally:
        TransformRegistry._known.pop(name)
    assert report.transforms[name].status in ("applied", "no_match")
    for got, wanted in zip(gm(x, y), program(x, y), strict=True):
        assert torch.equal(got, wanted)


def test_the_transform_error_names_the_pass():
    graft.as_transform("breaks", lambda graph: 1 / 0)
    try:
        with pytest.raises(TransformError, match=r"breaks failed and was rolled back.*division by zero"):
            graft.compile(Twice(), (torch.randn(2),), config={"transforms": {"breaks": {"stage": "match"}}})
    finally:
        TransformRegistry._known.pop("breaks")


def edits(target, args, kwargs):
    """A pass that changes the arguments of a call where it stands."""

    def edit(graph: Graph) -> None:
        for node in graph.nodes:
            if node.target is target:
                node.args, node.kwargs = (node.args[0], *args), kwargs

    return edit


@pytest.mark.parametrize(
    ("program", "x", "edit", "right"),
    [
        (lambda x: x.clamp(min=0.5), torch.rand(3), edits(aten.clamp.default, (), {"max": 0.5}), False),
        (lambda x: x.clamp(min=0.5), torch.rand(3), edits(aten.clamp.default, (), {"min": 0.5}), True),
        (lambda x: x * 2, torch.ones(3, dtype=torch.int64), edits(aten.mul.Tensor, (2.0,), {}), False),
        (lambda x: x * 1, torch.ones(3, dtype=torch.int64), edits(aten.mul.Tensor, (True,), {}), True),
    ],
)
def test_a_call_with_other_arguments_was_changed(program, x, edit, right):
    """Keyword names, nesting and the type of a literal are part of a call."""
    graft.as_transform("edited", edit)
    config = {"verify": "matches", "transforms": {"edited": {"stage": "match", "on_error": "skip"}}}
    try:
        compiled = graft.compile(program, (x,), config=config, backend="eager")
    finally:
        TransformRegistry._known.pop("edited")
    record = compiled.report.transforms["edited"]
    assert (record.status, len(record.matches)) == (("applied", 1) if right else ("rolled_back", 0))
    assert torch.equal(compiled(x), program(x)) and compiled(x).dtype == program(x).dtype


@torch.no_grad()
def scales_weights(gm: GraphModule) -> None:
    for parameter in gm.parameters():
        parameter.mul_(2)


def test_a_pass_that_writes_into_weights_is_an_error():
    graft.as_transform("scales", scales_weights)
    try:
        with pytest.raises(TransformError, match=r"weight weight was written into, and its values are not put back"):
            graft.compile(nn.Linear(2, 2), (torch.ones(1, 2),), config={"transforms": {"scales": {"stage": "fuse"}}})
    finally:
        TransformRegistry._known.pop("scales")
