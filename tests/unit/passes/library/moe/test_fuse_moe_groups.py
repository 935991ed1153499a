"""fuse_moe on DeepSeek's routing: groups of experts, a bias of the choice, weights that are scaled, no set order."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from graft.ir.edit import second_module
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ops.cases import tolerance
from moe_cases import fuse

D, E, K = 16, 12, 3
aten = torch.ops.aten
V3 = {"n_group": 4, "topk_group": 2}
ONE = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
V2 = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
KINDS = {"v3": (3, V3), "v3, one group": (3, ONE), "v2": (2, V2), "v2, greedy": (2, GREEDY)}


def moe_block(kind, dtype=torch.float32):
    version, options = KINDS[kind]
    make, config = (DeepseekV3MoE, DeepseekV3Config) if version == 3 else (DeepseekV2Moe, DeepseekV2Config)
    settings = config(
        hidden_size=D, intermediate_size=24, moe_intermediate_size=24, n_routed_experts=E, num_experts_per_tok=K,
        n_shared_experts=1, num_attention_heads=4, **options,
    )  # fmt: skip
    settings._experts_implementation = "grouped_mm"
    module = make(settings).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=g) * 0.3)
    return module.to(dtype)


def inputs(n=40, dtype=torch.float32):
    return torch.randn(1, n, D, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_routing_of_deepseek_is_one_call(kind, dtype):
    module, x = moe_block(kind, dtype), inputs(dtype=dtype)
    gm, record, _ = fuse(module, x, dynamic=True)
    assert len(record.matches) == 1 and not record.near_misses
    assert not any(is_op(node, aten.topk.default, aten.gather.default) for node in calls(gm.graph))
    bound = 4 * tolerance(dtype, 24)
    for n in (40, 1):
        x = inputs(n, dtype)
        torch.testing.assert_close(gm(x), module(x), rtol=bound, atol=bound)


def routes_of(gm):
    return [node for node in calls(gm.graph) if is_op(node, torch.ops.graft.moe_route.default)]


WRONG = {  # argument of the op, by its place: what must not go unnoticed
    "without the bias": (6, None),
    "all groups": (8, 4),
    "groups by their best": (9, 1),
    "another factor": (11, 1.0),
    "not divided": (2, False),
}


@cache
def fused():
    """Captured once: whoever changes the graph takes a copy."""
    module = moe_block("v3")
    return module, fuse(module, inputs())[0]


@pytest.mark.parametrize("fault", WRONG)
def test_every_part_of_the_routing_counts(fault):
    (module, right), x = fused(), inputs()
    gm = second_module(right)
    torch.testing.assert_close(gm(x), module(x))
    (route,) = routes_of(gm)
    place, value = WRONG[fault]
    assert route.args[place] != value
    route.update_arg(place, value)
    gm.recompile()
    bound = 4 * tolerance(torch.float32, 24)
    assert not torch.allclose(gm(x), module(x), rtol=bound, atol=bound)


# ── what must not match ─────────────────────────────────────────────────────────────────────────────────────────


class Router(nn.Module):
    """DeepSeek-V3's, of which each part can be another."""

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.inner = moe_block("v3")

    def forward(self, x):
        inner, o = self.inner, self.options
        flat = x.view(-1, D)
        scores = nn.functional.linear(flat, inner.gate.weight).sigmoid()
        choice = scores + inner.gate.e_score_correction_bias
        choice = choice * 2 if o.get("later") else choice  # no scores: experts are weighed when they are chosen
        grouped = (scores if o.get("by") == "scores" else choice).view(-1, 4, 3)
        sums = grouped.topk(2, dim=-1, largest=o.get("best", True))[0].sum(-1)
        index = torch.topk(sums, k=o.get("top", 2), dim=-1, largest=o.get("groups", True), sorted=False)[1]
        mask = torch.zeros_like(sums).scatter_(1, index, o.get("flag", 1))
        column = mask.unsqueeze(1).expand(-1, 3, 4) if o.get("across") else mask.unsqueeze(-1).expand(-1, 4, 3)
        outside = column.reshape(-1, E).bool()
        choice = choice.masked_fill(outside if o.get("inside") else ~outside, o.get("filler", -torch.inf))
        values, ids = torch.topk(choice, K, dim=-1, sorted=False)
        if o.get("later"):
            return inner.experts(flat, ids, values.softmax(-1))
        weights = values if o.get("values") else (scores * 2 if o.get("other") else scores).gather(1, ids)
        y = inner.experts(flat, ids, weights)
        return (y, ids) if o.get("returned") else y


REFUSED = {
    "groups by the scores": ({"by": "scores"}, "does not put what is chosen by into 4 groups of 3"),
    "the worst of a group": ({"best": False}, "does not take the largest of a group"),
    "the worst groups": ({"groups": False}, "does not take the best groups"),
    "the mask says another number": ({"flag": 2}, "does not set a 1 for each of the best groups"),
    "the mask lies across the groups": ({"across": True}, "does not say the same of all experts of a group"),
    "the best are left out": ({"inside": True}, "expected aten.bitwise_not or aten.logical_not"),
    "what is left out may be chosen": ({"filler": 0.0}, "gives the experts of other groups 0.0, which may be chosen"),
    "weighed with the bias": ({"values": True}, "weigh the experts"),
    "weighed by something else": ({"other": True}, "does not take the scores"),
    "scored when they are chosen": ({"later": True}, "they are scored when they are chosen"),
    "somebody else reads the ids": ({"returned": True}, "has a second reader %output"),
}


def test_the_router_as_it_is_fuses():
    module, x = Router(), inputs()
    gm, record, _ = fuse(module, x)
    assert len(record.matches) == 1 and not record.near_misses
    torch.testing.assert_close(gm(x), module(x))


@pytest.mark.parametrize("name", REFUSED)
def test_another_routing_is_refused_with_the_reason_and_stays(name):
    options, reason = REFUSED[name]
    gm, record, before = fuse(Router(**options), inputs())
    assert record.status == "no_match" and graph_text(gm.graph) == before
    assert any(re.search(reason, miss.reason) for miss in record.near_misses), [m.reason for m in record.near_misses]


def test_groups_of_a_softmax_by_their_largest_fuse():
    module, x = FewExperts(k=3), inputs()
    gm, record, _ = fuse(module, x)
    assert len(record.matches) == 1 and not record.near_misses
    torch.testing.assert_close(gm(x), module(x))


def test_too_few_experts_in_the_groups_are_refused():
    gm, record, before = fuse(FewExperts(k=4), inputs())
    assert record.status == "no_match" and graph_text(gm.graph) == before
    assert any("in which there are not 4 experts" in miss.reason for miss in record.near_misses)


class FewExperts(nn.Module):
    """Four experts of one group of three: one that was left out is chosen as well."""

    def __init__(self, k):
        super().__init__()
        self.inner, self.k = moe_block("v3"), k

    def forward(self, x):
        inner = self.inner
        flat = x.view(-1, D)
        scores = nn.functional.linear(flat, inner.gate.weight).softmax(-1)
        sums = scores.view(-1, 4, 3).max(-1).values
        mask = torch.zeros_like(sums).scatter_(1, torch.topk(sums, 1, dim=-1)[1], 1)
        outside = ~mask.unsqueeze(-1).expand(-1, 4, 3).reshape(-1, E).bool()
        weights, ids = torch.topk(scores.masked_fill(outside, 0.0), self.k, dim=-1)
        return inner.experts(flat, ids, weights)
