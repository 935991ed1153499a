"""fuse_rope_into_attention: rotation, cache write and attention as one op, in graphs and in the engine."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import graft
from conftest import tiny
from graft.capture.decoder import capture_decoder
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.memory.writes import state_writes
from graft.models.load import load_model
from graft.ops.paged_batches import make
from graft.ops.rope_attention import reference
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import order_transforms, run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from marks import short

load_all()
NAME, BEFORE = "fuse_rope_into_attention", "fuse_rope_kv_write"
H, KV, D = 4, 2, 16
ops = torch.ops.graft


def on(*names, device="cpu"):
    """A configuration in which the named transforms run on the device."""
    return {"transforms": {name: {"devices": [device]} for name in names}}


def fuse(module, args):
    others = {n: {"enabled": n == NAME} for n in TransformRegistry.names()}
    config = load_config({"transforms": others | on(NAME)["transforms"]})
    gm = export_graph(module, args)
    before = graph_text(gm.graph)
    return gm, run_pipeline(gm, config).transforms[NAME], before


class Layer(nn.Module):
    """Named ops as fuse_rope_kv_write leaves them; `case` says what is odd about them."""

    def __init__(self, case="", norm=False, r=D, interleaved=False, options=(None, None, False)):
        super().__init__()
        self.case, self.norm, self.r, self.interleaved, self.options = case, norm, r, interleaved, options
        g = torch.Generator().manual_seed(1)
        self.q_norm, self.k_norm = (nn.Parameter(torch.randn(D, generator=g)) for _ in range(2))

    def forward(self, x, k, v, cos, sin, k_cache, v_cache, slots, *rest):
        case = self.case
        layout, sinks = rest[:5], rest[5] if self.options[2] else None
        norms = (self.q_norm, self.k_norm, 1e-5, 1.0, True) if self.norm else ()
        x = x.clone()
        q = ops.rope_kv_write(x, k, v, cos, sin, k_cache, v_cache, slots, self.interleaved, *norms)
        turned, more = q, ()
        if case == "queries from elsewhere":
            q = q * 0.5
        if case == "queries that were not turned":
            q = x
        if case == "other caches":
            k_cache, v_cache = v_cache, k_cache
        if case == "queries written":
            x.add_(1)
        if case == "cache written":
            k_cache.mul_(2)
        if case == "cache read":
            more = (k_cache.sum(),)
        out = ops.cached_attention(q, k_cache, v_cache, *layout, 0.25, *self.options[:2], sinks)
        return (out, turned.exp()) if case == "a second reader" else (out, *more)

    def inputs(self):
        g = torch.Generator().manual_seed(0)
        q, k, v, *rest = make((1, 6), (20, 3), H, KV, D, self.options, "cpu", torch.float32, g)
        angle = torch.randn(1, 1, 7, self.r, generator=g)
        return q, k, v, angle.cos(), angle.sin(), *(t for t in rest if isinstance(t, torch.Tensor))


def cloned(args):
    return tuple(a.clone() for a in args)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"r": 8, "options": (9, None, False)},
        {"interleaved": True, "options": (None, 5.0, False)},
        {"norm": True, "options": (None, None, True)},
        {"norm": True, "interleaved": True, "r": 8, "options": (9, 5.0, True)},
    ],
    ids=str,
)
def test_the_fused_graph_computes_and_writes_the_same_bits(options):
    module = Layer(**options)
    args = module.inputs()
    gm, record, _ = fuse(module, args)
    assert len(record.matches) == 1 and not record.near_misses
    targets = [n.target for n in calls(gm.graph)]
    assert targets.count(ops.rope_attention.default) == 1
    assert not {ops.rope_kv_write.default, ops.cached_attention.default} & set(targets)
    with torch.no_grad():
        mine, theirs, wrong = cloned(args), cloned(args), cloned(args)
        wrong[4].neg_()
        (found,), (expected,), (other,) = gm(*mine), module(*theirs), gm(*wrong)
    assert torch.equal(found, expected) and not torch.allclose(other, expected, rtol=0.01, atol=0.01)
    assert torch.equal(mine[5], theirs[5]) and torch.equal(mine[6], theirs[6])
    assert not torch.equal(mine[5], args[5]) and not torch.equal(mine[6], args[6])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("queries from elsewhere", "is aten.mul.Tensor, expected graft.rope_kv_write"),
        ("queries that were not turned", "is aten.clone, expected graft.rope_kv_write"),
        ("other caches", "again, found"),
        ("a second reader", "has a second reader"),
        ("queries written", "is written in place between the nodes"),
        ("cache written", "again, found %mul_"),  # the attention reads what %mul_ returns
        ("cache read", "in between needs what the match writes as it is then"),
    ],
)
def test_what_must_stay_is_refused_byte_for_byte(case, reason):
    module = Layer(case)
    gm, record, before = fuse(module, module.inputs())
    assert record.status == "no_match" and reason in record.reason, record
    (miss,) = record.near_misses
    assert reason in miss.reason and graph_text(gm.graph) == before


def test_it_is_skipped_where_no_kernel_does_it():
    module = Layer()
    config = load_config({"transforms": {n: {"enabled": n == NAME} for n in TransformRegistry.names()}})
    gm = export_graph(module, module.inputs())
    record = run_pipeline(gm, config).transforms[NAME]
    assert (
        record.status == "skipped" and record.reason == "it is for cuda and the native backend, the graph is on cpu"
    )
    order = order_transforms(config)
    assert order.index(BEFORE) < order.index(NAME)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "count"), short([("olmo-2", 2), ("smollm3", 3), ("cohere", 2), ("gpt2", 0)], ("olmo-2", 2))
)
def test_every_layer_that_turns_fuses(family, count):
    model = load_model(f"tiny-{family}", dtype="float32", device="meta")
    gm = capture_decoder(model.module)
    config = load_config(on(BEFORE, NAME, device="meta"))
    report = run_pipeline(gm, config, Context(route="decoder"))
    record = report.transforms[NAME]
    assert len(record.matches) == len(report.transforms[BEFORE].matches) == count and not record.near_misses
    assert sum(is_op(node, ops.rope_attention.default) for node in calls(gm.graph)) == count
    assert count or record.reason == "the graph has no graft::cached_attention"
    writes = [write for write in state_writes(gm) if is_op(write.node, ops.rope_attention.default)]
    assert len(writes) == 2 * count and all(write.positional for write in writes), "keys and values, at slots"


def tokens(llm):
    """Prompts of several lengths, in chunks of 20, that end at different steps."""
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 128, (n,), generator=g).tolist() for n in (1, 13, 30)]
    params = [graft.SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 7, 10)]
    return [output.token_ids for output in llm.generate(prompts, params)]


def other_way(q, k, v, cos, sin, *rest):
    return ops.rope_kv_write(q, k, v, cos, -sin, *rest)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", short(["llama", "qwen3", "gemma-3"], "qwen3"))
def test_engine_tokens_stay_the_same(family):
    """Qwen 3 and Gemma 3 norm their heads; Gemma 3 has windows too."""
    with_it, without, plain = (
        graft.LLM(tiny(family), config=config, max_num_batched_tokens=20, backend="eager")
        for config in (on(BEFORE, NAME), on(BEFORE), None)
    )
    layers = with_it.model.layers
    assert len(with_it.report.transforms[NAME].matches) == layers and layers > 1
    assert with_it.report.kernels["graft::rope_attention"].names == ("reference",)
    assert not {"graft::rope_kv_write", "graft::cached_attention"} & set(with_it.report.kernels)
    assert "graft::cached_attention" in without.report.kernels
    assert without.report.transforms[NAME].reason == "it is for cuda and the native backend, the graph is on cpu"
    found = tokens(with_it)
    assert found == tokens(without) == tokens(plain)
    assert len({token for row in found for token in row}) > 4, "the tokens vary"
    with mock.patch.object(reference, "rope_kv_write", other_way):
        assert tokens(with_it) != found
