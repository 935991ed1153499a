"""graft export: traces, graphs and programs that other tools open."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_discover import GatedResidual, Stack, graph_of
from torch import nn
from typer.testing import CliRunner

import graft
from graft.base.errors import DumpError, ExportRefused, UnknownTransform, UsageError
from graft.cli.app import app
from graft.ir.trace import export_graph
from graft.ir.verify import module_state
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.dumps import DumpWriter
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report, TransformRecord
from graft.workbench.dump import dump_model
from graft.workbench.export.explorer import collection
from graft.workbench.export.perfetto import pipeline_events
from graft.workbench.export.pt2 import own_storage
from graft.workbench.export.write import export_run
from graft.workbench.runs import open_run
from graft.workbench.stored import save_state
from marks import short
from processes import run_python


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weighted") / "run"
    dump_model("tiny-llama", folder, load_config(sets=["verify=matches"]), "float32", weights=True)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "run"
    dump_model("tiny-llama", folder, load_config())
    return folder


def cli(*args):
    return CliRunner().invoke(app, ["export", *map(str, args)])


# ── Perfetto ────────────────────────────────────────────────────────────────────────────────────────────────────


def nanoseconds(event):
    """Begin and end in whole nanoseconds: a sum of microseconds is one of floats, and can lie behind its parent's."""
    begin, length = (round(1000 * event[key]) for key in ("ts", "dur"))
    return begin, begin + length


def check_trace(document):
    """The Trace Event Format: slices have a place and a length, and those of one row nest or follow one another."""
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    rows = {}
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X", "C") and isinstance(event["pid"], int) and event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["tid"], int)
            begin, end = nanoseconds(event)
            assert (begin / 1000, (end - begin) / 1000) == (event["ts"], event["dur"])
            rows.setdefault((event["pid"], event["tid"]), []).append((begin, end))
    for slices in rows.values():
        for start, end in slices:
            assert not [other for other, last in slices if start < other < end < last]
    return rows


def test_the_trace_holds_the_pipeline_and_the_calls_of_a_step(weighted, tmp_path):
    done = cli(weighted, "--format", "perfetto", "-o", tmp_path / "trace.json", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "trace.json").read_text())
    rows = check_trace(document)
    report = open_run(weighted).report
    slices = {
        e["name"]: e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 0 and "status" in e["args"]
    }
    assert list(slices) == [r.name for r in report.transforms.values() if r.status != "disabled"]
    norm = slices["fuse_rms_norm"]
    assert (norm["args"]["matches"], norm["args"]["checked_numerically"], norm["cat"]) == (5, 5, "match")
    begin, end = nanoseconds(norm)
    inside = [
        e for e in document["traceEvents"]
        if e["ph"] == "X" and e["pid"] == 0 and e is not norm and begin <= nanoseconds(e)[0] < end
    ]  # fmt: skip
    assert [e["name"] for e in inside] == ["rewrite", "check", "numeric check"]
    assert len(inside[0]["args"]["matches"]) == 5
    assert len(rows[1, 0]) > 10  # the predicted calls
    assert "timed" not in str(document)


