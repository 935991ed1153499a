"""graft discover: fusion candidates, what they would save, which kernel exists."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graft.base.errors import DumpError, ShapesUnknown, UnknownCandidate, UnknownModel, UnknownTransform, UsageError
from graft.ir.nodes import calls, placeholders
from graft.ir.patterns.match import Finder
from graft.ir.trace import export_graph, trace_function
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.workbench.discover import Machine, discover, discover_model, discover_run
from graft.workbench.discover.find import order_of
from graft.workbench.discover.sources import is_run, read_tokens
from graft.workbench.discover.subgraph import made_up_inputs, run_in_float64
from graft.workbench.dump import dump_model

FUSIONS = ("fuse_rms_norm", "fuse_swiglu", "fuse_rope", "fuse_add_rms_norm")
OFF = {"transforms": {name: {"enabled": False} for name in FUSIONS}}
LAYERS = 3


class CubedReluMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).pow(3))


class GatedResidual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.sigmoid(self.gate(x)) * self.value(x)


class LogitScaledNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.scale = nn.Parameter(torch.rand(()))
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        return self.mix(normed * self.scale.exp())


class Silu(nn.Module):
    """Not novel: aten.silu spelled by hand."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return self.mix(x) * torch.sigmoid(self.mix(x))


class Stack(nn.Module):
    def __init__(self, block, width=16):
        super().__init__()
        self.layers = nn.ModuleList([block(width) for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def graph_of(module, dynamic=True):
    sizes = {0: torch.export.Dim("b"), 1: torch.export.Dim("s")} if dynamic else None
    return export_graph(module.eval(), (torch.randn(2, 5, 16),), dynamic_shapes=(sizes,) if dynamic else None)


def transformed(module):
    gm = graph_of(module)
    run_pipeline(gm, load_config(), Context())
    return gm


@pytest.fixture(scope="module")
def switched_off():
    return discover_model("tiny-llama", load_config(OFF))


def test_fusions_that_are_off_are_found_again_at_the_top_with_their_op(switched_off):
    top = [(c.existing[0].symbol, c.count, c.existing[0].transforms) for c in switched_off.worthwhile]
    assert top == [
        ("graft::add_rms_norm", 4, ("fuse_rms_norm", "fuse_add_rms_norm")),
        ("graft::rope", 4, ("fuse_rope",)),
        ("graft::rms_norm", 1, ("fuse_rms_norm",)),
        ("graft::swiglu", 2, ("fuse_swiglu",)),
    ]
    for candidate in switched_off.worthwhile:
        assert candidate.recommendation == "use_existing_kernel" and candidate.lookup == "found"
        assert candidate.existing[0].file == f"graft/ops/{candidate.existing[0].symbol.removeprefix('graft::')}/op.py"
    norm = switched_off.worthwhile[2]
    assert "aten::rms_norm" in [found.symbol for found in norm.existing]
    assert norm.sites == ("model.layers.*.input_layernorm",)
    savings = [c.saving_us for c in switched_off.worthwhile]
    assert savings == sorted(savings, reverse=True)
    assert switched_off.nothing_left() == ""


def test_bytes_and_launches_are_counted_from_the_recorded_shapes(switched_off):
    swiglu = switched_off.worthwhile[3]
    one, many = swiglu.estimates
    # silu reads and writes 64 bf16, mul reads two and writes one; fused: two in, one out; two layers
    assert (one.tokens, one.bytes_now, one.bytes_after) == (1, 2 * 5 * 64 * 2, 2 * 3 * 64 * 2)
    assert (many.tokens, many.bytes_now) == (512, 512 * one.bytes_now)
    assert (one.launches_now, one.launches_after) == (4, 2)
    machine = switched_off.machine
    saved = machine.microseconds(one.launches_now - one.launches_after, one.bytes_now - one.bytes_after)
    assert one.saving_us == pytest.approx(saved) and 0 < one.share < 1
    assert "s70 = 1 and 512" in switched_off.sizes or any("1 and 512" in note for note in switched_off.sizes)


def test_numbers_that_were_measured_take_the_place_of_the_defaults():
    gm = graph_of(Stack(GatedResidual))
    slow = discover(gm, machine=Machine(10.0, 20.0, "as given")).candidates[0]
    fast = discover(gm, tokens=(7,)).candidates[0]
    assert [e.tokens for e in fast.estimates] == [7]
    assert slow.saving_us > 10 * fast.saving_us


@pytest.mark.parametrize(
    ("block", "called", "kind"),
    [
        (CubedReluMLP, ("relu", "pow"), "gemm_epilogue"),
        (GatedResidual, ("sigmoid", "mul", "add"), "gemm_epilogue"),
        (LogitScaledNorm, ("rms_norm", "exp", "mul"), "norm_chain"),
    ],
)
def test_a_novel_block_is_found_counted_and_needs_a_kernel(block, called, kind):
    found = discover(transformed(Stack(block)))
    (candidate,) = found.worthwhile
    assert sorted(candidate.title.split(" → ")) == sorted(called)
    assert (candidate.count, candidate.kind, candidate.sites) == (LAYERS, kind, (f"layers.* × {LAYERS}",))
    assert (candidate.lookup, candidate.recommendation) == ("not_found", "needs_triton_fallback")
    assert any("dynamic shapes" in risk for risk in candidate.risks)


class SixInputs(nn.Module):
    """More inputs than are tried in every order."""

    def __init__(self, width):
        super().__init__()
        self.parts = nn.ParameterList(torch.rand(width) for _ in range(5))
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        a, b, c, d, e = self.parts
        return self.mix(torch.tanh(x * a + b) * torch.sin(x * c + d) * e)


def test_what_could_not_be_compared_is_deferred_and_names_the_next_test():
    (candidate,) = discover(transformed(Stack(SixInputs))).candidates
    assert (candidate.lookup, candidate.recommendation) == ("not_found", "defer")
    assert "it has 6 inputs, more than 5" in candidate.reason and "graft search FILE.py" in candidate.next_step
    assert candidate.next_step in candidate.reason and candidate.to_dict()["next_step"] == candidate.next_step


def test_complexity_and_numeric_risk_order_what_saves_alike():
    (plain,) = discover(transformed(Stack(CubedReluMLP))).worthwhile
    (norm,) = discover(transformed(Stack(LogitScaledNorm))).worthwhile
    assert (plain.complexity, plain.numeric_risk) == (2 + 1 + 1, "low")
    assert norm.complexity > plain.complexity
    alike = [
        replace(plain, id=name, complexity=complexity, numeric_risk=risk)
        for name, complexity, risk in (("a", 9, "high"), ("b", 9, "low"), ("c", 4, "low"))
    ]
    assert [one.id for one in sorted(alike, key=order_of)] == ["c", "b", "a"]
    half = replace(plain, id="d", estimates=tuple(replace(e, saving_us=e.saving_us / 2) for e in plain.estimates))
    assert [one.id for one in sorted([half, alike[0]], key=order_of)] == ["a", "d"]


def test_a_block_that_exists_under_another_spelling_is_not_novel():
    class Twice(Silu):
        def forward(self, x):
            y = self.mix(x)
            return y * torch.sigmoid(y)

    (candidate,) = discover(graph_of(Stack(Twice))).worthwhile
    assert candidate.recommendation == "use_existing_kernel"
    assert ("aten::silu", "torch/include/ATen/ops/silu.h") in [(e.symbol, e.file) for e in candidate.existing]


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-2, -1) * 0.25, dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_attention_is_found_in_graft_aten_and_inductor():
    (candidate, *_) = discover(graph_of(Stack(Attention))).worthwhile
    assert (candidate.kind, candidate.count) == ("attention_neighbour", LAYERS)
    symbols = {(found.where, found.symbol) for found in candidate.existing}
    assert {("graft", "graft::attention"), ("aten", "aten::scaled_dot_product_attention")} <= symbols
    inductor = [found for found in candidate.existing if found.where == "inductor"]
    assert inductor and inductor[0].file == "torch/_inductor/fx_passes/fuse_attention.py"
    assert inductor[0].symbol.startswith("_sfdp_pattern_")


def test_what_a_switch_brings_back_comes_before_a_new_kernel():
    off = load_config({"transforms": {"fuse_rms_norm": {"enabled": False}}})
    (candidate,) = discover(graph_of(Stack(LogitScaledNorm)), config=off).worthwhile
    assert candidate.recommendation == "use_existing_kernel" and "of its" in candidate.reason
    (novel,) = discover(graph_of(Stack(LogitScaledNorm))).worthwhile
    assert novel.recommendation == "needs_triton_fallback" and novel.saving_us > candidate.saving_us


def test_risks_name_second_readers_casts_and_writes(switched_off):
    risks = " ".join(switched_off.worthwhile[0].risks)
    assert "second readers: %add" in risks and "precision casts: bfloat16 and float32" in risks

    class Writes(GatedResidual):
        def forward(self, x):
            gate = torch.sigmoid(self.gate(x))
            self.seen.add_(1)
            return x + gate * self.value(x)

        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("seen", torch.zeros(()))

    (candidate,) = discover(graph_of(Writes(16), dynamic=False)).worthwhile
    assert any("mutation in between" in risk for risk in candidate.risks)
    assert not any("dynamic" in risk for risk in candidate.risks)


def test_a_fully_fused_model_has_nothing_worthwhile_left():
    found = discover_model("tiny-llama", load_config())
    assert found.worthwhile == () and found.candidates
    assert found.nothing_left().startswith("nothing worthwhile is left: the largest that was considered is ")
    assert all(candidate.reason for candidate in found.candidates)
    reasons = {c.kind: c.reason for c in found.candidates}
    assert reasons["position_table"] == "tabulate_rope takes it on a GPU, enabled already"
    assert reasons["attention_neighbour"] == "fuse_rope_kv_write takes it on a GPU, enabled already"


def test_what_is_switched_off_on_a_gpu_is_a_candidate_again():
    off = {"transforms": {"tabulate_rope": {"enabled": False}, "fuse_norm_into_matvec": {"enabled": False}}}
    found = discover_model("tiny-llama", load_config(off))
    assert {(c.kind, c.existing[0].transforms) for c in found.worthwhile} == {
        ("position_table", ("tabulate_rope",)),
        ("gemm_prologue", ("fuse_norm_into_matvec",)),
    }


def test_a_graph_of_products_alone_says_so():
    found = discover(graph_of(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))))
    assert found.candidates == () and "no two neighbouring calls" in found.nothing_left()


