"""Decoding by recordings, a step ahead of the host: the tokens of the engine that does neither (R43)."""

from __future__ import annotations

import random

import pytest
from decode_cases import engine, random_params

import graft
from graft.kvcache.events import CacheView


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(n)] for n in lengths]


def greedy(tokens=24, **options):
    return graft.SamplingParams(max_tokens=tokens, ignore_eos=True, **options)


def traffic(rng, count, plain):
    """(pause before it, prompt, parameters, priority, cancelled after so many steps or None)."""
    prefixes = [[rng.randrange(3, 128) for _ in range(rng.choice([16, 33, 48]))] for _ in range(3)]
    for _ in range(count):
        tail = [rng.randrange(3, 128) for _ in range(rng.randint(1, 20))]
        prompt = (rng.choice(prefixes) if rng.random() < 0.6 else []) + tail
        pause = rng.choice([0, 0, 0, 1, 6, 25])
        yield pause, prompt, random_params(rng, plain), rng.choice([0, 0, 0, -1, 1])


def run(llm, seed, count, plain=False, abort=False):
    """All requests of the traffic, with what can be checked on the way checked."""
    requests, view, rng = [], CacheView(), random.Random(seed + 1)

    def step():
        llm.engine.step()
        if rng.random() < 0.2:
            llm.engine.manager.check()
        for event in llm.kv_cache_events():
            view.apply(event)
        if abort and rng.random() < 0.1:
            llm.engine.abort([rng.choice(requests)])

    for pause, prompt, params, priority in traffic(random.Random(seed), count, plain):
        for _ in range(pause):
            step()
        requests.append(llm.submit(prompt, params, priority=priority))
    while not llm.engine.idle:
        step()
    manager = llm.engine.manager
    manager.check()
    assert manager.available == manager.blocks and not manager.tables
    assert set(view.blocks) == set(manager.stored)
    return [one for request in requests for one in request.family]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_equal_the_synchronous_engine_r43(seed, plain):
    """Arrivals, stops, priorities, n > 1, log probabilities, penalties, a small cache: the same, token for token."""
    options = {"blocks": 40, "max_num_seqs": 12, "max_num_batched_tokens": 48}
    expected = run(engine("mistral", False, **options), seed, 60, plain)
    llm = engine("mistral", True, **options)
    got = run(llm, seed, 60, plain)
    assert [r.new_tokens for r in got] == [r.new_tokens for r in expected]
    assert [(r.finish_reason, r.stop_reason) for r in got] == [(r.finish_reason, r.stop_reason) for r in expected]
    assert [r.logprobs and [set(p) for p in r.logprobs] for r in got] == [
        r.logprobs and [set(p) for p in r.logprobs] for r in expected
    ]
    for one, other in zip(got, expected, strict=True):
        drew = one.params.seed is None or one.generator.get_state().equal(other.generator.get_state())
        assert drew, "as many numbers drawn, and no more"
    assert llm.engine.loop.launched > 40


def test_the_host_is_one_step_behind_r43():
    llm = engine("llama", True)
    expected = engine("llama", False).generate(prompts((5, 9, 17)), greedy())
    loop = llm.engine.loop
    requests = [llm.submit(prompt, greedy()) for prompt in prompts((5, 9, 17))]
    llm.engine.step()  # the prompts
    assert not loop.flights
    for tokens in range(2, 25):
        assert len(llm.engine.step()) == 3
        assert all(len(r.new_tokens) == tokens for r in requests)
        assert len(loop.flights) == (tokens < 24), "the next step is launched already, except after the last"
    assert llm.engine.idle and [r.new_tokens for r in requests] == [o.token_ids for o in expected]
    assert llm.stats.replayed_steps == 23 and llm.stats.steps_ahead == 22 and llm.stats.bucket_misses == 0
    assert llm.stats.decode_tokens == 69 and llm.stats.steps == 24 and llm.stats.decode_seconds > 0
