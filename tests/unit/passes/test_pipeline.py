"""The pipeline: registry, order, records, transactions, verification, dumps."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from torch import nn

import graft
from conftest import graph_of
from graft.base.errors import (
    DumpError,
    DuplicateTransform,
    OrderError,
    TransformError,
    UnknownTransform,
    VerificationError,
)
from graft.ir.edit import Editor
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls
from graft.ir.trace import export_graph
from graft.ir.verify import GraphSnapshot, module_state, verify
from graft.models.load import load_model
from graft.passes.base import BaseTransform, Context, Outcome, Stage, TransformConfig
from graft.passes.config import PipelineConfig, load_config
from graft.passes.pipeline import order_transforms, run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.passes.report import MatchRecord, Report

load_all()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def small_graph():
    return export_graph(Small(), (torch.randn(2, 4),))


@pytest.fixture
def registered():
    """Registers transforms for one test."""
    names = []

    def register(name, apply):
        cls = type(name, (BaseTransform,), {"apply": apply, "__doc__": "For a test."})
        TransformRegistry.register(name)(cls)
        names.append(name)
        return name

    yield register
    for name in names:
        del TransformRegistry._known[name]


def config(*names, **options):
    return PipelineConfig({n: TransformConfig(Stage.MATCH, **options) for n in names})


def test_duplicate_and_unknown_names_list_the_known(registered):
    registered("test_one", lambda self, gm, context: Outcome())
    with pytest.raises(DuplicateTransform, match="fuse_rms_norm"):
        TransformRegistry.register("test_one")(BaseTransform)
    with pytest.raises(UnknownTransform, match="did you mean 'fuse_rope'"):
        TransformRegistry.get("fuse_ropes")


def test_order_is_by_stage_then_constraints_then_listing():
    def entry(stage, **more):
        return TransformConfig(stage, **more)

    names = ["fuse_rope", "fuse_swiglu", "merge_qkv", "fuse_rms_norm"]
    ordered = order_transforms(
        PipelineConfig(
            {
                names[0]: entry(Stage.FUSE),
                names[1]: entry(Stage.MATCH, after=("fuse_rms_norm",)),
                names[2]: entry(Stage.FUSE, before=("fuse_rope",)),
                names[3]: entry(Stage.MATCH),
            }
        )
    )
    assert ordered == ["fuse_rms_norm", "fuse_swiglu", "merge_qkv", "fuse_rope"]


def test_cycles_and_impossible_orders_are_errors():
    with pytest.raises(OrderError, match="cycle among fuse_rope, fuse_swiglu"):
        order_transforms(
            PipelineConfig(
                {
                    "fuse_rope": TransformConfig(Stage.FUSE, after=("fuse_swiglu",)),
                    "fuse_swiglu": TransformConfig(Stage.FUSE, after=("fuse_rope",)),
                }
            )
        )
    with pytest.raises(OrderError, match="comes later than match"):
        order_transforms(
            PipelineConfig(
                {
                    "fuse_rope": TransformConfig(Stage.MATCH, after=("fuse_swiglu",)),
                    "fuse_swiglu": TransformConfig(Stage.FUSE),
                }
            )
        )
    with pytest.raises(OrderError, match="does not list"):
        order_transforms(PipelineConfig({"fuse_rope": TransformConfig(Stage.MATCH, after=("merge_qkv",))}))


def break_half_way(self, gm, context):
    """Edits the graph and the state, then fails."""
    editor = Editor(gm, self.name)
    node = next(iter(calls(gm.graph)))
    editor.parameter("extra.weight", torch.zeros(3), before=node, like=node)
    new = editor.call(torch.ops.aten.neg.default, (node,), before=node.next, like=node)
    node.next.next.replace_input_with(node, new)
    delattr(gm.get_submodule("b"), "bias")
    context.outputs["left"] = True
    raise RuntimeError("half way")


def lose_metadata(self, gm, context):
    del next(iter(calls(gm.graph))).meta["val"]
    return Outcome((MatchRecord("x", "", (), ()),))


def change_shape(self, gm, context):
    node = next(iter(calls(gm.graph)))
    node.meta["val"] = node.meta["val"].new_empty(7)
    node.args = tuple(node.args)
    node.kwargs = dict(node.kwargs)
    return Outcome((MatchRecord("x", "", (), ()),))


def use_before_definition(self, gm, context):
    first, *_, last = calls(gm.graph)
    first.args = (last, *first.args[1:])
    return Outcome((MatchRecord("x", "", (), ()),))


def overwrite_a_live_value(self, gm, context):
    editor = Editor(gm, self.name)
    first = next(iter(calls(gm.graph)))
    editor.call(torch.ops.aten.relu_.default, (first,), before=first.next, like=first)
    return Outcome((MatchRecord("x", "", (), ()),))


def leave_a_dangling_node(self, gm, context):
    """A node reads one that is no longer in the graph."""
    first, second, _ = calls(gm.graph)
    other = torch.fx.Graph()
    foreign = other.call_function(torch.ops.aten.neg.default, (other.placeholder("p"),))
    foreign.meta = dict(first.meta)
    second.replace_input_with(first, foreign)
    return Outcome((MatchRecord("x", "", (), ()),))


def give_another_dtype(self, gm, context):
    editor = Editor(gm, self.name)
    first, second, _ = calls(gm.graph)
    second.replace_input_with(
        first, editor.call(torch.ops.aten.to.dtype, (first, torch.float64), before=second, like=first)
    )
    return Outcome((MatchRecord("x", "", (), ()),))


BREAKS = {
    leave_a_dangling_node: "malformed",
    give_another_dtype: "is recorded as",
    break_half_way: "half way",
    lose_metadata: "lost its metadata",
    change_shape: "is recorded as",
    use_before_definition: "malformed",
    overwrite_a_live_value: "overwrites %linear, which %relu",
}


@pytest.mark.parametrize("apply", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_transform_is_rolled_back_exactly(registered, apply):
    name = registered("test_break", apply)
    gm = small_graph()
    text, state, x = graph_text(gm.graph), set(module_state(gm)), torch.randn(2, 4)
    expected = gm(x)
    context = Context()
    with pytest.raises(TransformError, match=BREAKS[apply]):
        run_pipeline(gm, config(name), context)
    report = run_pipeline(gm, config(name, on_error="skip"), context)
    assert report.transforms[name].status == "rolled_back" and BREAKS[apply] in report.transforms[name].reason
    assert graph_text(gm.graph) == text and set(module_state(gm)) == state and context.outputs == {}
    assert torch.equal(gm(x), expected)
    verify(gm)


def test_replacement_of_another_shape_is_refused():
    gm = small_graph()
    editor = Editor(gm, "test")
    first, second, _ = calls(gm.graph)
    wrong = editor.call(torch.ops.aten.sum.default, (first,), before=second, like=first)
    with pytest.raises(VerificationError, match="would replace"):
        editor.replace(second, wrong)


def test_verify_passes_on_an_unchanged_graph_and_names_a_lost_value():
    gm = small_graph()
    verify(gm, GraphSnapshot.take(gm))
    verify(gm)
    first = next(iter(calls(gm.graph)))
    del first.meta["val"]
    with pytest.raises(VerificationError, match=f"%{first.name}.* lost its metadata 'val'"):
        verify(gm)


def test_statuses_and_summary_lines(registered, caplog):
    nothing = registered("test_nothing", lambda self, gm, context: Outcome(reason="there is nothing"))
    skipped = registered("test_skipped", lambda self, gm, context: Outcome(reason="not here", skipped=True))
    applied = registered("test_applied", lambda self, gm, context: Outcome((MatchRecord("%a", "m", ("x",), ("y",)),)))
    off = registered("test_off", lambda self, gm, context: Outcome())
    settings = {n: TransformConfig(Stage.FUSE, enabled=n != off) for n in (nothing, skipped, applied, off)}
    with caplog.at_level(logging.INFO, logger="graft"):
        report = run_pipeline(small_graph(), PipelineConfig(settings))
    assert [r.status for r in report.transforms.values()] == ["no_match", "skipped", "applied", "disabled"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("[stage=fuse, transform=test_nothing] [SUMMARY] matches=0 (there is nothing) | time: ")
    assert lines[1] == "[stage=fuse, transform=test_skipped] [SUMMARY] skipped: not here"
    assert lines[2].startswith("[stage=fuse, transform=test_applied] [SUMMARY] matches=1 | time: ")
    assert lines[3] == "[stage=fuse, transform=test_off] [SUMMARY] disabled"
    assert report.transforms[applied].nodes_before == report.transforms[applied].nodes_after


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """A tiny model's pipeline with dumps: graph module, report, folder."""
    folder = tmp_path_factory.mktemp("dumps")
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    gm = graph_of(model.module)
    report = run_pipeline(gm, load_config(), Context(route="module"), model="tiny-llama", dump_dir=folder)
    return gm, report, folder