def test_ids_do_not_depend_on_names_sizes_or_weights_but_on_numbers():
    narrow, wide = (discover(graph_of(Stack(GatedResidual))), discover(graph_of(nn.Sequential(GatedResidual(16)))))
    assert narrow.candidates[0].id == wide.candidates[0].id

    class Other(LogitScaledNorm):
        def forward(self, x):
            return self.mix(
                self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)) * self.scale.exp()
            )

    first, second = (discover(graph_of(Stack(b))).candidates[0].id for b in (LogitScaledNorm, Other))
    assert first != second


def test_a_candidate_is_found_by_its_id_or_the_beginning_of_it(switched_off):
    candidate = switched_off.candidates[1]
    assert switched_off.find(candidate.id) is candidate and switched_off.find(candidate.id[:5]) is candidate
    for wrong in ("", "zzzz"):
        with pytest.raises(UnknownCandidate, match="graft discover"):
            switched_off.find(wrong)


@pytest.mark.parametrize("block", [CubedReluMLP, GatedResidual, LogitScaledNorm])
def test_the_subgraph_and_the_source_compute_what_the_model_does(block):
    candidate = discover(graph_of(Stack(block))).candidates[0]
    gm = candidate.subgraph()
    assert len(list(calls(gm.graph))) == len(candidate.nodes)
    inputs = made_up_inputs(gm)
    (expected,) = run_in_float64(gm, inputs)
    assert torch.equal(candidate.function()(*inputs), expected)
    assert torch.equal(gm(*inputs), expected)


