"""graft's fusions as a post-grad pass of Inductor. Most tests run the pass on the graph that Inductor would get."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.decomposition import select_decomp_table

import graft
from conftest import tiny
from graft.api import inductor_passes
from graft.base.errors import UnknownKey
from graft.ir.edit import Editor
from graft.ir.io.text import graph_text
from graft.testing import generated_kernels, post_grad_graph
from marks import short

FUSION_PASS = "post_grad_custom_pre_pass"
LLAMA = {"fuse_rms_norm": 5, "fuse_swiglu": 2, "fuse_rope": 4, "fuse_add_rms_norm": 4}


pytestmark = pytest.mark.usefixtures("fresh_compiler")  # of the testing kit


class Lab:
    """A backend that stops before Inductor's code generation: functional, decomposed, then graft's pass."""

    def __init__(self, config=None):
        self.options = graft.passes_for_inductor(config)
        self.before: list[str] = []
        self.graphs: list[torch.fx.Graph] = []
        self.first = len(inductor_passes._reports)

    def compile(self, function, dynamic=None):
        backend = aot_autograd(
            fw_compiler=self.lower,
            inference_compiler=self.lower,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        return torch.compile(function, backend=backend, dynamic=dynamic)

    def lower(self, gm, inputs):
        view_to_reshape(gm)
        self.before.append(graph_text(gm.graph))
        self.options[FUSION_PASS](gm.graph)
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    @property
    def reports(self):
        return inductor_passes._reports[self.first :]


def counts(report):
    return {name: len(record.matches) for name, record in report.transforms.items() if record.matches}


def graft_calls(graph):
    return [node for node in graph.nodes if str(node.target).startswith("graft.")]


class Block(nn.Module):
    def __init__(self, d=8, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.first = nn.Parameter(torch.rand(d) + 0.5)
        self.second = nn.Parameter(torch.rand(d) + 0.5)
        self.gate, self.up = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)

    def norm(self, x, weight):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * h.to(x.dtype)

    def forward(self, x):
        h = self.norm(x, self.first)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.norm(x, self.second)


FUSED = {"fuse_rms_norm": 2, "fuse_swiglu": 1, "fuse_add_rms_norm": 1}


@pytest.mark.parametrize(
    ("family", "dtype", "lengths"),
    [("llama", "float32", (9, 14)), ("llama", "bfloat16", (9,)), ("gemma-2", "bfloat16", (9,))],
)
@pytest.mark.exhaustive  # the short run: a block, and the same model through the backend in test_torch_compile.py
def test_fusions_on_inductors_graph_of_hugging_face_models(family, dtype, lengths):
    model, lab = tiny(family, dtype), Lab()
    compiled = lab.compile(model.module)
    for length in lengths:
        ids = torch.randint(3, 128, (2, length), generator=torch.Generator().manual_seed(length))
        if len(lengths) > 1:
            torch._dynamo.mark_dynamic(ids, 1)
        with torch.no_grad():
            got = compiled(input_ids=ids, use_cache=False).logits
            wanted = model.module(input_ids=ids, use_cache=False).logits
        limits = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got, wanted, **limits)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(got * 1.06, wanted, **limits)
    (report,) = lab.reports
    expected = model.family.expected_matches(model.layers)
    assert counts(report) == {name: expected[name] for name in LLAMA}
    for name, record in report.transforms.items():
        assert name in LLAMA or record.status in ("skipped", "disabled") or record.reason
    assert "taken apart" in report.transforms["merge_qkv"].reason
    fused = graft_calls(lab.graphs[0])
    assert len(fused) == expected["fuse_rms_norm"] + expected["fuse_swiglu"] + expected["fuse_rope"]
    for node in fused:
        assert "val" in node.meta and "modeling_" in node.meta["stack_trace"] and node.meta["made_by"] in LLAMA
    assert report.transforms["fuse_rope"].matches[0].module == "model.layers.0.self_attn"


def test_the_rest_of_the_graph_stays_as_inductor_made_it():
    module, lab, x = Block(), Lab(), torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(lab.compile(module)(x), module(x))
    assert counts(lab.reports[0]) == FUSED
    kept = [line.split("    #")[0] for line in lab.before[0].splitlines()]
    after = [line.split("    #")[0] for line in graph_text(lab.graphs[0]).splitlines()]
    strange = [line for line in after if line not in kept and "graft." not in line and "getitem" not in line]
    assert all(
        "add_rms_norm" in line or "swiglu" in line or "rms_norm" in line or "getitem" in line for line in strange
    ), strange
    assert not any("aten.to.dtype" in line or "aten.transpose" in line for line in after)


def test_a_graph_without_matches_is_untouched():
    lab = Lab()
    with torch.no_grad():
        lab.compile(lambda x: (x.t() @ x + 0).exp().to(torch.float64).view(-1))(torch.randn(3, 3))
    assert graph_text(lab.graphs[0]) == lab.before[0]
    records = lab.reports[0].transforms.values()
    assert all(record.reason or record.status == "disabled" for record in records)


def test_writes_to_inputs_stay():
    def step(x, cache, module):
        y = module(x)
        cache[1:3] = y
        return y * cache.sum()

    module, lab = Block(), Lab()
    caches = torch.zeros(4, 8), torch.zeros(4, 8)
    x = torch.randn(2, 8)
    with torch.no_grad():
        got, wanted = lab.compile(step)(x, caches[0], module), step(x, caches[1], module)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(*caches) and caches[0].any() and counts(lab.reports[0]) == FUSED


def test_a_symbolic_eps_is_a_near_miss():
    module, lab, x = Block(), Lab(), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(lab.compile(module, dynamic=True)(x), module(x), rtol=1e-6, atol=1e-6)
    record = lab.reports[0].transforms["fuse_rms_norm"]
    assert record.matches == () and "is computed, not a number" in record.reason
    assert counts(lab.reports[0]) == {"fuse_swiglu": 1}


def test_a_second_reader_is_refused_with_the_reason():
    class Read(Block):
        def forward(self, x):
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            return self.first * h, h

    module, lab, x = Read(), Lab(), torch.randn(3, 8)
    with torch.no_grad():
        lab.compile(module)(x)
    record = lab.reports[0].transforms["fuse_rms_norm"]
    assert record.matches == () and any("second reader" in miss.reason for miss in record.near_misses)
    assert graph_text(lab.graphs[0]) == lab.before[0]


def test_training_graphs_keep_their_gradients():
    """After AOTAutograd the backward is a graph of its own, so that fusing the forward is right."""
    module, other, lab = Block(), Block(), Lab()
    other.load_state_dict(module.state_dict())
    lab.compile(module)(torch.ones(3, 8)).square().sum().backward()
    other(torch.ones(3, 8)).square().sum().backward()
    for got, wanted in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-6)


def test_a_failing_transform_is_rolled_back_or_raised(monkeypatch):
    replace = Editor.replace

    def broken(self, old, new):
        replace(self, old, new)
        if self.made_by == "fuse_swiglu":
            raise ValueError("made to fail")

    monkeypatch.setattr(Editor, "replace", broken)
    module, x = Block(), torch.randn(3, 8)
    lab = Lab({"transforms": {"fuse_swiglu": {"on_error": "skip"}}})
    with torch.no_grad():
        torch.testing.assert_close(lab.compile(module)(x), module(x), rtol=1e-5, atol=1e-5)
    assert lab.reports[0].transforms["fuse_swiglu"].status == "rolled_back"
    assert counts(lab.reports[0]) == {"fuse_rms_norm": 2, "fuse_add_rms_norm": 1}
    assert not any("swiglu" in str(node.target) for node in lab.graphs[0].nodes)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="fuse_swiglu failed and was rolled back"):
        Lab().compile(module)(x)


def test_settings_decide_the_key_of_the_cache():
    def key(config=None):
        return graft.passes_for_inductor(config)[FUSION_PASS].uuid()

    off = {"transforms": {"fuse_rope": {"enabled": False}}}
    assert key() == key() and key(off) == key(off) != key()
    with pytest.raises(UnknownKey, match="enable"):
        graft.passes_for_inductor({"transforms": {"fuse_rope": {"enable": False}}})


@pytest.mark.exhaustive  # the short run: the graph above, and generated code in test_testing_kit_compiled.py
def test_through_inductor_to_the_generated_code():
    """All the way: the fused ops are calls in Inductor's code, and the numbers are eager's."""
    model = tiny("llama").module
    first = len(inductor_passes._reports)
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    made = generated_kernels(model, options=graft.passes_for_inductor(), input_ids=ids, use_cache=False)
    got = made.result.logits
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got.roll(1, 1), wanted, rtol=1e-5, atol=1e-5)
    (report,) = inductor_passes._reports[first:]
    assert counts(report) == LLAMA
    called = Counter(name.split(".")[3] for name in made.calls if name.startswith("torch.ops.graft."))
    assert called == {"rms_norm": 1, "add_rms_norm": 4, "rope": 4, "swiglu": 2}
    assert made.kernels  # what is left between them is Inductor's own


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", short(["llama", "gemma-2"], "gemma-2"))
def test_all_of_inductors_fx_passes_run_on_the_fused_graph(family):
    """Its own post-grad passes come after graft's; what they leave is executed."""
    model = tiny(family).module
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    seen = post_grad_graph(model, input_ids=ids, use_cache=False, options=graft.passes_for_inductor())
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(seen.result.logits, wanted, rtol=1e-5, atol=1e-5)
    assert "graft." not in "".join(seen.before) and seen.called.count("graft.rope") == 4


