"""fuse_moe on the blocks of models: what it finds and what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

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
from moe_cases import BLOCKS, D, E, F, block, fuse, tokens


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
