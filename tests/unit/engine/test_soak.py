"""2,000 random requests in a cache that is too small for them: no wrong token, no lost block."""

from __future__ import annotations

import random

import pytest
import torch

import graft
from conftest import tiny
from graft.engine.core import Request
from graft.engine.kv.view import CacheView
from graft.engine.sampling.sampling import make_generator, sample

REQUESTS, BLOCKS = 2000, 40
SLACK = 1e-4  # logits of one batch and another differ by rounding alone: about 1e-6


def engine():
    """Sliding windows of 16 tokens, a small cache, at most 12 requests at once."""
    model = tiny("mistral")
    llm = graft.LLM(
        model, kv_cache_memory=BLOCKS * 16 * 256, max_num_seqs=12, max_num_batched_tokens=48, admission="greedy"
    )
    assert llm.engine.manager.blocks == BLOCKS, "the size of a block of this model has changed"
    return llm


def random_params(rng: random.Random) -> graft.SamplingParams:
    common = {"max_tokens": rng.choice([1, 2, 5, 9, 14, 30]), "ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.3:
        common["stop_token_ids"] = tuple(rng.sample(range(128), 4))
    if rng.random() < 0.3:
        common |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        common["logprobs"] = rng.randrange(4)
    if rng.random() < 0.5:
        return graft.SamplingParams(**common)
    return graft.SamplingParams(
        **common,
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.uniform(0.3, 1.5),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randrange(1000),
    )


def run_all(llm: graft.LLM, rng: random.Random, count: int) -> tuple[list[Request], CacheView]:
    """Requests come in bursts, share prefixes, differ in priority; some are cancelled, waiting or running."""
    prefixes = [[rng.randrange(3, 128) for _ in range(rng.choice([16, 33, 48]))] for _ in range(6)]
    requests, view = [], CacheView()
    while len(requests) < count or not llm.engine.idle:
        for _ in range(rng.choice([0, 0, 1, 3, 8]) if len(requests) < count else 0):
            tail = [rng.randrange(3, 128) for _ in range(rng.randint(1, 20))]
            prompt = (rng.choice(prefixes) if rng.random() < 0.6 else []) + tail
            requests.append(llm.engine.add(prompt, random_params(rng), priority=rng.choice([0, 0, 0, -1, 1])))
        llm.engine.step()
        if requests and rng.random() < 0.05:
            llm.engine.abort([rng.choice(requests)])
        if rng.random() < 0.02:
            llm.engine.manager.check()
        for event in llm.kv_cache_events():
            view.apply(event)
    return requests, view


@torch.inference_mode()
def wrong_tokens(request: Request, end_tokens: frozenset[int], tokens: list[int] | None = None) -> int:
    """How many of the tokens are not what the model itself, fed the whole sequence at once, gives at that place."""
    new = request.new_tokens if tokens is None else tokens
    if not new:
        return 0
    ids = torch.tensor([[*request.prompt, *new]])
    logits = tiny("mistral").module(ids).logits[0, len(request.prompt) - 1 : -1]  # [new, vocab]
    seed = request.params.seed
    index = request.leader.siblings.index(request) + 1 if request.leader else 0
    twin = Request(request.prompt, request.params, make_generator(None if seed is None else seed + index))
    wrong = 0
    for row, token in zip(logits, new, strict=True):
        state = twin.generator.get_state()
        if sample(row[None], [twin], end_tokens)[0].token != token:
            twin.generator.set_state(state)
            row[token] += SLACK  # two tokens as good as equal: either is right
            wrong += sample(row[None], [twin], end_tokens)[0].token != token
        twin.tokens.append(token)
    return wrong


@pytest.mark.exhaustive
def test_a_soak_ends_with_every_block_free_and_no_wrong_token():
    llm = engine()
    requests, view = run_all(llm, random.Random(0), REQUESTS)
    manager, everyone = llm.engine.manager, [one for request in requests for one in request.family]
    manager.check()
    assert manager.available == manager.blocks and not manager.tables
    assert set(view.blocks) == set(manager.stored) and not any(block.in_use for block in view.blocks.values())
    reasons = {reason: sum(r.finish_reason == reason for r in everyone) for reason in ("length", "stop", "abort")}
    assert sum(reasons.values()) == len(everyone) and min(reasons.values()) > 20
    assert llm.stats.preemptions > 20 and manager.evictions > 500 and sum(r.cached or 0 for r in requests) > 5000
    assert sum(wrong_tokens(request, llm.engine.end_tokens) for request in everyone) == 0
    for request in everyone:
        if request.finish_reason == "length":
            assert len(request.new_tokens) == request.params.max_tokens
        params = request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else llm.engine.end_tokens)}
        assert not ends & set(request.new_tokens[:-1]), "a stop token was passed over"
        if request.finish_reason == "stop":
            assert request.stop_reason == request.tokens[-1]
        if request.params.logprobs is not None:
            assert len(request.logprobs) == len(request.new_tokens)


@pytest.mark.exhaustive
def test_the_soak_would_see_a_wrong_token():
    llm = engine()
    requests, _ = run_all(llm, random.Random(1), 60)
    long = [r for r in requests if len(r.new_tokens) > 6]
    assert len(long) > 5
    for request in long:
        changed = list(request.new_tokens)
        changed[3] = (changed[3] + 1) % 128
        assert wrong_tokens(request, llm.engine.end_tokens, changed) > 0


@pytest.mark.exhaustive
def test_the_soak_would_see_a_block_that_was_not_copied(monkeypatch):
    """Samples of one prompt that write into each other's blocks give wrong tokens, and the check finds them."""
    llm = engine()
    monkeypatch.setattr(llm.engine, "move", lambda tensors, moves: None)
    requests, _ = run_all(llm, random.Random(2), 150)
    assert sum(wrong_tokens(one, llm.engine.end_tokens) for request in requests for one in request.family) > 0
