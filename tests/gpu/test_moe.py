"""A mixture of experts on a GPU: nothing waits for the device, a CUDA graph holds it, and numbers stay."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from graft.base.errors import KernelUnavailable
from graft.base.timers import profile_events
from graft.ir.trace import export_graph
from graft.ops import OPS, choose
from graft.ops.cases import tolerance
from graft.ops.moe_experts.cases import CASES
from graft.ops.moe_experts.gemv import moe_experts_gemv
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline

D, F, E, K = 256, 512, 8, 2


def arguments(n, dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(0)
    shapes = ((n, D), (E, 2 * F, D), (E, D, F), (n, E))
    x, gate_up, down, logits = (torch.randn(s, generator=g, device="cuda") * s[-1] ** -0.25 for s in shapes)
    return [t.to(dtype) for t in (logits, x, gate_up, down)]


def mixture(kernel, logits, x, gate_up, down):
    weights, ids = named("moe_route", "triton", logits, K, True, torch.float32)
    return named("moe_experts", kernel, x, weights, ids, gate_up, down, "silu")


def named(op, kernel, *args):
    return choose(OPS[op], OPS[op].call(*args), kernel).run(*args)


FORMS = [*((kernel, n) for kernel in ("triton", "grouped_mm") for n in (1, 8, 300)), ("gemv", 1), ("gemv", 2)]


@pytest.mark.parametrize(("kernel", "n"), FORMS)
def test_a_cuda_graph_holds_it_and_other_tokens_go_to_other_experts(kernel, n):
    args = arguments(n)
    mixture(kernel, *args)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixture(kernel, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(kernel, *args)
    bound = 4 * tolerance(torch.bfloat16, F)
    for shift in (0, 3):
        args[0].copy_(args[0].roll(shift, 1))
        args[1].copy_(args[1].roll(shift, 1))
        graph.replay()
        weights, ids = OPS["moe_route"].reference(args[0], K, True, torch.float32)
        expected = OPS["moe_experts"].reference(args[1], weights, ids, *args[2:])
        torch.testing.assert_close(out, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gemvs_agree_with_the_reference_in_every_layout(case, dtype):
    """Transposed weights, biases, odd sizes; and numbers that are slightly wrong are told apart."""
    args = case.make("cuda", dtype, torch.Generator().manual_seed(0))
    bound = 4 * tolerance(dtype, case.reduction)
    found = moe_experts_gemv(*args)
    torch.testing.assert_close(found, OPS["moe_experts"].reference(*args), rtol=bound, atol=bound)
    wrong = OPS["moe_experts"].reference(args[0], args[1] * 1.5, *args[2:])
    assert not torch.allclose(found, wrong, rtol=bound, atol=bound)


@pytest.mark.parametrize(("n", "taken"), [(1, True), (2, True), (8, False)])
def test_few_tokens_take_the_gemvs(n, taken):
    logits, x, gate_up, down = arguments(n)
    weights, ids = named("moe_route", "triton", logits, K, True, torch.float32)
    call = OPS["moe_experts"].call(x, weights, ids, gate_up, down)
    assert choose(OPS["moe_experts"], call).name == ("gemv" if taken else "triton")
    if taken:
        assert choose(OPS["moe_experts"], call, "gemv").name == "gemv"
    else:
        with pytest.raises(KernelUnavailable, match="would read some experts several times"):
            choose(OPS["moe_experts"], call, "gemv")


def test_the_gemvs_are_two_kernels():
    """Nothing is sorted, gathered or asked: two launches, whatever the router says."""
    args = arguments(1)
    weights, ids = named("moe_route", "triton", args[0], K, True, torch.float32)
    run = partial(moe_experts_gemv, args[1], weights, ids, *args[2:])
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    names = [event["name"] for event in profile_events(profiler) if event.get("cat") == "kernel"]
    assert sorted(names) == ["down_gemv", "gate_up_gemv"]


def test_the_fused_block_keeps_the_numbers_of_the_model():
    config = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "grouped_mm"
    module = MixtralSparseMoeBlock(config).eval().requires_grad_(False).to("cuda", torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    x = torch.randn(1, 33, D, device="cuda", dtype=torch.bfloat16)
    gm = export_graph(module, (x,), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    assert len(run_pipeline(gm, load_config()).transforms["fuse_moe"].matches) == 1
    bound = 4 * tolerance(torch.bfloat16, F)
    torch.testing.assert_close(gm(x), module(x), rtol=bound, atol=bound)