@pytest.mark.parametrize("block", [CubedReluMLP, GatedResidual, LogitScaledNorm])
def test_the_source_is_a_pattern_that_matches_its_model_everywhere(block):
    gm = graph_of(Stack(block))
    candidate = discover(gm).candidates[0]
    matches, _ = Finder(candidate.function(), candidate.pattern_shapes()).find(gm.graph)
    assert len(matches) == candidate.count == LAYERS and candidate.pattern_problem() == ""


@cache
def found_in_gemma():
    """Tests only look at it."""
    return discover_model("tiny-gemma-2", load_config())


def test_a_candidate_that_cannot_be_a_pattern_says_why():
    found = found_in_gemma()
    norms = next(c for c in found.candidates if c.title == "rms_norm → add_rms_norm")
    assert norms.count == 3 and norms.pattern_problem() == ""  # two results, of which neither comes from the other
    table = next(c for c in found.candidates if c.kind == "position_table")
    assert "reads %size, a number known at run time only" in table.pattern_problem()
    other = replace(norms, count=4)
    assert other.pattern_problem() == "as a pattern it fits at 3 of its 4 sites"


def test_sources_of_a_model_run_and_give_the_same_graph(switched_off):
    for candidate in switched_off.worthwhile:
        gm = candidate.subgraph()
        examples = [
            torch.empty(
                [2 if not isinstance(s, int) else s for s in node.meta["val"].shape],
                dtype=node.meta["val"].dtype,
                device="meta",
            )
            for node in placeholders(gm.graph)
        ]
        again = trace_function(candidate.function(), examples)
        assert [n.target for n in calls(again.graph)] == [n.target for n in calls(gm.graph)]
        assert candidate.pattern_problem() == ""


