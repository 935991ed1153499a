"""Greedy tokens in float32 do not depend on what runs beside a request, nor on how it got into the cache."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import graft
from conftest import resized, tiny
from marks import short

# sliding windows: mistral, gemma-2, gemma-3; mixtures of experts: mixtral, qwen3-moe; latent rows: deepseek-v2, -v3
FAMILIES = ["llama", "mistral", "gemma-2", "gemma-3", "mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"]
LENGTHS = (3, 40, 17, 33, 64, 5, 21, 16)


@cache
def captured(family: str) -> graft.LLM:
    return graft.LLM(tiny(family))


def engine(family: str, **options) -> graft.LLM:
    return resized(captured(family), **options)


def prompts():
    """Half of them begin with the same 32 tokens: two whole blocks."""
    g = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 128, (32,), generator=g).tolist()
    tails = [torch.randint(3, 128, (n,), generator=g).tolist() for n in LENGTHS]
    return [shared + tail if i % 2 else tail for i, tail in enumerate(tails)]


def params(i: int) -> graft.SamplingParams:
    return graft.SamplingParams(max_tokens=12 + 5 * (i % 3), ignore_eos=True)


@cache
def alone(family: str) -> list[list[int]]:
    """Each by itself, in an engine that reuses nothing."""
    llm = engine(family, enable_prefix_caching=False)
    return [llm.generate([prompt], params(i))[0].token_ids for i, prompt in enumerate(prompts())]


def together(llm: graft.LLM, order=None) -> list[list[int]]:
    given = prompts()
    order = order or range(len(given))
    outputs = llm.generate([given[i] for i in order], [params(i) for i in order])
    found = dict(zip(order, outputs, strict=True))
    return [found[i].token_ids for i in range(len(given))]


@pytest.mark.some(1)
@pytest.mark.parametrize("family", short(FAMILIES, "gemma-2"))
def test_alone_or_together_in_any_order(family):
    llm = engine(family, enable_prefix_caching=False)
    assert together(llm) == alone(family)
    assert together(llm, order=[5, 2, 7, 0, 3, 6, 1, 4]) == alone(family)
    assert len({tuple(tokens) for tokens in alone(family)}) > 4, "the tokens vary, so the test can fail"


@pytest.mark.parametrize("family", short(FAMILIES, "gemma-2"))
def test_with_prefixes_from_the_cache(family):
    llm = engine(family)
    assert together(llm) == alone(family)
    again = llm.generate(prompts(), [params(i) for i in range(len(LENGTHS))])
    assert [o.token_ids for o in again] == alone(family)
    assert [o.cached_tokens for o in again] == [(len(p) - 1) // 16 * 16 for p in prompts()]


@pytest.mark.parametrize("family", short(FAMILIES, "gemma-2"))
def test_in_chunks_and_preempted(family):
    """A cache that holds about two of the requests: they push each other out and are computed again."""
    whole = captured(family).engine
    block = whole.cache_bytes // whole.manager.blocks
    llm = engine(family, kv_cache_memory=9 * block, max_num_batched_tokens=11, admission="greedy")
    assert llm.engine.manager.blocks == 9
    assert together(llm) == alone(family)
    assert llm.stats.preemptions > 0
    llm.engine.manager.check()
    assert llm.engine.manager.available == 9


@pytest.mark.parametrize("family", short(["gemma-2", "mistral", "mixtral"], "gemma-2"))
def test_arriving_one_after_another(family):
    llm = engine(family, max_num_batched_tokens=24)
    requests = []
    for i, prompt in enumerate(prompts()):
        requests.append(llm.engine.add(prompt, params(i)))
        for _ in range(i % 3):
            llm.engine.step()
    while not llm.engine.idle:
        llm.engine.step()
    assert [r.new_tokens for r in requests] == alone(family)


def test_the_same_seed_gives_the_same_text_in_any_batch():
    llm = engine("gemma-2", max_num_batched_tokens=32)
    given = prompts()
    drawn = [
        graft.SamplingParams(max_tokens=10, temperature=1.2, top_p=0.95, seed=i, ignore_eos=True)
        for i in range(len(given))
    ]
    single = [llm.generate([p], one)[0].token_ids for p, one in zip(given, drawn, strict=True)]
    mixed = llm.generate([*given, *prompts()], [*drawn, *(params(i) for i in range(len(given)))])
    assert [o.token_ids for o in mixed[: len(given)]] == single
    others = [
        graft.SamplingParams(max_tokens=10, temperature=1.2, top_p=0.95, seed=i + 50, ignore_eos=True)
        for i in range(8)
    ]
    assert [o.token_ids for o in llm.generate(given, others)] != single
