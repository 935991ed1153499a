"""What a report is made of: folded layers, ports, changes, matches and near misses, kernel times."""

from __future__ import annotations

import json

import pytest
import torch

from graft.base.errors import DumpError, ReportError
from graft.bench.kernels.kernel_times import KernelTime, StepTimes
from graft.ir.facts import read_graph
from graft.ir.patterns.match import NearMiss
from graft.ir.trace import export_graph
from graft.passes.report import MatchRecord, TransformRecord
from graft.workbench.report import collect
from graft.workbench.report.kernel_file import find_kernels, read_kernels
from graft.workbench.report.packing import HUB, Readers, StringTable
from graft.workbench.report.parts import RUNS, pack_step
from graft.workbench.report.records import match_rows, miss_rows
from graft.workbench.report.scenes import LARGEST
from graft.workbench.runs import open_run
from report_cases import Stack, dump_stack

INPUTS, CHANGE, NOTE = 8, 8, 9  # behind the eight texts of a packed node, as in data.js


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return dump_stack(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def data(folder):
    return collect(folder)


def view(data, name):
    return next(one for one in data.transforms if one.record.name == name)


def unpacked(step):
    """Every node of a packed step by name, with the names of what it reads: folded layers from their copies."""
    found = {}
    for part in step["parts"]:
        first = [None, [node[0] for node in part["nodes"]], [outer[0] for outer in part["outer"]]]
        for _, names, outer in (first, *part["copies"]):
            for site, node in enumerate(part["nodes"]):
                reads = node[INPUTS][1::2]
                found[names[site]] = sorted(names[at] if at >= 0 else outer[-1 - at] for at in reads)
    return found


def test_head_and_counts_say_what_was_run(data):
    assert data.head["model"] == "stack" and data.head["device"] == "cpu" and data.head["dtype"] == "float32"
    assert {"graft", "torch", "transformers"} <= set(data.head) and data.head["run"].endswith("UTC")
    assert data.counts["layers"] == 10 and data.counts["matches"] == 9 + 8
    assert data.counts["near misses"] == 2  # two patterns come near at the one site
    assert data.counts["nodes captured"] > data.counts["nodes at the end"] > 0


def test_equal_layers_are_one_box_and_the_odd_one_is_named(data):
    first = data.graphs["steps"][0]
    assert first["said"] == "10 layers: 0–6, 8–9 are equal (× 9), layer 7 differs"
    titles = [box[1] for box in first["boxes"]]
    assert titles[-3:] == ["layers 0–6", "layer 7", "layers 8–9"]
    layers = [part for part in first["parts"] if part["layer"]]
    assert [part["layer"][1] for part in layers] == [0, 7]
    assert [copy[0] for copy in layers[0]["copies"]] == [1, 2, 3, 4, 5, 6, 8, 9]


def test_no_node_and_no_edge_is_lost_by_folding(folder, data):
    run = open_run(folder)
    for step in data.graphs["steps"]:
        stored = next(one for one in run.steps if one.transform == step["name"])
        items = read_graph(stored.graph().graph)
        assert unpacked(step) == {item.name: sorted(items[index].name for _, index in item.inputs) for item in items}


def test_what_several_layers_read_is_a_port_and_no_edge(folder, data):
    step = data.graphs["steps"][0]
    layers = {number for number, box in enumerate(step["boxes"]) if box[2]}
    assert all("sin" in step["boxes"][number][3] for number in layers)
    shift = next(number for number, box in enumerate(step["boxes"]) if box[1] == "the model itself")
    assert not any(edge[0] == shift for edge in step["edges"])
    chain = sorted(tuple(edge) for edge in step["edges"] if set(edge) <= layers)
    assert chain == [(3, 4), (4, 5)]
    items = read_graph(open_run(folder).steps[0].graph().graph)
    sin = next(item for item in items if item.op == "aten.sin")
    readers = Readers(items)
    assert len(readers.of[sin.index]) == 10 > HUB and readers.kind(sin) == 1


def test_layers_that_alternate_share_boxes():
    """Where runs of equal layers would be more boxes than can be read, equal layers are one box wherever they are."""
    module = Stack(2 * RUNS + 2, odd=-1).eval()
    for layer in list(module.layers)[::2]:
        layer.norm.leaks = True
    items = read_graph(export_graph(module, (torch.randn(2, 8),)).graph)
    boxes = [box for box in pack_step(items, StringTable())["boxes"] if box[2]]
    assert [box[1] for box in boxes] == ["layer 0", "layers 1, 3, 5, …", "layers 2, 4, 6, …"]
    assert sorted(index for box in boxes for index in box[2]) == list(range(2 * RUNS + 2))


def test_a_transform_has_its_diff_as_text_and_as_drawings(data):
    norm = view(data, "fuse_rms_norm")
    assert "removed" in norm.summary and any(line.style == "added" for line in norm.lines)
    drawing = norm.drawings[0]
    assert drawing["title"] == "layers 0–6, 8–9 × 9, layer 1 shown"
    strings = data.graphs["strings"]
    kinds = {}
    for node in drawing["nodes"]:
        kinds.setdefault(node[CHANGE], []).append(strings[node[1]])
    assert kinds[2] == ["graft.rms_norm"]
    assert sorted(kinds[1]) == sorted(
        ["aten.pow.Tensor_Scalar", "aten.mean.dim", "aten.add.Tensor", "aten.rsqrt", *["aten.mul.Tensor"] * 2]
    )
    assert kinds[3] == ["aten.linear"]
    rewired = next(node for node in drawing["nodes"] if node[CHANGE] == 3)
    assert "→ %rms_norm_default" in rewired[NOTE]
    added = [edge for edge in drawing["edges"] if edge[2] == 2]
    removed = [edge for edge in drawing["edges"] if edge[2] == 1]
    assert added and removed and not {tuple(e[:2]) for e in added} & {tuple(e[:2]) for e in removed}
    assert not view(data, "fuse_moe").drawings and not view(data, "fuse_moe").lines


def test_steps_that_change_nothing_are_not_stored_again(folder, data):
    assert [step["name"] for step in data.graphs["steps"]] == ["captured", "fuse_rms_norm", "fuse_add_rms_norm"]
    assert len(open_run(folder).steps) > 10


def test_a_drawing_that_is_too_large_is_said_to_be(data, monkeypatch):
    from graft.workbench.diff_runs import diff_transform
    from graft.workbench.layers import fold
    from graft.workbench.report import scenes as module

    monkeypatch.setattr(module, "LARGEST", 3)
    diff = diff_transform(data.run, "fuse_rms_norm")
    found = module.scenes(diff, fold(diff), StringTable())
    assert found[0]["large"] > 3 and "nodes" not in found[0] and LARGEST > 60


def test_matches_and_near_misses_are_told_once_for_equal_layers(data):
    norm = view(data, "fuse_rms_norm")
    assert [(row.site, row.count) for row in norm.matches] == [("layers.*.norm × 9 (layers 0–6, 8–9)", 9)]
    (nearest,) = norm.misses
    assert nearest.site == "layers.7.norm" and nearest.count == 1 and "has a second reader" in nearest.reason
    # of a pattern's variants the nearest is told; two patterns that fail for one reason at one site are one row
    assert nearest.matched == nearest.size and nearest.pattern == "rms_norm llama, promoted llama"
    assert [miss.pattern for miss in norm.record.near_misses] == ["rms_norm llama", "promoted llama"]


def test_near_misses_of_other_sites_or_reasons_stay_apart():
    def miss(name, module, reason, matched):
        at = {"name": name, "module": module, "stopped_at": "a"}
        return NearMiss("norm", f"%{name} ({module})", "%a", reason, matched, 8, **at)

    misses = (
        miss("mul_1", "layers.3.norm", "%mul (layers.3.norm) is of another dtype", 4),
        miss("mul_2", "layers.3.norm", "%a (layers.3.norm) has a second reader %b (layers.3)", 8),
        miss("mul_3", "layers.7.norm", "%c (layers.7.norm) has a second reader %d (layers.7)", 8),
        miss("mul_4", "layers.7.last_norm", "%e (layers.7.last_norm) has a second reader %f (layers.7)", 8),
        miss("mul_6", "layers.7.up", "%layers_7_w is read by %x (layers.8.up, a.py:7)", 5),
        miss("mul_7", "layers.8.up", "%layers_8_w is read by %y (layers.9.up, a.py:7)", 5),
        miss("mul_8", "layers.9.up", "%layers_9_w is read by %z (layers.9.up, a.py:7)", 5),
        miss("mul_5", "norm", "%g (norm) has a second reader %h", 6),
    )
    rows = miss_rows(TransformRecord("t", "match", "no_match", near_misses=misses))
    assert [(row.site, row.count, row.matched) for row in rows] == [
        ("layers.*.norm × 2 (layers 3, 7)", 2, 8),
        ("layers.7.last_norm", 1, 8),
        ("norm", 1, 6),
        ("layers.*.up × 2 (layers 7–8)", 2, 5),
        ("layers.9.up", 1, 5),
        ("layers.3.norm", 1, 4),
    ]


def test_matches_of_several_kinds_stay_apart():
    forms = enumerate(("x", "y", "x"))
    matches = tuple(MatchRecord("%a", f"layers.{index}.mlp", ("a",), ("b",), form) for index, form in forms)
    record = TransformRecord("t", "match", "applied", matches)
    assert [(row.pattern, row.count) for row in match_rows(record)] == [("x", 2), ("y", 1)]


def test_candidates_are_of_the_last_graph_and_their_absence_has_a_reason(data, folder, monkeypatch):
    assert data.discovery is not None and "fuse_add_rms_norm" not in data.no_candidates
    assert data.discovery.model.startswith("stack after ")
    from graft.workbench.report import data as module

    def unknown(_):
        raise DumpError("no shapes here")

    monkeypatch.setattr(module, "discover_run", unknown)
    assert module.candidates(open_run(folder)) == (None, "no shapes here")


def kernel_document(model="stack"):
    row = KernelTime("k<ernel>", "8×4", 2.0, 10.0, 5.0, 9.0, 90.0, None, None)
    step = StepTimes(1, 16, 20.0, 4, "a GPU", True, 10.0, 10.0, 9.0, 1.0, 2.0, 1e6, 2.0, (row,))
    return {"setup": {"model": model, "device": "cuda:0"}, "steps": [{**vars(step), "rows": [vars(row)]}]}


def test_kernel_times_come_from_the_run_or_a_named_file(tmp_path):
    assert find_kernels(tmp_path, None) is None
    (tmp_path / "kernels.json").write_text(json.dumps(kernel_document()))
    found = find_kernels(tmp_path, None)
    assert found is not None and found.steps[0].rows[0].name == "k<ernel>"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(kernel_document("another")))
    named = find_kernels(tmp_path, other)
    assert named is not None and named.setup["model"] == "another"


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '{"setup": {}, "steps": [{}]}', '{"setup": {}, "steps": 5}', '{"setup": null, "steps": []}'],
)
def test_a_file_without_kernel_times_is_refused(tmp_path, content):
    file = tmp_path / "kernels.json"
    file.write_text(content)
    with pytest.raises(ReportError, match=r"has no kernel times.*graft bench MODEL --kernels --json"):
        read_kernels(file)


def test_times_that_are_no_numbers_are_refused(tmp_path):
    document = kernel_document()
    document["steps"][0]["rows"][0]["us"] = "10"
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ReportError, match="not a number"):
        read_kernels(file)
    with pytest.raises(ReportError, match=r"cannot read .*nowhere"):
        read_kernels(tmp_path / "nowhere.json")
