"""Replacements that are wrong somewhere: each must be found, and the right one pass."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from faulty_ops import FAULTS
from graft.base.errors import TransformError
from graft.ir.edit import Editor, attach_state, attribute
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op, output_node
from graft.ir.trace import export_graph
from graft.passes.base import BaseTransform, Outcome, Stage, TransformConfig
from graft.passes.config import PipelineConfig, load_config
from graft.passes.library import fuse_swiglu
from graft.passes.library.merge import linears as merge
from graft.passes.numeric.compare import CEILING
from graft.passes.numeric_check import PairTrials
from graft.passes.patterns import PatternTransform, Rewrite
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.usefixtures("every_size")


class Gated(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(8, 8, False, dtype=dtype) for _ in range(2))

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


@pytest.fixture(scope="module")
def graphs():
    open_sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    return {dtype: (Gated(dtype), torch.randn(2, 5, 8, dtype=dtype), open_sizes) for dtype in DTYPES}


def exported(example):
    module, x, sizes = example
    return export_graph(module, (x,), dynamic_shapes=(sizes,))


@pytest.fixture
def planted_transform():
    """Runs one transform made for a test, and gives its record."""

    def run(gm, transform, verify="matches"):
        TransformRegistry.register("planted")(transform)
        config = PipelineConfig({"planted": TransformConfig(Stage.MATCH)}, verify=verify)
        return run_pipeline(gm, config).transforms["planted"]

    yield run
    TransformRegistry._known.pop("planted", None)


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def faulty(fault):
    def replacement(gate, up):
        return torch.ops.faulty.gated(gate, up, fault)

    rewrites = [Rewrite(gated_silu, replacement, fuse_swiglu.SHAPES)]
    return type("Planted", (PatternTransform,), {"__doc__": "For a test.", "rewrites": lambda self: rewrites})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_right_one_passes_in_every_trial(dtype, graphs, planted_transform):
    (match,) = planted_transform(exported(graphs[dtype]), faulty("")).matches
    check = match.numeric_check
    assert check.error <= check.limit < CEILING and check.trials > 150 and not check.uncovered


def test_what_was_not_covered_is_in_the_report(planted_transform):
    gm = export_graph(Gated(torch.float32), (torch.randn(2, 5, 8),))
    (match,) = planted_transform(gm, faulty("")).matches
    assert match.numeric_check.uncovered == ("other sizes: the graph has none that is open",)


class Decoder(nn.Module):
    """Takes tokens, as a decoder before its cache does."""

    def __init__(self, tokens):
        super().__init__()
        self.embed, self.gated = nn.Embedding(tokens, 8), Gated(torch.float32)

    def forward(self, input_ids):
        return self.gated(self.embed(input_ids))


@pytest.mark.parametrize(("tokens", "told"), [(100, ""), (5, "the graph does not run on them (IndexError")])
def test_activations_that_a_graph_does_not_give_are_told(tokens, told, planted_transform):
    gm = export_graph(Decoder(tokens), (torch.tensor([[1, 2, 3]]),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    (match,) = planted_transform(gm, faulty("")).matches
    uncovered = [text for text in match.numeric_check.uncovered if "activations of a prompt" in text]
    assert bool(uncovered) == bool(told) and all(told in text for text in uncovered)


def test_activations_of_a_graph_without_weights_or_with_other_inputs_are_told(planted_transform):
    class Cached(Decoder):
        def forward(self, input_ids, cache):
            return self.gated(self.embed(input_ids) + cache)

    with torch.device("meta"):
        bare = export_graph(Decoder(100), (torch.zeros(1, 3, dtype=torch.int64),))
    cached = export_graph(Cached(100), (torch.tensor([[1, 2, 3]]), torch.randn(1, 3, 8)))
    for gm, told in ((bare, "the weights have no values"), (cached, "the graph also reads %cache")):
        (match,) = planted_transform(gm, faulty("")).matches
        TransformRegistry._known.pop("planted")
        assert any("activations of a prompt" in text and told in text for text in match.numeric_check.uncovered)


class Weighted(nn.Module):
    """Its weight is ones, as that of a norm that was never trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        return x.sin() * self.weight


