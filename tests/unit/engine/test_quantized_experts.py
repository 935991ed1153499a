"""Packed experts in engines: tokens and logits beside Hugging Face with what the packed weights stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graft import LLM, SamplingParams
from graft.bench.limits.traffic import graph_weight_bytes
from graft.bench.quality import engine_logits
from graft.models.load import load_model
from graft.weights.stacked import unpack_expert
from marks import short
from native_cases import HAS_COMPILER
from quantize_cases import reasons

PROMPT = [5, 9, 77, 31, 8, 3, 99]
FAMILIES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3")
KINDS = (("eager", "int8"), ("eager", "int4"), ("eager", "fp8"), ("native", "int8"), ("native", "int4"))
# The native GEMM rounds rows of x to 8 bits, 0.4 to 2.4 % of the logits (test_native_quantized.py); eager does not.
BOUND = {"eager": 1e-4, "native": 0.04}
LEAF = {("native", "int8"): "q8", ("native", "int4"): "q4"}


def make(family: str):
    """A tiny model whose experts are of different magnitude, so that no expert's scales would do for another."""
    model = load_model(f"tiny-{family}", dtype="float32", device="cpu")
    for stack in stacks(model.module).values():
        with torch.no_grad():
            stack *= (0.5 + torch.arange(len(stack)))[:, None, None]
    return model


def stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if ".experts." in name and p.dim() == 3}


def stored(llm: LLM, name: str, leaf: str, like: Tensor, neighbour: int = 0) -> Tensor:
    """What the engine's weights stand for, as they lie in the checkpoint; `neighbour`: whose scales are taken."""
    state, oss = dict(llm.graph_module.named_parameters()), name.endswith("gate_up_proj") and "oss" in llm.model.name
    transposed = "oss" in llm.model.name
    q, scale = state[f"{name}_{leaf}"].detach(), state[f"{name}_scale"].detach()
    gated, columns = "gate_up" in name, like.shape[1 if transposed else 2]
    if q.dtype is torch.uint8:  # the scales lie in the tiles
        other = q.roll(neighbour, 0).view(len(q), q.shape[1], -1, 544 if leaf == "q8" else 320)
        q = torch.cat([other[..., :32], q.view_as(other)[..., 32:]], -1).view_as(q)
    else:
        scale = scale.roll(neighbour, 0)
    full = torch.stack([unpack_expert(q, scale, e, columns, torch.float32, gated) for e in range(len(q))])
    if oss:  # gate and up take turns
        full = torch.stack(full.chunk(2, 1), 2).flatten(1, 2)
    return full.transpose(1, 2) if transposed else full


@pytest.mark.parametrize(
    ("family", "backend", "kind"),
    short([(f, *k) for f in FAMILIES for k in KINDS], ("gpt-oss", "eager", "int4")),
)  # native in the short run: the kernel in test_native_experts.py, engines in test_native_quantized.py
def test_tokens_and_logits_are_those_of_the_weights_that_the_packed_ones_stand_for(family, backend, kind):
    if backend == "native" and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    model = make(family)
    config = {"transforms": {"quantize_linear": {"skip": ["*weight"], "head": "none"}}}  # experts alone
    llm = LLM(model, backend=backend, quantize=kind, config=config, kv_cache_memory="8MiB")
    record = llm.report.transforms["quantize_linear"]
    own, leaf = stacks(model.module), LEAF.get((backend, kind), kind)
    assert len(record.matches) == len(own) // 2 and {match.pattern for match in record.matches} == {kind}
    assert not any("moe_experts" in note for note in llm.report.notes), "no mixture runs eager in a native step"
    with torch.no_grad():
        right = {name: stored(llm, name, leaf, p) for name, p in own.items()}
        wrong = {name: stored(llm, name, leaf, p, neighbour=1) for name, p in own.items()}
        for name, p in own.items():
            p.copy_(wrong[name])
        other = model.module(torch.tensor([PROMPT])).logits[0]
        for name, p in own.items():
            p.copy_(right[name])
        wanted = model.module.generate(
            torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
        )[0]
        logits = model.module(wanted[None, :-1]).logits[0]
    found = engine_logits(llm, wanted[:-1].tolist())
    assert off(found, logits) < BOUND[backend]
    assert off(found[: len(PROMPT)], other) > 2 * BOUND["native"], "another expert's scales show"
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
    expected = wanted[len(PROMPT) :].tolist()
    if backend == "eager":
        assert output.token_ids == expected
    else:
        follows(output.token_ids, expected, logits[len(PROMPT) - 1 :], float((found - logits).abs().max()))


def off(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


def follows(tokens: list[int], expected: list[int], logits: Tensor, margin: float) -> None:
    """The same tokens, up to one at which the best two lie closer together than rounding moves them."""
    for token, right, row in zip(tokens, expected, logits, strict=True):
        if token != right:
            best, second = row.topk(2).values
            assert float(best - second) <= 2 * margin
            return


def test_all_is_packed_but_the_router_and_the_reason_is_told():
    """DeepSeek: shared experts too, and kv_b_proj where latent attention has not absorbed it. Memory and bytes of a
    step follow."""
    llm = LLM(
        "tiny-deepseek-v3", dtype="float32", device="cpu", quantize="int4", backend="eager", kv_cache_memory="8MiB"
    )
    record = llm.report.transforms["quantize_linear"]
    floats = [
        n
        for n, p in llm.graph_module.named_parameters()
        if p.dim() > 1 and p.is_floating_point() and "_scale" not in n
    ]
    absorbed = [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in (0, 1)]
    assert sorted(floats) == sorted(["model.embed_tokens.weight", *absorbed, "model.layers.1.mlp.gate.weight"])
    assert "it is a router: 4 bits" in reasons(record) and len(record.near_misses) == 3
    assert reasons(record).count("the weight of latent attention is no linear layer's; it stays") == 2
    state = dict(llm.graph_module.named_parameters())
    assert "model.layers.1.mlp.shared_experts.down_proj.weight_int4" in state
    experts = sum(p.nbytes for name, p in state.items() if ".mlp.experts." in name)
    one, all_of_them = (graph_weight_bytes(llm.graph_module, batch) for batch in (1, 10_000))
    assert experts > 0 and all_of_them - one == pytest.approx(experts * (1 - 2 / 8))
    (note,) = [m.note for m in record.matches if ".mlp.experts.gate_up" in m.note]
    assert note.count("int4, relative error") == 2
    module = llm.model.module.model.layers[1].mlp.experts
    assert module.gate_up_proj.is_meta and module.down_proj.is_meta, "the float weights are gone"


def test_a_router_may_have_eight_bits():
    given = {"dtype": "float32", "device": "cpu", "backend": "eager", "kv_cache_memory": "8MiB"}
    llm = LLM("tiny-qwen3-moe", quantize="int8", **given)
    assert not llm.report.transforms["quantize_linear"].near_misses
