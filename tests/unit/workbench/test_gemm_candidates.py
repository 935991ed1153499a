"""Candidates around GEMMs: with the GEMM that a piece reads or feeds, and linear layers that read one input; and what
graft autofuse writes and decides for them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import PatternError, UsageError
from graft.ir.trace import export_graph
from graft.passes.base import Context, Stage, TransformConfig
from graft.passes.library.merge.named import MergeNamedLayers
from graft.passes.registry import TransformRegistry
from graft.workbench.autofuse import AutofuseRequest, CandidateOutcome, Ledger
from graft.workbench.autofuse.run import skipped
from graft.workbench.autofuse.trial import Findings, NothingLeft, TrialOrder, review
from graft.workbench.autofuse.writing import CandidateWriter
from graft.workbench.discover import Candidate, discover
from graft.workbench.discover.gemms import mergeable
from graft.workbench.scaffold.candidate import seed_of
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.merge import write_merge
from processes import run_python

SOURCE = Path(graft.__file__).parents[1]
WIDTH = 16


class Block(nn.Module):
    """A scaled root feeds two layers and a third; a gate behind one of them, then the layer that reads it."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.out = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x):
        rows = torch.tanh(x) * 1.5
        mixed = torch.sigmoid(self.left(rows)) * 0.5 * self.right(rows)
        return torch.relu(self.out(mixed)).square() + x


