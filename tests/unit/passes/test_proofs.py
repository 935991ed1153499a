"""What is proved of a match: the same operations in the same order, ops of graft as their references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ir.verify import GraphSnapshot
from graft.ops import OPS
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.library import fuse_swiglu
from graft.passes.numeric.proofs import proof_of
from graft.passes.numeric.sides import Sides
from graft.passes.pipeline import run_pipeline
from graft.passes.report import Report, checks_text
from graft.workbench.explain import explain_graph
from numeric_cases import GATED, WRONG, block_graph, pattern_transform, planted_transform  # noqa: F401  (a fixture)

aten, ops = torch.ops.aten, torch.ops.graft


def commuted(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate)


def sigmoid_apart(gate: Tensor, up: Tensor) -> Tensor:
    """The same number, rounded once more."""
    return (gate * torch.sigmoid(gate)) * up


PROOFS = {
    "the same calls": (commuted, "the same operations in the same order"),
    "an op": (lambda gate, up: ops.swiglu(gate, up), "the same operations in the same order, with graft::swiglu"),
    "other calls": (sigmoid_apart, ""),
}


@pytest.mark.parametrize("name", PROOFS)
def test_what_is_proved_is_marked_and_run_all_the_same(name, planted):
    replacement, text = PROOFS[name]
    (match,) = planted(block_graph(), pattern_transform(fuse_swiglu.plain, replacement, GATED)).matches
    assert match.proved.startswith(text) and bool(match.proved) == bool(text)
    assert match.numeric_check.trials > 50
    assert ("1 proved: " in checks_text([match])) == bool(text)


@pytest.mark.parametrize("least", [None, 100], ids=["any size", "decides by the size"])
def test_a_reference_that_decides_by_an_open_size_proves_nothing(least, planted, monkeypatch):
    """It would be the same for some sizes alone."""
    spec = OPS["swiglu"]

    def reference(gate, up, *options):
        return up if least is not None and gate.shape[0] >= least else spec.reference(gate, up, *options)

    monkeypatch.setitem(OPS, "swiglu", replace(spec, reference=reference))
    transform = pattern_transform(fuse_swiglu.plain, lambda gate, up: ops.swiglu(gate, up), GATED)
    (match,) = planted(block_graph(), transform).matches
    assert bool(match.proved) == (least is None)


def test_the_report_and_what_is_explained_hold_what_is_proved():
    gm = block_graph()
    config = load_config({"verify": "matches"})
    explanation = explain_graph(gm, "fuse_swiglu", config, Context())
    (match,) = explanation.matches
    assert match.proved.endswith("with graft::swiglu by reference")
    assert explanation.to_dict()["matches"][0]["proved"] == match.proved
    report = run_pipeline(block_graph(), config)
    assert '"proved": "the same operations' in report.to_json() and Report.from_json(report.to_json()) == report


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["gate and up swapped", "another activation", "another eps", "an offset"])
def test_a_wrong_op_is_not_proved(name, planted):
    """The proof reads the op's reference: other arguments are another function."""
    gm = block_graph()
    before = GraphSnapshot.take(gm)
    (match,) = planted(gm, pattern_transform(*WRONG[name]), verify="structure").matches
    assert not proof_of(*Sides.of(gm, before, [match]).pieces(match))
