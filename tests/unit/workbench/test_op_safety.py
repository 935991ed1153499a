"""Ops that a transform brings: what they do beside their schemas is found in `graft check`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import faulty_ops  # noqa: F401
from graft.ir.nodes import calls
from graft.ir.trace import export_graph
from graft.ops import OPS
from graft.passes.report import MatchRecord, TransformRecord
from graft.workbench.check.op_safety import brought_ops, op_problems


def aliased(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(x.shape)


library = torch.library.Library("faulty_alias", "DEF")
library.define("same(Tensor x) -> Tensor")
library.impl("same", aliased, "CompositeExplicitAutograd")
library.define("other(Tensor x) -> Tensor")
library.impl("other", lambda x: x + 1, "CPU")
library.impl("other", lambda x: x.new_empty(1), "Meta")


def record_of(gm):
    made = tuple(node.name for node in calls(gm.graph))
    return TransformRecord("planted", "match", "applied", (MatchRecord("%x", "", (), made),))


def problems(function, *args):
    gm = export_graph(type("Made", (torch.nn.Module,), {"forward": lambda self, *given: function(*given)})(), args)
    (node,) = brought_ops(gm, record_of(gm)).values()
    return op_problems(gm, node)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", ""),
        ("writes its input", "does not declare it in mutates_args"),
        ("every other call", "another result in a second run"),
        ("by chance", "another result in a second run"),
    ],
)
def test_what_an_op_does_beside_its_schema_is_found(fault, found):
    told = problems(lambda gate, up: torch.ops.faulty.gated(gate, up, fault), torch.randn(2, 8), torch.randn(2, 8))
    assert bool(told) == bool(found) and found in "; ".join(told)


def test_an_alias_and_a_wrong_fake_are_found():
    assert "returns memory of an input" in "; ".join(problems(torch.ops.faulty_alias.same, torch.randn(3, 8)))
    assert "opcheck" in "; ".join(problems(torch.ops.faulty_alias.other, torch.randn(1)[:0].new_zeros(3)))


def test_ops_of_torch_and_graft_are_not_run_again_and_those_of_packages_are(monkeypatch):
    """A package defines its ops in graft's namespace, as graft does."""

    class Both(torch.nn.Module):
        def forward(self, x):
            return torch.ops.graft.swiglu(torch.nn.functional.silu(x), x)

    gm = export_graph(Both(), (torch.randn(2, 8),))
    assert not brought_ops(gm, record_of(gm))
    monkeypatch.setitem(OPS, "swiglu", replace(OPS["swiglu"], reference=aliased))
    (node,) = brought_ops(gm, record_of(gm)).values()
    assert node.target is torch.ops.graft.swiglu.default and not op_problems(gm, node)