class Stack(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def exported(module: nn.Module) -> torch.fx.GraphModule:
    tokens = torch.export.Dim("tokens", min=2)
    return export_graph(module.requires_grad_(False), (torch.randn(1, 7, WIDTH),), dynamic_shapes=({1: tokens},))


def candidates(module: nn.Module) -> list[Candidate]:
    gm = exported(module)
    return list(discover(gm, together=mergeable(gm)).candidates)


@pytest.fixture(scope="module")
def found() -> list[Candidate]:
    return candidates(Stack())


def of_kind(found: list[Candidate], kind: str, *, wide: bool) -> list[Candidate]:
    return [one for one in found if one.kind == kind and bool(one.over) == wide]


def test_layers_that_read_one_input_are_a_candidate(found):
    (merge,) = of_kind(found, "horizontal_gemm", wide=False)
    assert (merge.title, merge.count) == ("left + right", 2)
    assert [one.symbol for one in merge.existing] == ["aten::linear"]
    assert merge.existing[0].transforms == ("merge_gemms",)
    assert (merge.estimates[0].launches_now, merge.estimates[0].launches_after) == (4, 2)
    with pytest.raises(PatternError, match="puts weights side by side"):
        seed_of(merge, "model")


def test_a_piece_behind_a_gemm_is_tried_with_it_after_all_others(found):
    (narrow,) = [one for one in of_kind(found, "gemm_epilogue", wide=False) if one.title.startswith("sigmoid")]
    (wider,) = [one for one in of_kind(found, "gemm_epilogue", wide=True) if one.over == narrow.id]
    assert wider.title.count("linear") == 1 and wider.count == narrow.count == 2
    assert wider.saving_us > narrow.saving_us and found.index(wider) > found.index(narrow)
    last = next(index for index, one in enumerate(found) if one.over)
    assert all(one.over or one.recommendation == "defer" for one in found[last:])
    weights = [name for name, shape in wider.pattern_shapes().items() if len(shape.split()) == 2]
    assert len(weights) == 1 and not wider.pattern_problem()


def test_no_gemm_is_in_two_candidates(found):
    gemms = [
        node
        for one in found
        if one.over
        for piece in one.pieces
        for node in piece.nodes
        if "linear" in str(node.target)
    ]
    assert len(gemms) == len(set(gemms)) > 0


class Shared(Block):
    """The result of its GEMM is read a second time, and the rows of the next one too."""

    def forward(self, x):
        left = self.left(x)
        mixed = torch.sigmoid(left) * 0.5
        return self.out(mixed) + left.sum(-1, keepdim=True) + mixed.mean(-1, keepdim=True)


def test_what_others_read_too_is_no_part_of_a_gemm():
    assert not [one for one in candidates(Shared()) if one.over]


def test_without_weights_that_could_be_one_nothing_changes():
    gm = exported(Stack())
    assert not [one for one in discover(gm).candidates if one.over or one.kind == "horizontal_gemm"]


# ── the transform that merges ───────────────────────────────────────────────────────────────────────────────────


class Named(MergeNamedLayers):
    name = "merge_left_right"
    layers = ("right", "left")


def test_layers_are_merged_by_their_names_in_their_order():
    module = Stack().double()
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    expected, right = module(x), module.layers[0].right.weight.detach().clone()
    gm = export_graph(module.requires_grad_(False), (x,))
    outcome = Named(TransformConfig(Stage.FUSE)).apply(gm, Context())
    gm.recompile()
    assert len(outcome.matches) == 2
    torch.testing.assert_close(gm(x), expected)
    merged = dict(gm.named_parameters())["layers.0.merged_proj.weight"]
    assert torch.equal(merged[:24], right) and not torch.equal(merged[24:], right)


class Missing(Named):
    name = "merge_left_wrong"
    layers = ("left", "wrong")


def test_all_of_the_layers_or_none():
    gm = exported(Stack())
    outcome = Missing(TransformConfig(Stage.FUSE)).apply(gm, Context())
    assert not outcome.matches and outcome.reason == "no linear layers of these names read one input"


@pytest.mark.parametrize("layers", [(), ("one",), ("one", "one"), ("one", "a b")])
def test_names_that_cannot_be_merged(layers, tmp_path):
    with pytest.raises(UsageError, match="two layers or more"):
        write_merge("fuse_some", layers, Destination.in_package(tmp_path / "merge-names"))
    assert not (tmp_path / "merge-names").exists()


def test_a_merge_is_written_as_a_transform_of_the_package(found, tmp_path, monkeypatch):
    (merge,) = of_kind(found, "horizontal_gemm", wide=False)
    writer = CandidateWriter(merge, "model")
    place = Destination.in_package(tmp_path / "merge-files")
    written, path, note = writer.trial(place)
    assert (written.op, path, note, writer.shapes()) == ("", "existing_kernel_path", "; by aten::linear", {})
    listing = (place.source / "graft.yaml").read_text()
    assert (
        f"{writer.name}: {{stage: fuse, enabled: false, after: [merge_qkv, merge_gate_up, merge_gemms]}}" in listing
    )
    monkeypatch.syspath_prepend(str(tmp_path / "merge-files/src"))
    importlib.import_module(f"merge_files.{writer.name}")
    try:
        assert TransformRegistry.get(writer.name).layers == ("left", "right")
    finally:
        TransformRegistry.forget(writer.name)
        for name in [name for name in sys.modules if name.startswith("merge_files")]:
            del sys.modules[name]


@pytest.mark.exhaustive  # the faults of tests/autofuse_faults.py run them, too
def test_the_tests_of_a_merge_pass(tmp_path):
    place = Destination.in_package(tmp_path / "merge-tests")
    write_merge("fuse_three", ("q_proj", "k_proj", "v_proj"), place)
    program = tmp_path / "run.py"
    program.write_text(
        f"import pytest, sys\nsys.exit(pytest.main(['-q', '-p', 'no:xdist', {str(place.source)!r}]))\n"
    )
    environment = {"PYTHONPATH": f"{place.source.parent}:{SOURCE}"}
    done = run_python(program, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "17 passed" in done.stdout, done.stdout[-2000:]


# ── what autofuse decides ───────────────────────────────────────────────────────────────────────────────────────


def outcome(name: str, status: str) -> CandidateOutcome:
    return CandidateOutcome(name, "relu", "gemm_epilogue", 2, (1.0,), (0.1,), status, "", f"fuse_{name}")


def test_a_wider_candidate_waits_for_what_it_is_compared_with(found):
    wider = next(one for one in found if one.over and one.recommendation != "defer")
    request = AutofuseRequest("tiny-llama", Path("x"))
    waiting = Ledger(request.kind(), (outcome(wider.over, "not tried"),))
    assert skipped(request, wider, waiting, 0, 100.0) == (
        "not tried",
        f"it takes a GEMM with {wider.over}, which was not tried",
    )
    for status in ("kept", "no gain", "failed"):
        assert skipped(request, wider, Ledger(request.kind(), (outcome(wider.over, status),)), 0, 100.0) is None


def test_it_goes_ahead_of_what_was_kept(found, tmp_path):
    wider = next(one for one in found if one.over and one.recommendation != "defer")
    place = Destination.in_package(tmp_path / "wider-files")
    writer = CandidateWriter(wider, "model", own=True, ahead_of=("fuse_kept_before",))
    written, path, _ = writer.trial(place)
    assert path == "triton_fallback_path" and {"native.h", "triton.py"} <= {file.name for file in written.files}
    assert "before: [fuse_kept_before, schedule_streams]" in (place.source / "graft.yaml").read_text()


TRIAL = """
import sys
from pathlib import Path

from graft.base.errors import BrokenPlugin
from graft.base.plugins import adopt
from graft.passes.config import load_config
from graft.workbench.autofuse import trial

order = trial.TrialOrder.read(Path(sys.argv[1]))
trial.check_kernels = lambda *_: None
trial.run_tests = lambda *_: (adopt(Path(order.packages[-1]).name), load_config())  # as each of them does
try:
    trial.check_alone(order, trial.Findings(Path(sys.argv[1] + ".found")))
    print("through")
except BrokenPlugin as error:
    print(error)
"""


@pytest.mark.parametrize(("packages", "said"), [(2, "through"), (1, "unknown transform 'fuse_")])
def test_what_was_kept_is_there_when_a_wider_candidate_is_tried(packages, said, found, tmp_path):
    """By its name the other's place in the pipeline is told; without it the package cannot be used."""
    wider = next(one for one in found if one.over and one.recommendation != "defer")
    before = CandidateWriter(next(one for one in found if one.id == wider.over), "model", own=True)
    writer = CandidateWriter(wider, "model", own=True, ahead_of=(before.name,))
    places = [Destination.in_package(tmp_path / name) for name in ("kept-before", "wider-files")]
    for one, place in zip((before, writer), places, strict=True):
        one.trial(place)
    order = TrialOrder(
        "tiny-llama", writer.name, "", {}, tuple(str(place.source) for place in places[-packages:]), "tests",
        "note.md", "cpu", "eager", "float32", None, (), (), 16, 2, 3, False,
    )  # fmt: skip
    (tmp_path / "order.json").write_text(order.text())
    paths = [*(str(place.source.parent) for place in places), str(SOURCE)]
    done = run_python("-c", TRIAL, str(tmp_path / "order.json"), env={"PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode == 0 and said in done.stdout, done.stderr


def test_sites_that_were_taken_are_no_fault(monkeypatch, tmp_path):
    """With packages that were kept before; a package alone that matches nothing is wrong."""
    checked = SimpleNamespace(matches=(), lines=(), of=lambda _: SimpleNamespace(reason="no match"))
    monkeypatch.setattr("graft.workbench.check.check", lambda *_: SimpleNamespace(checks=(checked,), whole=()))
    monkeypatch.setattr("graft.passes.config.load_config", lambda *_, **__: None)
    order = TrialOrder(
        "tiny-llama", "fuse_some", "", {}, ("kept", "new"), "test_some.py", "note.md", "cpu", "eager", "float32",
        None, (), (), 16, 2, 3, False,
    )  # fmt: skip
    with pytest.raises(NothingLeft, match="what was kept before it takes its sites: no match"):
        review(order, Findings(tmp_path / "found.json"))
