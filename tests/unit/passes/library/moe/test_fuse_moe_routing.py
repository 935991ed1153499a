"""fuse_moe on routings and experts spelled otherwise: what fuses, and what is left alone and why."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import GptOssConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from graft.ir.io.text import graph_text
from moe_cases import D, E, F, K, block, fuse, tokens


class Mixture(nn.Module):
    """A block whose parts can be spelled otherwise."""

    def __init__(self, route=None, activation="silu", **options):
        super().__init__()
        self.block = block(activation=activation)
        self.route, self.options = route or softmax_route, options
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x):
        x = x.view(-1, D)
        weights, ids, *more = self.route(nn.functional.linear(x, self.block.gate.weight))
        y = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self.experts(), x, ids, weights)
        if self.options.get("write"):
            x.add_(1)
        return y, *more

    def experts(self):
        experts, options = self.block.experts, self.options
        if not options.keys() & {"bias", "transposed", "computed", "wide"}:
            return experts
        other = nn.Module()
        names = ("num_experts", "act_fn", "has_gate", "has_bias", "is_transposed", "_apply_gate")
        other.__dict__.update({n: getattr(experts, n) for n in names} | {"is_transposed": "transposed" in options})
        weights = {"gate_up_proj": experts.gate_up_proj, "down_proj": experts.down_proj}
        for name, weight in weights.items():
            weight = weight.transpose(1, 2).contiguous() if "transposed" in options else weight
            weight = weight * self.scale if "computed" in options else weight
            other.__dict__[name] = weight.double() if "wide" in options else weight
        if "bias" in options:
            other.__dict__ |= {"has_bias": True, "gate_up_proj_bias": torch.ones(E, 2 * F)}
            other.__dict__["down_proj_bias"] = torch.ones(E, D)
        return other


def softmax_route(logits, k=K, dim=-1, **options):
    values, ids = torch.topk(torch.softmax(logits, dim), k, **options)
    return values / values.sum(-1, keepdim=True), ids


def route_in_place(logits):
    values, ids = torch.topk(torch.softmax(logits, -1), K)
    values /= values.sum(-1, keepdim=True)
    return values, ids


def route_select_first(logits):
    values, ids = torch.topk(logits, K)
    return torch.softmax(values, -1), ids


def route_sigmoid(logits):
    return torch.topk(torch.sigmoid(logits), K)


def route_sigmoid_normalized(logits):
    values, ids = torch.topk(torch.sigmoid(logits), K)
    return values / values.sum(-1, keepdim=True), ids


def route_sigmoid_of_selected(logits):
    values, ids = torch.topk(logits, K)
    return torch.sigmoid(values.float()).to(logits.dtype), ids


def scaled_route(logits):
    weights, ids = softmax_route(logits)
    return weights * 2.5, ids


def epsilon_route(logits):
    values, ids = torch.topk(torch.softmax(logits, -1), K)
    return values / (values.sum(-1, keepdim=True) + 1e-6), ids


def route_and_return(*which):
    """A routing that also hands out some of its values."""

    def route(logits):
        probabilities = torch.softmax(logits, -1)
        values, ids = torch.topk(probabilities, K)
        weights = values / values.sum(-1, keepdim=True)
        found = {"logits": logits, "weights": weights, "ids": ids, "probabilities": probabilities, "values": values}
        return weights, ids, *(found[name] for name in which)

    return route


SIGMOIDS = [route_sigmoid, route_sigmoid_normalized, route_sigmoid_of_selected]


def test_weights_that_lie_as_in_out_are_read_transposed():
    module, x = Mixture(transposed=True), tokens()
    gm, record, _ = fuse(Transposed(), x)
    assert len(record.matches) == 1
    torch.testing.assert_close(gm(x), Transposed()(x))
    assert fuse(module, x)[1].status == "no_match"  # computed anew in every call


class Transposed(nn.Module):
    """gpt-oss as Hugging Face has it: [e, in, out], biases, gate and up interleaved."""

    def __init__(self):
        super().__init__()
        config = GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
        config._experts_implementation = "grouped_mm"
        self.mlp = GptOssMLP(config).eval().requires_grad_(False)
        g = torch.Generator().manual_seed(0)
        for parameter in self.mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.3)

    def forward(self, x):
        return self.mlp(x)[0]


@pytest.mark.parametrize(
    "route", [softmax_route, route_in_place, route_select_first, scaled_route, epsilon_route, *SIGMOIDS]
)
def test_spellings_of_routing_fuse(route):
    module, x = Mixture(route), tokens()
    gm, record, _ = fuse(module, x)
    assert len(record.matches) == 1
    assert torch.equal(gm(x)[0], module(x)[0])


def test_logits_weights_and_ids_may_be_read_elsewhere():
    module, x = Mixture(route_and_return("logits", "weights", "ids")), tokens()
    gm, record, _ = fuse(module, x)
    assert len(record.matches) == 1
    assert all(torch.equal(a, b) for a, b in zip(gm(x), module(x), strict=True))


def biased_by_a_token(logits):
    """Chosen by one score and weighed by another, and not one number for each expert."""
    scores = torch.sigmoid(logits)
    _, ids = torch.topk(scores + 0.1 * scores[:1], K)
    return scores.gather(1, ids), ids


def unsorted_and_returned(logits):
    weights, ids = softmax_route(logits, sorted=False)
    return weights, ids, ids


def route_times_logits(logits):
    weights, ids = softmax_route(logits)
    return weights * logits[:, :1], ids


def tanh_route(logits):
    return torch.topk(torch.tanh(logits), K)


REFUSED = {
    "activation": ({"activation": "relu"}, "activation %relu.* is aten.relu, known are silu"),
    "half precision softmax": ({"route": lambda t: softmax_route(t.bfloat16())}, "not computed in float32"),
    "over tokens": ({"route": lambda t: softmax_route(t, dim=0)}, "%softmax.* is not over the experts"),
    "unsorted, returned": ({"route": unsorted_and_returned}, "%getitem.* has a second reader %output"),
    "smallest": ({"route": lambda t: softmax_route(t, largest=False)}, "largest=False"),
    "biased": ({"route": biased_by_a_token}, "%add.* does not add one number for each expert"),
    "tanh": ({"route": tanh_route}, "%tanh.*, which is no softmax or sigmoid"),
    "scaled by a tensor": ({"route": route_times_logits}, "is read by aten.mul.Tensor, expected one aten.reshape"),
    "probabilities returned": (
        {"route": route_and_return("probabilities")},
        "%softmax.* has a second reader %output",
    ),
    "values returned": ({"route": route_and_return("values")}, "%getitem.* has a second reader %output"),
    "bias": ({"bias": True}, "the weight %.* is computed in the graph, it is not a parameter"),
    "computed weight": ({"computed": True}, "computed in the graph, it is not a parameter"),
    "mixed dtypes": ({"wide": True}, "is aten.to.dtype, expected aten.index.Tensor"),
    "written": ({"write": True}, "is written in place by %add_"),
}


@pytest.mark.some(8)
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason_and_stays(name):
    options, reason = REFUSED[name]
    gm, record, before = fuse(Mixture(**options), tokens())
    assert record.status == "no_match" and len(record.near_misses) == 1
    assert re.search(reason, record.near_misses[0].reason), record.near_misses[0].reason
    assert record.near_misses[0].reason in record.reason
    assert graph_text(gm.graph) == before


def test_router_noise_of_training_is_refused():
    module = block()
    module.jitter_noise = 0.1
    gm, record, before = fuse(module.train(), tokens())
    assert "written in place by %mul_" in record.reason
    assert graph_text(gm.graph) == before


def test_without_topk_the_reason_says_so():
    _, record, _ = fuse(nn.Linear(D, D), tokens())
    assert record.status == "no_match" and record.reason == "the graph has no aten.topk"


def test_one_fits_and_the_other_stays():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Mixture(route_times_logits), Mixture()

        def forward(self, x):
            return self.second(self.first(x)[0].view_as(x))

    module, x = Two(), tokens()
    gm, record, _ = fuse(module, x, dynamic=True)
    assert len(record.matches) == len(record.near_misses) == 1
    assert "second" in record.matches[0].module and "first" not in record.matches[0].module
    assert torch.equal(gm(x)[0], module(x)[0])
