"""graft explain and graft ops: where a fusion fired, why not elsewhere, and which kernel runs."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from graft.api.compile import compile as graft_compile
from graft.base.errors import KernelUnavailable, PatternError, UnknownOp, UnknownTransform, UsageError, WrongType
from graft.ir.patterns.match import Finder
from graft.ir.trace import export_graph
from graft.ops import OPS
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.workbench.explain import explain_graph, explain_model, layer_of
from graft.workbench.kernels import cases_of, kernel_rows


class Layer(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.keep = keep

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        y = self.weight * (x * scale)
        return y + scale if self.keep else y


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(keep=i == 1) for i in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_matches_by_layer_and_near_misses_with_node_line_and_reason():
    gm = export_graph(Stack(), (torch.randn(2, 8),))
    told = explain_graph(gm, "fuse_rms_norm", load_config({"verify": "matches"}), Context(), "stack")
    assert list(told.by_layer()) == [0, 2]
    assert all(match.numeric_check and match.nodes == 6 for match in told.matches)
    (miss,) = told.closest()
    assert miss.site.layer == 1 and miss.site.module == "layers.1" and miss.site.node.startswith("rsqrt")
    assert miss.site.source.startswith("test_explain.py:") and "second reader" in miss.reason
    assert miss.site.source in [entry["site"]["source"] for entry in told.to_dict()["near_misses"]]


def test_a_transform_that_is_off_is_explained_all_the_same():
    gm = export_graph(Stack(), (torch.randn(2, 8),))
    off = load_config({"transforms": {"fuse_rms_norm": {"enabled": False}}})
    told = explain_graph(gm, "fuse_rms_norm", off, Context())
    assert len(told.matches) == 2 and "is off" in told.note


def test_earlier_transforms_run_first_and_an_unknown_one_is_an_error():
    gm = export_graph(Stack(), (torch.randn(2, 8),))
    told = explain_graph(gm, "fuse_add_rms_norm", load_config(), Context())
    assert told.status == "no_match" and told.reason
    with pytest.raises(UnknownTransform, match="did you mean 'fuse_rope'"):
        explain_model("tiny-llama", "fuse_ropes", load_config())


@pytest.mark.parametrize(
    ("path", "layer"),
    [("model.layers.12.mlp", 12), ("transformer.h.0", 0), ("3", 3), ("model.norm", None), ("", None)],
)
def test_layer_of_a_module_path(path, layer):
    assert layer_of(path) == layer


def test_every_op_lists_its_kernels_and_one_is_always_chosen():
    rows = kernel_rows()
    assert {row.op for row in rows} == set(OPS)
    for op in OPS:
        for dtype in ("float32", "bfloat16", "float16"):
            mine = [row for row in rows if row.op == op and row.dtype == dtype]
            assert sum(row.chosen for row in mine) == mine[0].cases > 0
            assert [row.kernel for row in mine] == [k.name for k in OPS[op].table]
            for row in mine:
                assert row.applies == row.cases or row.reasons, f"{op} {row.kernel} does not say where it applies"
                assert row.chosen <= row.applies
    with pytest.raises(UnknownOp, match="did you mean 'rope'"):
        kernel_rows(["ropes"])


def test_a_kernel_named_in_the_config_runs_or_raises():
    x = torch.randn(2, 8)
    compiled = graft_compile(Stack(), (x,), config={"kernels": {"rms_norm": "reference"}})
    assert str(compiled.report.kernels["graft::rms_norm"]) == "reference (named in the config)"
    assert graft_compile(Stack(), (x,)).report.kernels["graft::rms_norm"].ran[0].kind == "existing"
    with pytest.raises(KernelUnavailable, match="Triton kernels run on a GPU"):
        graft_compile(Stack(), (x,), config={"kernels": {"rms_norm": "triton"}})
    with pytest.raises(WrongType, match="one of aten, triton, native, reference"):
        load_config({"kernels": {"rms_norm": "cuda"}})
    idle = graft_compile(Stack(), (x,), config={"kernels": {"rope": "reference"}})
    assert any("the graph has no graft::rope;" in note for note in idle.report.notes)
    assert not any("kernels:" in note for note in compiled.report.notes)
    with pytest.raises(UsageError, match="did you mean 'rms_norm'"):
        load_config({"kernels": {"rms_nrm": "triton"}})
    with pytest.raises(UsageError, match="inside Inductor choose their kernels"):
        graft_compile(Stack(), (x,), config={"kernels": {"rms_norm": "reference"}}, backend="inductor")


def test_a_pattern_that_cannot_be_traced_shows_the_users_line():
    def pattern(x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that is told
            return x.exp()
        return x.sin()

    gm = export_graph(Stack(), (torch.randn(2, 8),))
    with pytest.raises(
        PatternError, match=r"pattern cannot be traced.*test_explain.py:\d+, in pattern: if x.sum\(\) > 0"
    ):
        Finder(pattern, {"x": "b d"}).find(gm.graph)


def test_an_op_that_a_pattern_is_said_to_need_must_be_in_it():
    def pattern(x: Tensor) -> Tensor:
        return x.exp().sin()

    gm = export_graph(Stack(), (torch.randn(2, 8),))
    with pytest.raises(PatternError, match=r"said to need aten\.tanh"):
        Finder(pattern, {"x": "b d"}, needs=(torch.ops.aten.tanh.default,)).find(gm.graph)


ONE_FILE = """
import torch
from graft.ops.cases import Case

def reference(x):
    return x

CASES = [Case("a row", lambda device, dtype, generator: (torch.ones(3, dtype=dtype),), 1)]
"""


def test_an_op_of_one_file_has_the_cases_of_that_file_or_none(tmp_path, monkeypatch):
    """A plugin may define an op in a file, without a folder that has `cases.py` beside `reference.py`."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "op_of_one_file.py").write_text(ONE_FILE)
    module = importlib.import_module("op_of_one_file")
    try:
        spec = replace(OPS["l2_norm"], reference=module.reference)
        assert [case.name for case in cases_of(spec)] == ["a row"]
        del module.CASES
        assert cases_of(spec) == [] and cases_of(OPS["l2_norm"]) != []
    finally:
        del sys.modules["op_of_one_file"]
