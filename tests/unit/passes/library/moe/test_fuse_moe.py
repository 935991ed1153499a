"""fuse_moe: what it finds, what it computes, and what it leaves alone and why."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from graft.backends import lower
from graft.base.errors import CaptureError
from graft.capture.decoder import capture_decoder
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.ops import OPS
from graft.ops.cases import tolerance
from graft.ops.moe_experts.triton import moe_experts_triton
from graft.ops.moe_route.triton import moe_route_triton
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from marks import crossed

D, F, E, K = 16, 24, 6, 2
BLOCKS = {"mixtral": (MixtralSparseMoeBlock, {}), "qwen3": (Qwen3MoeSparseMoeBlock, {"norm_topk_prob": True})}
BLOCKS["qwen3 not normalized"] = (Qwen3MoeSparseMoeBlock, {"norm_topk_prob": False})


def block(kind="mixtral", experts="grouped_mm", dtype=torch.float32, e=E, k=K, activation="silu"):
    make, options = BLOCKS[kind]
    config = (MixtralConfig if make is MixtralSparseMoeBlock else Qwen3MoeConfig)(
        hidden_size=D, intermediate_size=F, moe_intermediate_size=F, num_local_experts=e, num_experts=e,
        num_experts_per_tok=k, hidden_act=activation, **options,
    )  # fmt: skip
    config._experts_implementation = experts
    module = make(config).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g) * parameter.shape[-1] ** -0.5)
    return module.to(dtype)


def tokens(n=7, dtype=torch.float32, seed=1):
    return torch.randn(1, n, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fuse(module, *args, dynamic=False, names=("fuse_moe",)):
    shapes = tuple({1: torch.export.Dim.DYNAMIC} for _ in args) if dynamic else None
    gm = export_graph(module, args, dynamic_shapes=shapes)
    before = graph_text(gm.graph)
    config = load_config({"transforms": {n: {"enabled": n in names} for n in load_config().transforms}})
    return gm, run_pipeline(gm, config).transforms["fuse_moe"], before


def only_two_ops_left(gm):
    kinds = {n.target for n in calls(gm.graph)}
    assert {torch.ops.graft.moe_route.default, torch.ops.graft.moe_experts.default} <= kinds
    gone = (torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.index_put_.default)
    assert not any(is_op(n, *gone) or "grouped_mm" in str(n.target) for n in calls(gm.graph))


@pytest.mark.parametrize("dynamic", [False, True])
@crossed("kind", BLOCKS, [torch.float32, torch.bfloat16])
def test_grouped_experts_fuse_bit_for_bit(kind, dtype, dynamic):
    module, x = block(kind, dtype=dtype), tokens(dtype=dtype)
    gm, record, _ = fuse(module, x, dynamic=dynamic)
    assert len(record.matches) == 1 and not record.near_misses
    only_two_ops_left(gm)
    for n in (7, 1, 40) if dynamic else (7,):
        x = tokens(n, dtype)
        assert torch.equal(gm(x), module(x))
        assert torch.equal(lower(gm).call(x), module(x))


@pytest.mark.parametrize(
    ("kind", "e", "k"), [("mixtral", 6, 1), ("mixtral", 6, 6), ("qwen3", 2, 2), ("qwen3 not normalized", 16, 5)]
)
def test_any_number_of_experts(kind, e, k):
    module, x = block(kind, e=e, k=k), tokens()
    gm, record, _ = fuse(module, x, dynamic=True)
    assert len(record.matches) == 1
    assert torch.equal(gm(x), module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batched_experts_fuse_too(dtype):
    module, x = block(experts="batched_mm", dtype=dtype), tokens(dtype=dtype)
    gm, record, _ = fuse(module, x, dynamic=True)
    assert len(record.matches) == 1
    bound = 4 * tolerance(dtype, F)
    torch.testing.assert_close(gm(x), module(x), rtol=bound, atol=bound)
    assert not torch.allclose(gm(x), block("qwen3 not normalized", dtype=dtype)(x), rtol=bound, atol=bound)


def test_a_loop_over_the_experts_that_were_hit_cannot_be_captured():
    with pytest.raises(CaptureError, match="data-dependent"):
        export_graph(block(experts="eager"), (tokens(),))


@pytest.mark.parametrize(("activation", "name"), [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_activations_keep_their_names(activation, name):
    module, x = block(activation=activation), tokens()
    gm, record, _ = fuse(module, x)
    assert len(record.matches) == 1 and f", {name})" in graph_text(gm.graph)
    assert torch.equal(gm(x), module(x))


def test_after_fuse_swiglu_the_experts_still_fuse():
    module, x = block(), tokens()
    gm = export_graph(module, (x,))
    defaults = load_config().transforms
    for name in ("fuse_swiglu", "fuse_moe"):
        config = load_config({"transforms": {n: {"enabled": n == name} for n in defaults}})
        assert len(run_pipeline(gm, config).transforms[name].matches) == 1
    only_two_ops_left(gm)
    assert torch.equal(gm(x), module(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen2_moe", "olmoe", "granitemoe"])
def test_other_families_fuse_with_their_shared_experts_left_outside(kind):
    sizes = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_experts_per_tok=2, pad_token_id=0, initializer_range=0.2, **sizes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, positions = torch.randint(3, 64, (2, 5)), torch.arange(5).expand(2, -1)
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        gm = capture_decoder(model)
        config = load_config({"transforms": {n: {"enabled": n == "fuse_moe"} for n in load_config().transforms}})
        assert len(run_pipeline(gm, config).transforms["fuse_moe"].matches) == 1
        assert torch.equal(gm(ids, positions)[0], expected)


def steered(order, k):
    """A block whose router likes experts in a given order, for tokens that are all positive."""
    module = block(k=k)
    liking = torch.zeros(E)
    liking[torch.tensor(order)] = torch.arange(len(order), 0, -1.0)
    module.gate.weight.copy_(liking[:, None].expand(E, D))
    return module, tokens().abs()


@pytest.mark.parametrize(("order", "k"), [([3], 1), ([5, 0], 2), ([0, 1, 2, 3, 4], 5)])
def test_experts_without_tokens_and_all_tokens_to_the_same(order, k):
    module, x = steered(order, k)
    gm, _, _ = fuse(module, x)
    assert torch.equal(gm(x), module(x))
    _, _, ids = module.gate(x)
    assert ids.tolist() == [order] * x.shape[1]


def test_equal_logits_go_where_they_went():
    module, x = block(), tokens()
    module.gate.weight.zero_()
    gm, _, _ = fuse(module, x)
    assert torch.equal(gm(x), module(x))


def test_triton_takes_the_first_of_equal_logits():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    weights, ids = moe_route_triton(logits, 2, True, torch.float32)
    assert ids.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(weights, OPS["moe_route"].reference(logits, 2, True, torch.float32)[0])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_triton_keeps_ids_in_range_whatever_the_logits():
    logits = torch.tensor([[float("nan")] * 5, [-float("inf")] * 5])
    _, ids = moe_route_triton(logits, 2, True, torch.float32)
    assert ids.min() >= 0 and ids.max() < 5


def test_triton_experts_never_wait_for_the_device(monkeypatch):
    """What would stall a GPU or break a CUDA graph is not called: sizes come from shapes alone."""
    ids = torch.tensor([[0, 3], [3, 1], [3, 0]])
    g = torch.Generator().manual_seed(3)
    x, gate_up, down = (torch.randn(shape, generator=g) * 0.3 for shape in ((3, D), (E, 2 * F, D), (E, D, F)))
    args = (x, torch.rand(3, 2, generator=g), ids, gate_up, down)
    expected = OPS["moe_experts"].reference(*args)
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("asked the device for a number"))
    got = moe_experts_triton(*args)
    with pytest.raises(pytest.fail.Exception, match="asked the device"):
        OPS["moe_experts"].reference(*args)
    monkeypatch.undo()
    torch.testing.assert_close(got, expected)


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


def test_weights_that_lie_as_in_out_are_read_turned():
    module, x = Mixture(transposed=True), tokens()
    gm, record, _ = fuse(Turned(), x)
    assert len(record.matches) == 1
    torch.testing.assert_close(gm(x), Turned()(x))
    assert fuse(module, x)[1].status == "no_match"  # computed anew in every call


class Turned(nn.Module):
    """gpt-oss as Hugging Face has it: [e, in, out], biases, gate and up in turns."""

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


@pytest.mark.parametrize("route", [softmax_route, route_in_place, route_select_first, *SIGMOIDS])
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


def biased_route(logits):
    """DeepSeek: chosen by one score and weighed by another."""
    scores = torch.sigmoid(logits)
    _, ids = torch.topk(scores + 0.1 * scores[:1], K)
    return scores.gather(1, ids), ids


def scaled_route(logits):
    weights, ids = softmax_route(logits)
    return weights * 2.5, ids


def epsilon_route(logits):
    values, ids = torch.topk(torch.softmax(logits, -1), K)
    return values / (values.sum(-1, keepdim=True) + 1e-6), ids


def tanh_route(logits):
    return torch.topk(torch.tanh(logits), K)


REFUSED = {
    "activation": ({"activation": "relu"}, "activation %relu.* is aten.relu, known are silu"),
    "half precision softmax": ({"route": lambda t: softmax_route(t.bfloat16())}, "not computed in float32"),
    "over tokens": ({"route": lambda t: softmax_route(t, dim=0)}, "%softmax.* is not over the experts"),
    "unsorted": ({"route": lambda t: softmax_route(t, sorted=False)}, "no set order .sorted=False"),
    "smallest": ({"route": lambda t: softmax_route(t, largest=False)}, "largest=False"),
    "biased": ({"route": biased_route}, "only the ids of %topk.* weights come from elsewhere"),
    "tanh": ({"route": tanh_route}, "%tanh.*, which is no softmax or sigmoid"),
    "scaled weights": ({"route": scaled_route}, "is read by aten.mul.Tensor, expected one aten.reshape"),
    "epsilon": ({"route": epsilon_route}, "is read by aten.add.Tensor, expected one aten.div.Tensor"),
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
            self.first, self.second = Mixture(scaled_route), Mixture()

        def forward(self, x):
            return self.second(self.first(x)[0].view_as(x))

    module, x = Two(), tokens()
    gm, record, _ = fuse(module, x, dynamic=True)
    assert len(record.matches) == len(record.near_misses) == 1
    assert "second" in record.matches[0].module and "first" not in record.matches[0].module
    assert torch.equal(gm(x)[0], module(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tolerance_rejects_weights_that_are_not_normalized(dtype):
    """The bound under which kernels are compared tells the two routings apart."""
    x = tokens(dtype=dtype)
    right, wrong = block("qwen3", dtype=dtype), block("qwen3 not normalized", dtype=dtype)
    gm, _, _ = fuse(right, x)
    bound = 4 * tolerance(dtype, F)
    torch.testing.assert_close(gm(x), right(x), rtol=bound, atol=bound)
    assert not torch.allclose(gm(x), wrong(x), rtol=bound, atol=bound)


@pytest.mark.parametrize("kernel", ["reference", "aten", "triton"])
def test_experts_against_every_expert_on_every_token(kernel):
    """A dense computation in float64 that sorts nothing."""
    n, k = 9, 3
    g = torch.Generator().manual_seed(3)
    x, gate_up, down = (torch.randn(s, generator=g) * 0.3 for s in ((n, D), (E, 2 * F, D), (E, D, F)))
    weights, ids = torch.softmax(torch.randn(n, E, generator=g), -1).topk(k)
    both = torch.einsum("nd,efd->nef", x.double(), gate_up.double())
    every = torch.einsum("nef,edf->ned", nn.functional.silu(both[..., :F]) * both[..., F:], down.double())
    share = torch.zeros(n, E, dtype=torch.float64).scatter_(1, ids, weights.double())
    dense = torch.einsum("ned,ne->nd", every, share)
    spec = OPS["moe_experts"]
    run = moe_experts_triton if kernel == "triton" else spec.kernel(kernel).run
    torch.testing.assert_close(run(x, weights, ids, gate_up, down).double(), dense, rtol=1e-5, atol=1e-6)
    wrong = run(x, weights, ids.flip(1), gate_up, down).double()
    assert not torch.allclose(wrong, dense, rtol=1e-5, atol=1e-6)
