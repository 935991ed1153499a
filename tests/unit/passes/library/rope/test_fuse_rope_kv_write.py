"""fuse_rope_kv_write: rotation and cache write as one op, in graphs and in the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graft
from conftest import graph_of, tiny
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.models.load import load_model
from graft.ops.paged_batches import make
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import order_transforms, run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from marks import short

load_all()
NAME = "fuse_rope_kv_write"
ON_CPU = {"transforms": {NAME: {"devices": ["cpu"]}}}
H, KV, D = 4, 2, 16
ops = torch.ops.graft


def fuse(module, args):
    others = {n: {"enabled": n == NAME} for n in TransformRegistry.names()}
    config = load_config({"transforms": others | {NAME: {"devices": ["cpu"]}}})
    gm = export_graph(module, args)
    before = graph_text(gm.graph)
    return gm, run_pipeline(gm, config).transforms[NAME], before


class Layer(nn.Module):
    """Named ops as insert_kv_cache leaves them; `case` says what is odd about them."""

    def __init__(self, case="", norm="", r=D, interleaved=False):
        super().__init__()
        self.case, self.norm, self.r, self.interleaved = case, norm, r, interleaved
        g = torch.Generator().manual_seed(1)
        self.q_norm, self.k_norm = (nn.Parameter(torch.randn(D, generator=g)) for _ in range(2))

    def rotate(self, x, weight, cos, sin, eps=1e-5):
        x = ops.rms_norm(x, weight, eps, 1.0, True) if self.norm else x
        return ops.rope(x.transpose(1, 2), cos, sin, self.interleaved)

    def forward(self, x, y, v, cos, sin, k_cache, v_cache, *layout):
        case = self.case
        x = x.clone()
        q = self.rotate(x, self.q_norm, cos, sin)
        if case == "other angles":
            cos = cos.neg()
        if case == "keys in pairs":
            self.interleaved = True
        k = self.rotate(y, self.k_norm, cos, sin, 1e-3 if case == "other eps" else 1e-5)
        self.interleaved = False if case == "keys in pairs" else self.interleaved
        if case == "queries scaled":
            q = q * 0.5
        if case == "keys not rotated":
            k = y.transpose(1, 2)
        if case == "written in between":
            x.add_(1)
        out = ops.paged_attention(q, k, v, k_cache, v_cache, *layout, 0.25, 9)
        return (out, k.exp()) if case == "a second reader" else (out,)

    def inputs(self):
        g = torch.Generator().manual_seed(0)
        q, k, v, *rest = make((1, 6), (20, 3), H, KV, D, (None, None, False), "cpu", torch.float32, g)
        angle = torch.randn(1, 1, 7, self.r, generator=g)
        rest = [t for t in rest if isinstance(t, torch.Tensor)]
        return (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v, angle.cos(), angle.sin(), *rest)


def cloned(args):
    return tuple(a.clone() for a in args)


@pytest.mark.parametrize(
    "options",
    [{}, {"r": 8}, {"interleaved": True}, {"norm": "apart"}, {"norm": "apart", "interleaved": True, "r": 8}],
    ids=str,
)
def test_the_fused_graph_computes_and_writes_the_same_bits(options):
    module = Layer(**options)
    args = module.inputs()
    gm, record, _ = fuse(module, args)
    assert len(record.matches) == 1 and not record.near_misses
    targets = [n.target for n in calls(gm.graph)]
    assert ops.rope_kv_write.default in targets and ops.cached_attention.default in targets
    gone = (ops.paged_attention.default, ops.rope.default, ops.rms_norm.default)
    assert not set(gone) & set(targets)
    with torch.no_grad():
        mine, theirs, wrong = cloned(args), cloned(args), cloned(args)
        wrong[4].neg_()
        (found,), (expected,), (other,) = gm(*mine), module(*theirs), gm(*wrong)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # whole prompts are read from the cache now
    assert torch.equal(mine[5], theirs[5]) and torch.equal(mine[6], theirs[6])
    assert not torch.equal(mine[5], args[5]) and not torch.allclose(other, expected, rtol=0.01, atol=0.01)


def test_norms_that_differ_stay_and_the_rest_fuses():
    module = Layer("other eps", norm="apart")
    gm, record, _ = fuse(module, module.inputs())
    assert [match.pattern for match in record.matches] == ["paged plain"]
    assert sum(is_op(n, ops.rms_norm.default) for n in calls(gm.graph)) == 2


@pytest.mark.parametrize(
    ("case", "norm", "reason"),
    [
        ("other angles", "", "rotate by different cos"),
        ("keys in pairs", "", "rotate by different interleaved: False, True"),
        ("queries scaled", "", "queries are not rotated: %mul"),
        ("keys not rotated", "", "keys are not rotated: %transpose"),
        ("a second reader", "", "has a second reader"),
        ("written in between", "", "is written in place between"),
    ],
)
def test_what_must_stay_is_refused_byte_for_byte(case, norm, reason):
    module = Layer(case, norm)
    gm, record, before = fuse(module, module.inputs())
    assert record.status == "no_match" and reason in record.reason, record
    assert len(record.near_misses) == 1 and graph_text(gm.graph) == before


def test_it_is_skipped_where_no_kernel_does_it():
    module = Layer()
    config = load_config({"transforms": {n: {"enabled": n == NAME} for n in TransformRegistry.names()}})
    gm = export_graph(module, module.inputs())
    record = run_pipeline(gm, config).transforms[NAME]
    assert (
        record.status == "skipped" and record.reason == "it is for cuda and the native backend, the graph is on cpu"
    )
    order = order_transforms(config)
    assert order.index("insert_kv_cache") < order.index(NAME) < order.index("widen_linear")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "count"), short([("qwen3", 2), ("olmo-2", 2), ("smollm3", 3), ("gpt2", 0)], ("smollm3", 3))
)
def test_every_layer_that_rotates_fuses(family, count):
    """SmolLM3 rotates in three layers of four; OLMo 2 norms whole projections, which stays; GPT-2 does not rotate."""
    model = load_model(f"tiny-{family}", dtype="float32", device="meta")
    gm = graph_of(model.module)
    config = load_config({"transforms": {NAME: {"devices": ["meta"]}}})
    record = run_pipeline(gm, config, Context(route="decoder")).transforms[NAME]
    assert len(record.matches) == count
    assert {match.pattern for match in record.matches} <= {"paged transposed" if family == "qwen3" else "paged plain"}
    if not count:
        assert record.reason == "no attention of the graph reads rotated queries and keys"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", short(["llama", "gemma-3", "glm-4"], "glm-4"))
def test_engine_tokens_stay_those_of_hugging_face(family):
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 128, (n,), generator=g).tolist() for n in (1, 13, 30)]
    llm = graft.LLM(
        f"tiny-{family}", dtype="float32", device="cpu", config=ON_CPU, max_num_batched_tokens=20, backend="eager"
    )
    assert len(llm.report.transforms[NAME].matches) == llm.model.layers
    assert llm.report.kernels["graft::cached_attention"].names == ("reference",)
    outputs = llm.generate(prompts, graft.SamplingParams(max_tokens=12, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
        expected = tiny(family).module.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert output.token_ids == expected[0, len(prompt) :].tolist()
    assert len({token for output in outputs for token in output.token_ids}) > 4, "the tokens vary"
