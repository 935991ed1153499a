"""The numeric check of each match: right rewrites pass on every kind of input, wrong ones are caught."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graft.base.errors import TransformError
from graft.ir.edit import Editor
from graft.ir.evaluate import INPUT_KINDS, RecordedCall, Subprogram, fill
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.base import BaseTransform, Outcome
from graft.passes.config import load_config
from graft.passes.library.merge import linears as merge
from graft.passes.numeric.inputs import PieceWeights, TrialInputs
from graft.passes.numeric.trials import NumericTrial
from graft.passes.pipeline import run_pipeline
from graft.passes.report import MatchRecord, Report
from numeric_cases import RIGHT, WRONG, block_graph, pattern_transform, planted_transform  # noqa: F401  (a fixture)

aten, ops = torch.ops.aten, torch.ops.graft


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (torch.bfloat16, "meta")], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_right_replacements_pass_and_the_report_holds_the_error(name, dtype, device, planted):
    record = planted(block_graph(dtype, device), pattern_transform(*RIGHT[name]))
    (match,) = record.matches
    assert match.numeric_check is not None and match.numeric_check.inputs.split(",")[0] in INPUT_KINDS
    assert 0 <= match.numeric_check.error <= match.numeric_check.limit < 0.05


# one table, which the short run has whole: which mistake is near the bound depends on the dtype
@pytest.mark.parametrize(("name", "dtype"), [*product(WRONG, [torch.float32, torch.bfloat16])], ids=str)
def test_wrong_replacements_are_caught_and_taken_back(name, dtype, planted):
    gm = block_graph(dtype)
    before = graph_text(gm.graph)
    with pytest.raises(TransformError, match=r"planted failed and was rolled back: the replacement at %.* is off by"):
        planted(gm, pattern_transform(*WRONG[name]))
    assert graph_text(gm.graph) == before


def test_without_the_check_a_wrong_replacement_goes_through(planted):
    """Structure alone cannot see it: the numeric check is what catches it."""
    record = planted(block_graph(), pattern_transform(*WRONG["another eps"]), verify="structure")
    assert record.status == "applied" and record.matches[0].numeric_check is None


def test_a_wrong_replacement_is_skipped_where_errors_are(planted):
    gm = block_graph()
    before = graph_text(gm.graph)
    record = planted(gm, pattern_transform(*WRONG["an offset"]), on_error="skip")
    assert record.status == "rolled_back" and "off by" in record.reason and graph_text(gm.graph) == before


@pytest.mark.some(1)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_merged_weights_in_the_wrong_order_are_caught(device, monkeypatch):
    """PieceWeights too: on the meta device they are made up by storage, so that views stay views."""
    settings = load_config({"verify": "matches"})
    gm = block_graph(device=device)
    report = run_pipeline(gm, settings)
    (match,) = report.transforms["merge_gate_up"].matches
    assert match.numeric_check.error <= match.numeric_check.limit
    real = merge.merge_linears

    def swapped(editor, linears, name, held):
        pieces = [n for n in linears]
        made = real(editor, pieces, name, held)
        first, second = [n for n in made if is_op(n, aten.slice.Tensor)]
        first.args, second.args = second.args, first.args
        return made

    monkeypatch.setattr(merge, "merge_linears", swapped)
    gm = block_graph(device=device)
    with pytest.raises(TransformError, match=r"merge_gate_up.*off by"):
        run_pipeline(gm, settings)


class Rewires(BaseTransform):
    """Changes what a node reads and says nothing about it."""

    def apply(self, gm, context):
        target = next(n for n in calls(gm.graph) if is_op(n, aten.silu.default))
        other = next(n for n in calls(gm.graph) if is_op(n, aten.linear.default) and n is not target.args[0])
        other = max(other, target.args[0])
        user = next(iter(target.users))
        user.replace_input_with(target, other if other < user else target.args[0])
        return Outcome((MatchRecord("%x", "", (), ()),))


class ReplacesUnsaid(BaseTransform):
    """Replaces a node through the editor, and its record does not count it among what it replaced."""

    def apply(self, gm, context):
        editor = Editor(gm, "planted")
        old = next(n for n in calls(gm.graph) if is_op(n, aten.silu.default))
        editor.replace(old, editor.call(aten.relu.default, (old.args[0],), before=old, like=old))
        successors, _ = editor.take_changes()
        return Outcome((MatchRecord("%x", "", (), (), successors=successors),))


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Rewires, "was changed, and none of its 1"), (ReplacesUnsaid, "was added, and none of its 1")],
)
def test_changes_that_no_match_accounts_for_are_refused(make, reason, planted):
    gm = block_graph()
    before = graph_text(gm.graph)
    with pytest.raises(TransformError, match=reason):
        planted(gm, make)
    assert graph_text(gm.graph) == before


def test_matches_that_feed_each_other_are_checked_one_by_one():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(4)])

        def forward(self, x):
            for w in self.w:
                x = x + w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
            return x

    gm = export_graph(Chain(), (torch.randn(2, 3, 8),))
    report = run_pipeline(gm, load_config({"verify": "matches"}))
    for name, count in (("fuse_rms_norm", 4), ("fuse_add_rms_norm", 3)):
        checks = [match.numeric_check for match in report.transforms[name].matches]
        assert len(checks) == count and all(p.error <= p.limit for p in checks)


@pytest.mark.exhaustive
def test_transforms_that_cannot_be_checked_say_why_and_the_report_keeps_it():
    from conftest import FAMILIES
    from graft.capture.decoder import capture_decoder
    from graft.models.load import load_model
    from graft.passes.base import Context

    assert "llama" in FAMILIES
    gm = capture_decoder(load_model("tiny-llama", dtype="float32", device="meta").module)
    report = run_pipeline(gm, load_config({"verify": "matches"}), Context(route="decoder"))
    again = Report.from_json(report.to_json())
    assert again == report
    for name, record in again.transforms.items():
        if record.matches:
            assert all(m.numeric_check for m in record.matches) != bool(record.unchecked), name
    assert "cache" in again.transforms["insert_kv_cache"].unchecked


def test_input_kinds_are_what_they_say():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        values = {kind: fill((4, 33), dtype, kind, generator) for kind in INPUT_KINDS}
        assert values["zeros"].abs().max() == 0
        assert 0 < values["subnormal"].abs().max() < info.tiny
        assert values["large"].abs().max() > 50 and values["large"].isfinite().all()
        assert values["small"].abs().max() < 0.01 < values["random"].abs().max()
        rows = values["outliers"].abs().sort(-1).values
        assert (rows[:, -1] >= 50).all() and (rows[:, -2] < 5).all()


def test_a_norm_that_is_wrong_for_outliers_alone_is_found(planted):
    """Rows of normal values give no result of more than some 3; one outlier gives nearly the root of the length."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x, residual):
            total = x + residual
            return ops.rms_norm(total, self.weight, 1e-5), total

    def before(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return ops.rms_norm(total, weight, eps), total

    def wrong(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = ops.add_rms_norm(x, residual, weight, eps)
        return torch.where(normed > 5, normed * 1.05, normed), total

    shapes = {"x": "b s d", "residual": "b s d", "weight": "d"}
    gm = export_graph(Norm(), (torch.randn(2, 3, 32), torch.randn(2, 3, 32)))
    with pytest.raises(TransformError, match="outliers inputs"):
        planted(gm, pattern_transform(before, wrong, shapes))


def test_sizes_that_depend_on_data_are_made_up():
    class Picks(nn.Module):
        def forward(self, x):
            y = x[x[:, 0] > 0]
            return F.silu(y[:, :4]) * y[:, 4:]

    gm = export_graph(Picks(), (torch.randn(7, 8),))
    (match,) = run_pipeline(gm, load_config({"verify": "matches"})).transforms["fuse_swiglu"].matches
    assert match.numeric_check is not None and match.numeric_check.error <= match.numeric_check.limit


def test_a_check_leaves_the_state_of_the_model_alone():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("c", torch.ones(8))

        def forward(self, x):
            self.c.mul_(2)
            return self.c * x

    gm = export_graph(Counts(), (torch.randn(8),))
    output = next(n for n in calls(gm.graph) if is_op(n, aten.mul.Tensor))
    made = {n: RecordedCall(n.op, n.target, n.args, n.kwargs, i) for i, n in enumerate(gm.graph.nodes)}
    piece = Subprogram((output,), made, gm.get_buffer, lambda node: node if node.op == "placeholder" else None)
    piece.run(TrialInputs(NumericTrial(), PieceWeights(), {}), lambda target, args, kwargs: target(*args, **kwargs))
    assert torch.equal(gm.get_buffer("c"), torch.ones(8))


def test_what_follows_from_sizes_is_computed_and_not_made_up():
    """The positions are read elsewhere too; as made-up numbers they would give another mask than the causal one."""

    class Causal(nn.Module):
        def forward(self, q, k, v):
            positions = torch.arange(q.shape[2])
            mask = positions[None, :] <= positions[:, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), positions * 2

    heads = tuple(torch.randn(1, 2, 6, 8) for _ in range(3))
    gm = export_graph(Causal(), heads)
    (match,) = run_pipeline(gm, load_config({"verify": "matches"})).transforms["fuse_attention"].matches
    (node,) = (n for n in calls(gm.graph) if is_op(n, ops.attention.default))
    assert (
        node.args[3] is None
        and match.numeric_check is not None
        and match.numeric_check.error <= match.numeric_check.limit
    )