def test_the_graph_stays_as_it_was():
    gm = graph_of(Stack(GatedResidual))
    before = str(gm.graph)
    discover(gm)
    assert str(gm.graph) == before


@pytest.mark.exhaustive
def test_a_run_on_disk_gives_the_same_candidates(switched_off, tmp_path):
    dump_model("tiny-llama", tmp_path / "run", load_config(OFF))
    found = discover_run(tmp_path / "run")
    assert [(c.id, c.count, c.recommendation, c.estimates) for c in found.candidates] == [
        (c.id, c.count, c.recommendation, c.estimates) for c in switched_off.candidates
    ]
    first = discover_run(tmp_path / "run", "captured")
    assert first.worthwhile and "captured" in first.model
    with pytest.raises(UnknownTransform, match="did you mean"):
        discover_run(tmp_path / "run", "fuse_ropes")


def test_bad_input_is_told(tmp_path):
    with pytest.raises(UnknownModel, match="tiny-llama"):
        discover_model("tiny-lama", load_config())
    with pytest.raises(DumpError, match="neither a folder of dumps"):
        is_run(str(tmp_path))
    with pytest.raises(DumpError, match="no folder of dumps"):
        discover_run(tmp_path)
    for wrong in ("", "0", "1,-2", "many"):
        with pytest.raises(UsageError, match="--tokens"):
            read_tokens(wrong)
    assert read_tokens("1,512") == (1, 512)


def test_unknown_shapes_are_an_error_that_says_what_to_do():
    gm = graph_of(Stack(GatedResidual))
    node = next(n for n in calls(gm.graph) if n.target is torch.ops.aten.sigmoid.default)
    del node.meta["val"]
    with pytest.raises(ShapesUnknown, match=r"%sigmoid .*no recorded shape.*graft dump"):
        discover(gm)


def test_a_dump_without_shapes_is_told(tmp_path):
    dump_model("tiny-llama", tmp_path / "run", load_config())
    last = sorted((tmp_path / "run").glob("[0-9]*.json"))[-1]
    data = json.loads(last.read_text())
    for entry in data["nodes"]:
        if entry["name"].startswith("linear"):
            entry["value"] = None
    last.write_text(json.dumps(data))
    with pytest.raises(ShapesUnknown, match="dump it again"):
        discover_run(tmp_path / "run")
