"""DeepSeek's cache of latent rows: what is in it, what engines do with it, and how far logits are from float64."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import graft
from conftest import graph_of, resized, tiny
from graft.bench.limits.traffic import cache_bytes, cache_bytes_per_token
from graft.ir.edit import second_module
from graft.ops.paged_latent_attention import reference
from graft.ops.ranks import run_as_ranks
from graft.passes.base import Context
from graft.passes.config import load_config, shard_sets
from graft.passes.pipeline import run_pipeline
from graft.workbench.check.scenario import logits
from marks import short

GREEDY = graft.SamplingParams(max_tokens=20, ignore_eos=True)
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707,
    "mscale_all_dim": 1.1, "original_max_position_embeddings": 64,
}  # fmt: skip
OTHERS = {
    "rank 40, queries without a rank": {"kv_lora_rank": 40, "q_lora_rank": None},
    "yarn, larger values": {"rope_parameters": YARN, "v_head_dim": 32},
}


def prompts(lengths=(1, 5, 19, 40), seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=g).tolist() for n in lengths]


@cache
def engine(family: str, **options) -> graft.LLM:
    return graft.LLM(tiny(family), backend="eager", **options)


def greedy(module, prompt, new):
    ids = torch.tensor([prompt])
    out = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    return out[0, len(prompt) :].tolist()


def test_one_row_a_token_is_kept_and_counted():
    llm = engine("deepseek-v3")
    assert [tuple(t.shape[1:]) for t in llm.engine.tensors] == [(16, 1, 24)] * 2
    assert [layer.tensors for layer in llm.cache.layers] == [1, 1]
    module = llm.model.module
    assert cache_bytes(module, 10, layers=llm.cache.layers) == 10 * 2 * 24 * 4
    assert cache_bytes_per_token(module) == 2 * 4 * 24 * 4, "as others keep them"
    assert [one.what for one in llm.cache.tensors()][1] == "the latent rows of model.layers.1.self_attn"
    assert any("2 layers keep latent rows, 48 numbers a token together and not 384" in n for n in llm.report.notes)
    expanded = graft.LLM(tiny("deepseek-v3"), backend="eager", config=off())
    assert [tuple(t.shape[1:]) for t in expanded.engine.tensors] == [(16, 4, 24)] * 4
    assert expanded.cache.content != llm.cache.content


def off():
    return {"transforms": {"absorb_latent_attention": {"enabled": False}}}


@pytest.mark.parametrize("family", short(["deepseek-v2", "deepseek-v3"], "deepseek-v3"))
def test_tokens_are_hugging_faces_in_chunks_from_prefixes_and_after_preemption(family):
    llm, module = engine(family), tiny(family).module
    given = prompts()
    expected = [greedy(module, prompt, 20) for prompt in given]
    assert [o.token_ids for o in llm.generate(given, GREEDY)] == expected
    again = llm.generate(given, GREEDY)
    assert [o.token_ids for o in again] == expected and again[-1].cached_tokens == 32
    block = llm.engine.cache_bytes // llm.engine.manager.blocks
    small = {"kv_cache_memory": 6 * block, "enable_prefix_caching": False, "admission": "greedy"}
    for options in ({"max_num_batched_tokens": 7}, small):
        other = resized(llm, **options)
        assert [o.token_ids for o in other.generate(given, GREEDY)] == expected, options
    assert other.stats.preemptions
    assert len({token for tokens in expected for token in tokens}) > 4, "the tokens vary, so the test can fail"


@pytest.mark.exhaustive  # test_float8_engine has blocks that are shared and copied
def test_siblings_share_rows_and_part():
    llm, (prompt,) = engine("deepseek-v2"), prompts((20,))
    options = {"max_tokens": 9, "temperature": 1.0, "ignore_eos": True}
    together = llm.generate([prompt], graft.SamplingParams(n=3, seed=1, **options))[0]
    alone = [llm.generate([prompt], graft.SamplingParams(seed=s, **options))[0].token_ids for s in (1, 2, 3)]
    assert [together.token_ids, *(other.token_ids for other in together.alternatives)] == alone


def model_of(more):
    settings = {**tiny("deepseek-v2").family.tiny, "num_hidden_layers": 2, **more}
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v2", **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.exhaustive  # each is captured and compiled; test_tokens_are_hugging_faces… has the registry's sizes
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_other_sizes_and_scales_give_hugging_faces_tokens(more, backend, tmp_path):
    module = model_of(more)
    module.save_pretrained(tmp_path)
    llm = graft.LLM(str(tmp_path), backend=backend, dtype="float32", device="cpu")
    assert len(llm.report.transforms["absorb_latent_attention"].matches) == 2
    given = prompts((3, 21))
    assert [o.token_ids for o in llm.generate(given, GREEDY)] == [greedy(module, p, 20) for p in given]


def graph(family="deepseek-v3", dtype="float32", sets=(), cache=None):
    gm = second_module(graph_of(tiny(family, dtype).module))
    run_pipeline(gm, load_config(sets=sets), Context(route="decoder", context_length=256, kv_cache_dtype=cache))
    return gm


def far(left, right):
    return float((left.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("dtype", short(["float32", "bfloat16"], "float32"))  # the graph of the tests above
def test_logits_are_as_near_to_float64_as_those_of_keys_and_values(dtype):
    """Prompts, chunks and decode steps; at most twice as far. Without the rotated part, or with values from a prefix
    that begins one number later, they are not."""
    with_rows = graph(dtype=dtype)
    without = graph(dtype=dtype, sets=["transforms.absorb_latent_attention.enabled=false"])
    exact = logits(graph_of(tiny("deepseek-v3", dtype).module), exact=True)
    allowed = 2 * far(logits(without), exact) + torch.finfo(getattr(torch, dtype)).eps
    assert far(logits(with_rows), exact) <= allowed
    gather, leave = reference.gather_all, reference.leave

    def without_rope(*given):
        rows = gather(*given).clone()
        rows[..., 16:] = 0
        return rows

    wrong = {"gather_all": without_rope, "leave": lambda mixed, *rest: leave(mixed.roll(1, -1), *rest)}
    for name, function in wrong.items():
        with mock.patch.object(reference, name, function):
            assert far(logits(with_rows), exact) > allowed, name


@pytest.mark.exhaustive  # test_float8_cache has what is written and read
def test_a_float8_cache_holds_rows_with_a_scale_each():
    llm = graft.LLM(tiny("deepseek-v3"), backend="eager", kv_cache_dtype="fp8")
    assert [layer.token_bytes for layer in llm.cache.layers] == [24 + 4] * 2
    assert any("logits over the float8_e4m3fn cache are" in note for note in llm.report.notes)
    given = prompts()
    expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in given]
    chunked = resized(llm, max_num_batched_tokens=16, enable_prefix_caching=False)
    assert [o.token_ids for o in chunked.generate(given, GREEDY)] == expected


@pytest.mark.exhaustive  # the short run: what is packed, in test_quantized_experts.py
def test_quantized_weights_leave_that_of_latent_attention():
    llm = graft.LLM("tiny-deepseek-v2", dtype="float32", device="cpu", quantize="int8", backend="eager")
    record = llm.report.transforms["quantize_linear"]
    reasons = {miss.reason for miss in record.near_misses}
    assert "the weight of latent attention is no linear layer's; it stays" in reasons and record.matches
    kept = [name for name, _ in llm.graph_module.named_parameters() if "kv_b_proj" in name]
    assert all(name.endswith("kv_b_proj.weight") for name in kept) and len(kept) == 2
    assert all(len(o.token_ids) == 20 for o in llm.generate(prompts((3, 19)), GREEDY))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3"])
def test_ranks_have_their_heads_and_all_of_the_row(family):
    parts = [graph(family, sets=shard_sets(rank, 2)) for rank in range(2)]
    for gm in parts:
        (weight,) = {tuple(v.shape) for n, v in gm.named_parameters() if "kv_b_proj" in n and v.shape[0] == 64}
        assert weight == (64, 16), "2 of 4 heads of 32"
        caches = [node.meta["val"] for node in gm.graph.nodes if "latent_cache" in node.name]
        assert [tuple(cache.shape[2:]) for cache in caches] == [(1, 24)] * 2
    found = run_as_ranks([lambda gm=gm: logits(gm) for gm in parts])
    expected = logits(graph(family))
    assert all(torch.allclose(each, expected, atol=1e-4) for each in found)