def weighted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.sin() * weight


def in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x.sin()


def rolled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.sin() * weight.roll(1, 0)


def left_out(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.sin()


def test_weights_that_are_all_ones_hide_nothing(planted_transform):
    """They are read with other values; where the replacement does not read them, that is told."""

    def run(replacement):
        rewrites = [Rewrite(weighted, replacement, {"x": "b d", "weight": "d"})]
        planted = type("Planted", (PatternTransform,), {"__doc__": "For a test.", "rewrites": lambda self: rewrites})
        module = Weighted()
        try:
            (match,) = planted_transform(export_graph(module, (torch.randn(3, 8),)), planted).matches
        finally:
            TransformRegistry._known.pop("planted", None)
        assert torch.equal(module.weight, torch.ones(8))  # the module's own are as they were
        return match.numeric_check.uncovered

    told = "other values of weights that it does not read, each the same throughout: (8,)"
    assert told not in run(in_order) and told in run(left_out)
    with pytest.raises(TransformError, match=r"planted failed .* is off by"):
        run(rolled)


def over_root(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype)


def a_percent_more(x: torch.Tensor, eps: float) -> torch.Tensor:
    return over_root(x, eps * 1.01)


@pytest.mark.parametrize("replacement", [over_root, a_percent_more])
def test_a_percent_of_an_eps_shows_in_16_bits_too(replacement, planted_transform):
    """Below the roundings of bfloat16, whatever the machine: the piece is tried with small values in float32 too."""

    class Norm(nn.Module):
        def forward(self, x):
            return over_root(x, 1e-5)

    rewrites = [Rewrite(over_root, replacement, {"x": "b d"})]
    planted = type("Planted", (PatternTransform,), {"__doc__": "For a test.", "rewrites": lambda self: rewrites})
    gm = export_graph(Norm(), (torch.randn(3, 8, dtype=torch.bfloat16),))
    if replacement is over_root:
        assert len(planted_transform(gm, planted).matches) == 1
        return
    with pytest.raises(TransformError, match=r"is off by .* on small inputs \(float32"):
        planted_transform(gm, planted)


@pytest.mark.some(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [name for name in FAULTS if name])
def test_a_wrong_one_is_found_and_taken_back(fault, dtype, graphs, planted_transform):
    gm = exported(graphs[dtype])
    before = graph_text(gm.graph)
    with pytest.raises(TransformError, match="planted failed and was rolled back: the replacement at %mul") as raised:
        planted_transform(gm, faulty(fault))
    error = str(raised.value)
    assert graph_text(gm.graph) == before
    named = {"one token": "sizes 1", "at 37 tokens": "37", "strided": "transposed", "writes its input": "writes into"}
    assert named.get(fault, "") in error, error


# ── edits that nobody reports ────────────────────────────────────────────────────────────────────────────────────


class Silent(BaseTransform):
    """Edits the graph and says that it found nothing."""

    edit = staticmethod(lambda gm: None)

    def apply(self, gm, context):
        self.edit(gm)
        return Outcome(reason="nothing here")


def first(gm, op):
    return next(node for node in calls(gm.graph) if is_op(node, op))


def rewires(gm):
    silu = first(gm, aten.silu.default)
    silu.replace_all_uses_with(silu.args[0])


def adds(gm):
    silu = first(gm, aten.silu.default)
    editor = Editor(gm, "silent")
    twice = editor.call(aten.mul.Tensor, (silu.args[0], 2), before=silu, like=silu)
    silu.update_arg(0, twice)


def another_op(gm):
    first(gm, aten.silu.default).target = aten.relu.default


def another_literal(gm):
    output = output_node(gm.graph)
    output.args = ([output.args[0][0], 1],)


def writes_weight(gm):
    with torch.no_grad():
        next(gm.parameters()).mul_(2)


def swaps_weight(gm):
    name, weight = next(gm.named_parameters())
    attach_state(gm, name, nn.Parameter(weight.detach() * 2))


EDITS = {edit.__name__: edit for edit in (rewires, adds, another_op, another_literal, writes_weight, swaps_weight)}


@pytest.mark.parametrize("verify", ["structure", "matches"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_without_a_match_is_an_error_that_names_it(edit, verify, graphs, planted_transform):
    gm = exported(graphs[torch.float32])
    before = graph_text(gm.graph)
    weight = next(gm.parameters()).detach().clone()
    with pytest.raises(TransformError, match=r"planted failed and was rolled back: .*(no match|weight)"):
        planted_transform(gm, type("Planted", (Silent,), {"edit": staticmethod(EDITS[edit])}), verify)
    assert graph_text(gm.graph) == before
    if edit == "swaps_weight":
        assert torch.equal(next(gm.parameters()), weight)


def test_an_edit_beside_a_match_is_an_error_too(graphs, planted_transform):
    class Planted(PatternTransform):
        """For a test."""

        def rewrites(self):
            return [Rewrite(gated_silu, fuse_swiglu.silu_fused, fuse_swiglu.SHAPES)]

        def apply(self, gm, context):
            outcome = super().apply(gm, context)
            other = first(gm, aten.linear.default)
            other.args = (other.args[0], [n for n in calls(gm.graph) if is_op(n, aten.linear.default)][1].args[1])
            return outcome

    gm = exported(graphs[torch.float32])
    with pytest.raises(TransformError, match=r"%linear .* was changed, and none of its 1 matches says so"):
        planted_transform(gm, Planted, "structure")


def test_a_transform_that_does_nothing_may(graphs, planted_transform):
    record = planted_transform(exported(graphs[torch.float32]), Silent, "matches")
    assert record.status == "no_match" and record.reason == "nothing here"


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_layers_are_tried_once_and_merged_weights_each(monkeypatch):
    """Two layers of one kind: the second is not tried, unless the transform made a weight for it."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Gated(torch.float32) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    tried = []
    real = PairTrials.try_one
    monkeypatch.setattr(PairTrials, "try_one", lambda self, trial: (tried.append(self.anchor), real(self, trial)))
    gm = export_graph(Layers(), (torch.randn(2, 5, 8),))
    report = run_pipeline(gm, load_config({"verify": "matches"}))
    assert len(report.transforms["fuse_swiglu"].matches) == len(report.transforms["merge_gate_up"].matches) == 3
    by_anchor = Counter(tried)
    assert sorted(by_anchor[match.anchor] for match in report.transforms["fuse_swiglu"].matches)[:2] == [0, 0]
    merged = sorted(by_anchor[match.anchor] for match in report.transforms["merge_gate_up"].matches)
    assert merged[0] >= 1 and merged[-1] > 10


def test_a_wrong_weight_of_a_later_layer_is_found(graphs, monkeypatch):
    """Merged weights are made layer by layer: one of them may be wrong by itself."""
    made = []
    real = merge.merge_linears

    def second_is_wrong(editor, linears, name, held):
        result = real(editor, linears, name, held)
        made.append(name)
        if len(made) == 2:
            weight = next(node for node in result if node.op == "get_attr")
            attach_state(editor.gm, weight.target, nn.Parameter(attribute(editor.gm, weight.target) * 1.5))
        return result

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Gated(torch.float32) for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    monkeypatch.setattr(merge, "merge_linears", second_is_wrong)
    gm = export_graph(Layers(), (torch.randn(2, 5, 8),))
    with pytest.raises(TransformError, match=r"merge_gate_up failed .* is off by"):
        run_pipeline(gm, load_config({"verify": "matches"}))