@pytest.mark.exhaustive
def test_report_survives_json(dumped):
    _, report, _ = dumped
    assert Report.from_json(report.to_json()) == report
    record = report.transforms["fuse_rms_norm"]
    assert record.matches[0].module.startswith("model.layers.0") and record.matches[0].replaced


def test_dumps_are_readable_and_load_back(dumped):
    gm, report, folder = dumped
    names = sorted(p.name for p in folder.glob("*.txt"))
    assert names[0] == "000_capture_captured.txt" and any(n.endswith("_fuse_fuse_add_rms_norm.txt") for n in names)
    assert Report.from_json((folder / "report.json").read_text()) == report
    (last,) = folder.glob("*_state_insert_kv_cache.txt")
    text = last.read_text()
    assert "graft.add_rms_norm(" in text and "model.layers.1" in text and "f32[" in text and "fuse_rope" in text
    loaded = graft.load_dump(last, module_state(gm))
    ids, positions = torch.randint(3, 128, (2, 6)), torch.arange(6).expand(2, -1)
    assert torch.equal(loaded(ids, positions)[0], gm(ids, positions)[0])
    shape = lambda graph: graph_text(graph, origin=False).replace("    ", "")  # noqa: E731
    assert [n.name for n in loaded.graph.nodes] == [n.name for n in gm.graph.nodes]
    assert shape(loaded.graph).count("graft.rope(") == shape(gm.graph).count("graft.rope(")