PROGRAM = """
import sys, torch, graft
from torch._dynamo.utils import counters
torch.manual_seed(0)
eps = float(sys.argv[1])
w = torch.nn.Parameter(torch.rand(8))
def norm(x):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
options = graft.passes_for_inductor()
x = torch.randn(3, 8)
with torch.no_grad():
    got = torch.compile(norm, options=options)(x)
    assert torch.allclose(got, norm(x), rtol=1e-5, atol=1e-6)
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
bypassed = counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"]
reports = graft.inductor_reports()
fused = sum(len(record.matches) for report in reports for record in report.transforms.values())
print("RESULT", hits > 0, bypassed, fused, len(reports), reports[-1].notes, sep="|")
"""


@pytest.mark.exhaustive
def test_a_second_process_finds_the_graph_in_the_cache():
    """An eps that no earlier run can have compiled; a fresh cache folder would cost a minute of C++ headers."""
    eps = repr(1e-5 + int.from_bytes(os.urandom(4)) * 1e-15)
    source = Path(graft.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "TORCHINDUCTOR_VEC_ISA_OK": "1", "OMP_NUM_THREADS": "1"}

    def result():
        done = subprocess.run([sys.executable, "-c", PROGRAM, eps], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split("RESULT|")[1].strip().split("|")

    assert result() == ["False", "0", "1", "1", "()"]
    hit, bypassed, fused, reports, notes = result()
    assert (hit, bypassed, fused, reports) == ("True", "0", "0", "1") and "came from Inductor's caches" in notes
