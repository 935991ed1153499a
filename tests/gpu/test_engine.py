"""The engine on a GPU: the tokens of Hugging Face on the same device."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import graft
from graft.models.load import load_model
from graft.models.registry import families

NEW = 24
SOME = "256MiB"  # of cache: several processes may share the GPU


def prompts(lengths):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("family", sorted(families()))
def test_greedy_tokens_equal_hugging_face_float32(family):
    model = load_model(f"tiny-{family}", dtype="float32", device="cuda")
    given = prompts((1, 5, 13, 30))
    expected = []
    for prompt in given:
        ids = torch.tensor([prompt], device="cuda")
        out = model.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=-1,
        )
        expected.append(out[0, len(prompt) :].tolist())
    llm = graft.LLM(model, kv_cache_memory=SOME)
    got = llm.generate(given, graft.SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert [o.token_ids for o in got] == expected
    kernels = {
        op: str(kernel) for op, kernel in llm.report.kernels.items()
    }  # where nothing turns (GPT-2, a layer of SmolLM3) the write stays with the attention
    assert kernels.get("graft::paged_attention", "triton") == "triton"
    assert kernels.get("graft::cached_attention", "by call").startswith("by call")
    assert kernels.get("graft::rope_kv_write", "triton") == "triton"
    assert kernels.get("graft::rope_attention", "by call").startswith("by call")
    assert kernels.get("graft::paged_latent_attention", "triton") == "triton"
    # values of DeepSeek's heads are shorter than keys
    assert "graft::rope_attention" in kernels or family in ("gpt2", "deepseek-v2", "deepseek-v3")


@pytest.mark.parametrize("family", ["llama", "gemma-2", "gemma-3", "olmo-2", "qwen3-moe"])
def test_bfloat16_logits_stay_close_to_hugging_face(family):
    """First-token logits of a prompt, in bfloat16, relative to their spread; a wrong position would be far off."""
    model = load_model(f"tiny-{family}", dtype="bfloat16", device="cuda")
    (prompt,) = prompts((19,))
    ids = torch.tensor([prompt], device="cuda")
    with torch.no_grad():
        expected = model.module(ids).logits[0, -1].float()
        shifted = model.module(ids[:, :-1]).logits[0, -1].float()
    llm = graft.LLM(model, kv_cache_memory=SOME)
    seen = []
    run = llm.engine.run
    llm.engine.run = lambda *args: seen.append(run(*args)) or seen[-1]
    llm.generate([prompt], graft.SamplingParams(max_tokens=1))
    error = (seen[0][0].float() - expected).abs().max() / expected.std()
    assert error < 0.15
    assert (seen[0][0].float() - shifted).abs().max() / expected.std() > 0.5


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma-3", "qwen3-moe"])
def test_tokens_do_not_depend_on_batch_reuse_chunks_or_preemption(family):
    model = load_model(f"tiny-{family}", dtype="float32", device="cuda")
    shared = prompts((32,))[0]
    given = [shared + tail if i % 2 else tail for i, tail in enumerate(prompts((3, 40, 17, 33, 64, 5)))]
    params = [graft.SamplingParams(max_tokens=NEW - i, ignore_eos=True) for i in range(len(given))]
    single = graft.LLM(model, kv_cache_memory=SOME, enable_prefix_caching=False)
    alone = [single.generate([p], one)[0].token_ids for p, one in zip(given, params, strict=True)]
    llm = graft.LLM(model, kv_cache_memory=SOME)
    for _ in range(2):
        assert [o.token_ids for o in llm.generate(given, params)] == alone
    assert llm.stats.cached_tokens > 64
    block = llm.engine.cache_bytes // llm.engine.manager.blocks
    small = graft.LLM(model, kv_cache_memory=9 * block, max_num_seqs=8, max_num_batched_tokens=11, admission="greedy")
    assert [o.token_ids for o in small.generate(given, params)] == alone
    assert small.stats.preemptions > 0 and small.engine.manager.available == 9


def test_sampling_on_the_gpu_gives_what_it_gives_on_the_cpu():
    model = load_model("tiny-llama", dtype="float32", device="cpu")  # a GPU draws other random weights
    params = [
        graft.SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, top_k=30, min_p=0.01, seed=i, ignore_eos=True,
                             repetition_penalty=1.2, presence_penalty=0.3, logprobs=3, n=1 + i % 3)
        for i in range(8)
    ]  # fmt: skip
    given = prompts((5, 9, 17, 3, 30, 12, 8, 21))
    on_cpu = graft.LLM(model).generate(given, params)
    twin = replace(model, module=copy.deepcopy(model.module).to("cuda"))
    on_gpu = graft.LLM(twin, kv_cache_memory=SOME).generate(given, params)
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert [x.token_ids for x in (a, *a.alternatives)] == [x.token_ids for x in (b, *b.alternatives)]
        for left, right in zip(a.logprobs, b.logprobs, strict=True):
            assert {t: round(v.logprob, 3) for t, v in left.items()} == pytest.approx(
                {t: v.logprob for t, v in right.items()}, abs=2e-3
            )


def test_the_cache_takes_what_is_free_less_a_margin():
    model = load_model("llama-3.2-1b", dtype="bfloat16", device="cuda")
    free = torch.cuda.mem_get_info()[0]
    llm = graft.LLM(model, max_num_seqs=100_000)  # so many could use all of it
    assert 0.85 * free < llm.engine.cache_bytes < 0.91 * free and "a margin of" in llm.report.notes[-1]
    assert graft.LLM(model, kv_cache_memory="1GiB").engine.cache_bytes <= 1 << 30