def test_dump_folders_of_others_are_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DumpError, match="not written by graft"):
        run_pipeline(small_graph(), config(), dump_dir=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_dumps_from_the_environment_and_again_into_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_DUMP_GRAPHS_DIR", str(tmp_path / "d"))
    for _ in range(2):
        run_pipeline(small_graph(), load_config())
    enabled = [name for name in order_transforms(load_config()) if load_config().transforms[name].enabled]
    assert len(list((tmp_path / "d").glob("0*.txt"))) == 1 + len(enabled)


def test_damaged_dumps_are_told(tmp_path):
    run_pipeline(small_graph(), config(), dump_dir=tmp_path)
    file = tmp_path / "000_capture_captured.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(DumpError, match="not JSON"):
        graft.load_dump(file)
    file.write_text('{"format": 99}')
    with pytest.raises(DumpError, match="format 99"):
        graft.load_dump(file)
    with pytest.raises(DumpError, match="does not exist"):
        graft.load_dump(tmp_path / "none.json")


@pytest.mark.exhaustive
def test_an_observer_sees_each_transform_that_matched_and_adds_to_its_record():
    seen = []

    def observe(gm, before, transform, record):
        seen.append((record.name, transform.name, len(before.nodes), len(gm.graph.nodes)))
        return dataclasses.replace(record, unchecked="seen")

    gm = graph_of(load_model("tiny-llama", dtype="float32", device="cpu").module)
    nodes = len(gm.graph.nodes)
    report = run_pipeline(gm, load_config(), Context(route="decoder", context_length=64), observe=observe)
    assert [name for name, *_ in seen] == [n for n, r in report.transforms.items() if r.matches] != []
    assert seen[0] == ("fuse_rms_norm", "fuse_rms_norm", nodes, report.transforms["fuse_rms_norm"].nodes_after)
    assert {r.unchecked for r in report.transforms.values() if r.matches} == {"seen"}
    assert {r.unchecked for r in report.transforms.values() if not r.matches} == {""}
