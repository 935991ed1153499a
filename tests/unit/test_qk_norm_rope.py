"""fuse_qk_norm_rope: the norm of each head and its rotation as one op, in graphs and in the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graft
from conftest import graph_of, tiny
from graft.graph.nodes import calls, is_op
from graft.graph.text import graph_text
from graft.graph.trace import export_graph
from graft.models.load import load_model
from graft.ops import OPS
from graft.ops.rms_norm.reference import rms_norm
from graft.ops.rope.reference import rope
from graft.transforms.base import Context
from graft.transforms.config import load_config
from graft.transforms.pipeline import order_transforms, run_pipeline
from graft.transforms.registry import TransformRegistry, load_all

load_all()
NAME = "fuse_qk_norm_rope"
ON = {"transforms": {NAME: {"enabled": True}}}
B, S, H, D = 2, 5, 3, 16
ops = torch.ops.graft


def fuse(module, args, *names):
    config = load_config({"transforms": {n: {"enabled": n in names} for n in TransformRegistry.names()}})
    gm = export_graph(module, args)
    before = graph_text(gm.graph)
    return gm, run_pipeline(gm, config).transforms[NAME], before


class Heads(nn.Module):
    """Named ops as fuse_rms_norm and fuse_rope leave them."""

    def __init__(self, r=D, offset=0.0, cast_last=False, interleaved=False, heads_first=True, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, generator=torch.Generator().manual_seed(1)).to(dtype))
        self.options, self.interleaved, self.heads_first = (offset, cast_last), interleaved, heads_first
        self.r = r

    def forward(self, x, cos, sin):
        x = ops.rms_norm(x, self.weight, 1e-5, *self.options)
        return ops.rope(x.transpose(1, 2) if self.heads_first else x, cos, sin, self.interleaved)

    def inputs(self, dtype=torch.float32):
        g = torch.Generator().manual_seed(0)
        angle = torch.randn((B, 1, S, self.r) if self.heads_first else (B, S, 1, self.r), generator=g)
        return torch.randn(B, S, H, D, generator=g).to(dtype), angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"r": 8},
        {"heads_first": False},
        {"interleaved": True},
        {"offset": 1.0, "cast_last": True},
        {"cast_last": True, "r": 8, "interleaved": True, "heads_first": False},
    ],
    ids=str,
)
def test_norm_and_rotation_become_one_op_bit_for_bit_r15(options, dtype):
    module = Heads(**options, dtype=dtype)
    args = module.inputs(dtype)
    gm, record, _ = fuse(module, args, NAME)
    assert len(record.matches) == 1 and not record.near_misses
    targets = [n.target for n in calls(gm.graph)]
    assert ops.rms_norm_rope.default in targets
    assert ops.rms_norm.default not in targets and ops.rope.default not in targets
    with torch.no_grad():
        assert torch.equal(gm(*args), module(*args))
        x, cos, sin = args
        assert not torch.allclose(gm(x, cos, -sin), module(*args), rtol=0.01, atol=0.01), "the test can fail"


def test_the_reference_is_the_two_references_in_a_row_r15():
    for dtype in (torch.float32, torch.bfloat16):
        module = Heads(dtype=dtype)
        x, cos, sin = module.inputs(dtype)
        x = x.transpose(1, 2)
        two = rope(rms_norm(x, module.weight, 1e-5, 1.0, True), cos, sin, True)
        assert torch.equal(OPS["rms_norm_rope"].reference(x, module.weight, cos, sin, 1e-5, 1.0, True, True), two)
        assert not torch.equal(OPS["rms_norm_rope"].reference(x, module.weight, cos, sin, 1e-5, 0.0, True, True), two)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("gemma-3", "bfloat16")])
def test_queries_and_keys_of_every_layer_fuse_r15(family, dtype):
    """The other transforms match as often as without it; merge_qkv still finds its linears."""
    model = load_model(f"tiny-{family}", dtype=dtype, device="meta")
    gm = graph_of(model.module)
    report = run_pipeline(gm, load_config(ON), Context(route="decoder"))
    counts = {name: len(record.matches) for name, record in report.transforms.items()}
    assert counts == model.family.expected_matches(model.layers) | {NAME: 2 * model.layers}
    fused = [n for n in calls(gm.graph) if is_op(n, ops.rms_norm_rope.default)]
    assert len(fused) == 2 * model.layers and not any(is_op(n, ops.rope.default) for n in calls(gm.graph))


def test_engine_tokens_stay_those_of_hugging_face_r15():
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 128, (n,), generator=g).tolist() for n in (1, 13, 30)]
    llm = graft.LLM("tiny-qwen3", dtype="float32", device="cpu", config=ON, backend="eager")
    assert len(llm.report.transforms[NAME].matches) == 2 * 2
    outputs = llm.generate(prompts, graft.SamplingParams(max_tokens=16, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
        expected = tiny("qwen3").module.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert output.token_ids == expected[0, len(prompt) :].tolist()
    assert len({token for output in outputs for token in output.token_ids}) > 4, "the tokens vary"


def test_a_norm_over_the_whole_projection_is_refused_byte_for_byte_r15():
    """OLMo 2 norms before it splits into heads."""
    model = load_model("tiny-olmo-2", dtype="float32", device="meta")
    gm = graph_of(model.module)
    others = {n: {"enabled": n in ("fuse_rms_norm", "fuse_rope")} for n in TransformRegistry.names()}
    run_pipeline(gm, load_config({"transforms": others}))
    before = graph_text(gm.graph)
    alone = {n: {"enabled": n == NAME} for n in TransformRegistry.names()}
    record = run_pipeline(gm, load_config({"transforms": alone})).transforms[NAME]
    assert record.status == "no_match" and "norms the whole projection" in record.reason
    assert len(record.near_misses) == 2 * model.layers and "self_attn" in record.near_misses[0].anchor
    assert graph_text(gm.graph) == before


class Refused(Heads):
    def __init__(self, case):
        super().__init__()
        self.case = case

    def forward(self, x, cos, sin):
        y = x.clone()
        normed = ops.rms_norm(y, self.weight, 1e-5)
        if self.case == "written in between":
            y.add_(1)
        if self.case == "another op in between":
            normed = normed.exp()
        heads = normed.transpose(1, 2)
        turned = ops.rope(heads, cos, sin)
        if self.case == "a second reader":
            return turned, normed.exp()
        return (turned, heads) if self.case == "an inner value returned" else turned


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("a second reader", "has a second reader"),
        ("an inner value returned", "has a second reader"),
        ("written in between", "is written in place"),
        ("another op in between", "no rotary embedding of the graph reads an RMSNorm"),
    ],
)
def test_what_must_stay_two_ops_is_refused_byte_for_byte_r15(case, reason):
    module = Refused(case)
    gm, record, before = fuse(module, module.inputs(), NAME)
    assert record.status == "no_match" and reason in record.reason, record
    assert graph_text(gm.graph) == before


def test_it_is_off_until_measured_and_runs_before_what_reads_its_ops_r15():
    config = load_config()
    assert not config.transforms[NAME].enabled
    order = order_transforms(config)
    assert order.index("fuse_rope") < order.index(NAME) < order.index("fuse_add_rms_norm")
    assert order.index(NAME) < order.index("merge_qkv")


def test_a_model_without_head_norms_says_so_r15():
    gm = graph_of(load_model("tiny-llama", dtype="float32", device="meta").module)
    report = run_pipeline(gm, load_config(ON), Context(route="decoder"))
    assert report.transforms[NAME].reason == "no rotary embedding of the graph reads an RMSNorm"