def test_the_calls_of_a_run_are_timed_where_asked(weighted, tmp_path):
    done = export_run(weighted, "perfetto", tmp_path / "trace.json", step="captured", timed=True)
    document = json.loads((tmp_path / "trace.json").read_text())
    rows = check_trace(document)
    graph = open_run(weighted).steps[0].graph().graph
    called = [node.name for node in graph.nodes if node.op == "call_function"]
    timed = [e["name"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    assert timed == called and len(rows[2, 0]) == len(called)
    assert "timed on cpu" in done.what
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no GPU"):
            export_run(weighted, "perfetto", tmp_path / "no.json", step="captured", timed=True, device="cuda")
    with pytest.raises(UsageError, match="computes nothing"):
        export_run(weighted, "perfetto", tmp_path / "no.json", step="captured", timed=True, device="meta")
    with pytest.raises(ExportRefused, match=r"layout in the cache.*--step"):
        export_run(weighted, "perfetto", tmp_path / "no.json", timed=True)
    assert not (tmp_path / "no.json").exists()


def test_a_report_keeps_what_transforms_spent_their_time_on(weighted):
    report = open_run(weighted).report
    record = report.transforms["fuse_rope"]
    assert [name for name, _ in record.phases] == ["rewrite", "check", "numeric check"]
    assert 0 < sum(seconds for _, seconds in record.phases) <= record.seconds
    assert Report.from_json(report.to_json()) == report
    old = json.loads(report.to_json())
    for entry in old["transforms"].values():
        del entry["phases"]
    assert Report.from_json(json.dumps(old)).transforms["fuse_rope"].phases == ()
    assert pipeline_events(Report()) and not [e for e in pipeline_events(Report()) if e["ph"] == "X"]


durations = st.floats(0, 1e3, allow_nan=False)


@given(st.lists(st.tuples(durations, st.lists(durations, max_size=4)), max_size=6))
def test_slices_nest_whatever_the_durations(spent):
    report = Report()
    for index, (snapshot, phases) in enumerate(spent):
        whole = sum([snapshot, *phases])  # summed in another order than the phases are laid out
        named = tuple((f"phase {number}", seconds) for number, seconds in enumerate(phases))
        record = TransformRecord(f"t{index}", "fuse", "applied", seconds=whole, phases=named)
        report.transforms[record.name] = record
    rows = check_trace({"traceEvents": pipeline_events(report), "displayTimeUnit": "ms"})
    assert sum(map(len, rows.values())) == sum(1 + len(phases) for _, phases in spent)


def test_check_trace_sees_slices_that_cross():
    def one(at, us):
        return {"ph": "X", "pid": 0, "tid": 0, "name": "n", "ts": at, "dur": us, "args": {}}

    for events in ([one(0.0, 2.0), one(1.0, 1.001)], [one(1.0, 1.001), one(0.0, 2.0)]):
        with pytest.raises(AssertionError):
            check_trace({"traceEvents": events, "displayTimeUnit": "ms"})


# ── Model Explorer ──────────────────────────────────────────────────────────────────────────────────────────────


def check_collection(document):
    """What Model Explorer asks of a collection: texts everywhere, edges from nodes and outputs that exist."""
    assert isinstance(document["label"], str) and document["graphs"]
    for one in document["graphs"]:
        ids, outputs = set(), {}
        for node in one["nodes"]:
            assert set(node) == {"id", "label", "namespace", "attrs", "incomingEdges", "outputsMetadata"}
            assert all(isinstance(node[key], str) for key in ("id", "label", "namespace"))
            assert node["id"] not in ids and not node["namespace"].startswith("/") and "." not in node["namespace"]
            for pair in [*node["attrs"], *(p for o in node["outputsMetadata"] for p in o["attrs"])]:
                assert set(pair) == {"key", "value"} and all(isinstance(v, str) for v in pair.values())
            for edge in node["incomingEdges"]:
                assert set(edge) == {"sourceNodeId", "sourceNodeOutputId", "targetNodeInputId"}
                assert edge["sourceNodeId"] in ids
                assert edge["sourceNodeOutputId"] in outputs[edge["sourceNodeId"]]
            inputs = [edge["targetNodeInputId"] for edge in node["incomingEdges"]]
            assert len(set(inputs)) == len(inputs)
            ids.add(node["id"])
            outputs[node["id"]] = [output["id"] for output in node["outputsMetadata"]]
    return {one["id"]: {node["id"]: node for node in one["nodes"]} for one in document["graphs"]}


def test_model_explorer_gets_both_graphs_with_modules_shapes_and_edges(plain, tmp_path):
    done = cli(plain, "-f", "model-explorer", "-o", tmp_path / "graphs.json")
    assert done.exit_code == 0 and "open it in Model Explorer" in done.output
    graphs = check_collection(json.loads((tmp_path / "graphs.json").read_text()))
    run = open_run(plain)
    assert len(graphs) == 2
    for (title, nodes), step in zip(graphs.items(), (run.steps[0], run.steps[-1]), strict=True):
        graph = step.graph().graph
        assert title.endswith(step.transform) and list(nodes) == [node.name for node in graph.nodes]
        for node in graph.nodes:
            sources = {edge["sourceNodeId"] for edge in nodes[node.name]["incomingEdges"]}
            assert sources == {source.name for source in node.all_input_nodes}
    after = list(graphs.values())[1]
    norm = next(node for node in after.values() if node["label"] == "graft.add_rms_norm")
    assert norm["namespace"].startswith("model/layers/0/") and len(norm["outputsMetadata"]) == 2
    assert {p["key"]: p["value"] for p in norm["outputsMetadata"][0]["attrs"]}["dtype"] == "bf16"
    assert {"key": "eps", "value": "1e-06"} in norm["attrs"]
    assert any(pair["key"] == "made_by" for pair in norm["attrs"])
    second = next(
        n
        for n in after.values()
        if n["label"] == "operator.getitem" and n["incomingEdges"][0]["sourceNodeOutputId"] == "1"
    )
    assert second["incomingEdges"][0]["sourceNodeId"] in after


def test_the_schema_check_can_fail():
    document = collection("m", [("g", graph_of(Stack(GatedResidual)))])
    document["graphs"][0]["nodes"][-1]["incomingEdges"][0]["sourceNodeId"] = "nowhere"
    with pytest.raises(AssertionError):
        check_collection(document)


# ── .pt2 ────────────────────────────────────────────────────────────────────────────────────────────────────────

LOAD = """
import sys, torch
import graft.ops
inputs, expected = torch.load(sys.argv[2])
with torch.no_grad():
    given = torch.export.load(sys.argv[1]).module()(*inputs)
assert torch.equal(given[0], expected), (given[0] - expected).abs().max()
print("equal", tuple(given[0].shape))
"""


@pytest.mark.parametrize("step", short(["captured", "merge_gate_up"], "merge_gate_up"))
def test_the_program_loads_elsewhere_and_gives_the_same_bits_at_other_sizes(weighted, tmp_path, step):
    path = tmp_path / "model.pt2"
    done = export_run(weighted, "pt2", path, step=step)
    assert any("import graft.ops before torch.export.load" in note for note in done.notes)
    run = open_run(weighted)
    gm = (run.steps[0] if step == "captured" else run.after(step)).graph(run.state())
    inputs = (torch.randint(0, 100, (3, 7)), torch.arange(7).expand(3, 7))
    with torch.no_grad():
        (expected,) = gm(*inputs)
    torch.save((inputs, expected), tmp_path / "io.pt")
    ran = run_python("-c", LOAD, path, tmp_path / "io.pt", env={"PYTHONPATH": str(SOURCE)})
    assert ran.returncode == 0 and ran.stdout.startswith("equal (3, 7,"), ran.stderr[-2000:]
    with zipfile.ZipFile(path) as archive:  # what Netron reads
        names = archive.namelist()
        assert any(name.endswith("models/model.json") for name in names)
        (model,) = (json.loads(archive.read(name)) for name in names if name.endswith("models/model.json"))
    targets = {node["target"] for node in model["graph_module"]["graph"]["nodes"]}
    assert ("torch.ops.graft.add_rms_norm.default" in targets) == (step == "merge_gate_up")


SOURCE = Path(graft.__file__).parents[1]


class Counting(nn.Module):
    """Writes a buffer and an input in place."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, cache):
        self.seen.add_(1.0)
        cache.add_(x)
        return self.mix(x) + self.seen


def dump_graph(gm, folder):
    writer = DumpWriter.open(folder)
    state = {name: tensor.clone() for name, tensor in module_state(gm).items()}
    run_pipeline(gm, load_config(), Context(), dump_dir=writer)
    save_state(state, folder)
    return folder


def test_writes_stay_writes_and_are_told(tmp_path):
    args = (torch.randn(2, 3), torch.zeros(2, 3))
    folder = dump_graph(export_graph(Counting().eval(), args), tmp_path / "run")
    done = export_run(folder, "pt2", tmp_path / "counting.pt2")
    assert any("cache, seen in place" in note for note in done.notes), done.notes
    program = torch.export.load(tmp_path / "counting.pt2").module()
    run = open_run(folder)
    gm = run.steps[-1].graph(run.state())
    for _ in range(3):
        ours, theirs = (args[0], torch.zeros(2, 3)), (args[0], torch.zeros(2, 3))
        with torch.no_grad():
            expected, given = gm(*ours), program(*theirs)
        first = lambda r: r[0] if isinstance(r, (list, tuple)) else r  # noqa: E731
        assert torch.equal(first(expected), first(given)) and torch.equal(ours[1], theirs[1])
    assert theirs[1].abs().sum() > 0


def test_parts_of_one_weight_become_tensors_of_their_own():
    whole = torch.arange(6.0)
    state = own_storage({"whole": whole, "part": whole[:2], "again": whole[:2], "tied": whole})
    assert state["whole"] is state["tied"] is whole and state["part"] is state["again"]
    assert state["part"].untyped_storage().nbytes() == 8 and torch.equal(state["part"], whole[:2])


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("-f", "onnx"), 2, "--format onnx: unknown"),
        (("-f", "perfeto"), 2, "did you mean 'perfetto'"),
        (("-f", "pt2"), 1, "dump the model again with --weights"),
        (("-f", "perfetto", "--time"), 1, "dump the model again with --weights"),
        (("-f", "pt2", "--time"), 2, "belongs to --format perfetto"),
        (("-f", "model-explorer", "--step", "fuse_ropes"), 2, "fuse_rope"),
        (("-f", "model-explorer", "--step", "quantize_linear"), 2, "was off in"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(plain, tmp_path, options, code, message):
    done = cli(plain, *options, "-o", tmp_path / "out")
    assert done.exit_code == code and message in done.output, done.output
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_runs_and_graphs_that_cannot_be_exported_are_refused(weighted, tmp_path, monkeypatch):
    with pytest.raises(DumpError, match="no folder of dumps"):
        export_run(tmp_path, "perfetto", tmp_path / "out")
    with pytest.raises(UnknownTransform):
        export_run(weighted, "pt2", tmp_path / "out", step="nothing")

    def refuse(*args, **kwargs):
        raise RuntimeError("data decides this size\nand more")

    monkeypatch.setattr(torch.export, "export", refuse)
    with pytest.raises(ExportRefused, match=r"torch.export refuses the graph after \w+: data decides this size$"):
        export_run(weighted, "pt2", tmp_path / "out.pt2", step="captured")
    assert not (tmp_path / "out.pt2").exists()
