"""The scheduler without a model: who runs, in which order, and that everybody gets there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.engine import scheduler as scheduling
from graft.engine.core import Request
from graft.engine.kv.manager import BlockManager
from graft.engine.params import SamplingParams
from graft.engine.scheduler import Scheduler
from marks import examples

BLOCK = 4


def make(blocks=12, seqs=4, budget=16, forecast=False, beside=None, **options):
    return Scheduler(BlockManager(blocks, BLOCK, **options), seqs, budget, beside, forecast=forecast)


def request(length, new, priority=0, first=0, n=1):
    """`new` tokens after a prompt of `length`; prompts with the same `first` token begin alike."""
    params = SamplingParams(max_tokens=new, n=n, temperature=float(n > 1))
    return Request([first] * length, params, priority=priority)


def step(scheduler, rng=None):
    """What the engine does in a step, with made-up tokens. Returns the plan."""
    plan = scheduler.schedule()
    check(scheduler, plan)
    for one, count in zip(plan.requests, plan.counts, strict=True):
        advance(scheduler, one, count, rng.randrange(3) if rng else 1)
    scheduler.manager.check()
    return plan


def advance(scheduler, one, count, token=1):
    one.computed += count
    scheduler.manager.commit(one.table, one.tokens, one.computed)
    if one.computed == len(one.tokens):
        if len(one.tokens) == len(one.prompt) and one.leader is None:
            one.siblings = [Request(one.prompt, one.params, leader=one) for _ in range(one.params.n - 1)]
            for sibling in one.siblings:
                scheduler.join(sibling, one)
        for each in one.family if len(one.tokens) == len(one.prompt) and one.leader is None else [one]:
            each.tokens.append(token)
            if len(each.new_tokens) == each.params.max_tokens:
                each.finish_reason = "length"
                scheduler.drop(each)


def check(scheduler, plan):
    """A plan keeps to the budget, serves nobody twice, and writes only into blocks of its own."""
    assert len(set(map(id, plan.requests))) == len(plan.requests)
    assert sum(plan.counts) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    beside = scheduler.max_mixed_prefill_tokens
    if beside is not None and any(one.decoding for one in plan.requests):
        prompts = [count for one, count in zip(plan.requests, plan.counts, strict=True) if not one.decoding]
        assert sum(prompts) <= beside
    written = []
    for one, count in zip(plan.requests, plan.counts, strict=True):
        assert one in scheduler.running and 0 < count <= len(one.tokens) - one.computed
        assert len(one.table.blocks) * BLOCK >= one.computed + count
        written += [
            one.table.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(one.computed, one.computed + count)
        ]
        assert all(
            scheduler.manager.refs[one.table.blocks[p // BLOCK]] == 1
            for p in range(one.computed, one.computed + count)
        )
    assert len(set(written)) == len(written), "two sequences write to one place"
    for queue in (scheduler.waiting, scheduler.running):
        assert [r.order for r in queue] == sorted(r.order for r in queue)
    assert all(r.table is None for r in scheduler.waiting) and all(r.table for r in scheduler.running)


ARRIVALS = st.lists(
    st.tuples(*(st.integers(*bounds) for bounds in ((0, 3), (1, 20), (1, 20), (-1, 2), (0, 2), (1, 4)))),
    min_size=1,
    max_size=40,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    ARRIVALS,
    st.integers(10, 30),
    st.integers(1, 6),
    st.integers(1, 24),
    st.sampled_from([None, None, 1, 5]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_trace_ends_with_every_request_done_and_every_block_free(
    arrivals, blocks, seqs, budget, beside, reuse, forecast, seed
):
    """Arrivals at any time, any length, any priority, some cancelled on the way: nobody is lost, nothing leaks."""
    scheduler, rng = make(blocks, seqs, budget, forecast, beside, prefix_reuse=reuse), random.Random(seed)
    requests = []
    for pause, length, new, priority, first, n in arrivals:
        for _ in range(pause):
            step(scheduler, rng)
        requests.append(request(length, new, priority, first, n))
        scheduler.add(requests[-1])
        if rng.random() < 0.1:
            for victim in rng.choice(requests).family:
                victim.finish_reason = victim.finish_reason or "abort"
                scheduler.drop(victim)
    limit = 10 * sum(r.params.n * (len(r.prompt) + r.params.max_tokens) for r in requests)
    while (scheduler.waiting or scheduler.running) and limit:
        assert step(scheduler, rng).requests, "requests are there and none is served"
        limit -= 1
    requests = [one for r in requests for one in r.family]
    assert limit and all(r.finish_reason for r in requests)
    assert all(len(r.new_tokens) == r.params.max_tokens for r in requests if r.finish_reason == "length")
    assert scheduler.manager.available == blocks and not scheduler.manager.tables


def test_prompts_are_bounded_beside_sequences_that_decode_alone(monkeypatch):
    """Whoever decodes waits no longer than for so many tokens; where nobody does, or a prompt is long, none wait."""
    monkeypatch.setattr(scheduling, "LONG_PROMPT", 16)
    scheduler = make(blocks=60, budget=20, beside=5)
    scheduler.add(request(12, 9))
    assert step(scheduler).counts == [12], "nobody decodes"
    for length in (8, 7, 30):
        scheduler.add(request(length, 9, first=length))
    assert step(scheduler).counts == [1, 5], "of the first"
    assert step(scheduler).counts == [1, 3, 2], "of the first what is left, and of the second"
    assert sorted(step(scheduler).counts) == [1, 1, 5], "the second; the third waits behind it"
    long = scheduler.waiting[0]
    plan = scheduler.schedule()
    assert dict(zip(plan.requests, plan.counts, strict=True))[long] == 20 - 3, "all that is left of the step"


def finishes(low, flood, seqs, blocks, steps):
    """Better requests come in every step, without end; is the worse one done within so many steps?"""
    scheduler = make(blocks=blocks, seqs=seqs, budget=16, prefix_reuse=False)
    scheduler.add(low)
    for _ in range(steps):
        for length, new, priority in flood:
            scheduler.add(request(length, new, priority))
        plan = scheduler.schedule()
        for one, count in zip(plan.requests, plan.counts, strict=True):
            advance(scheduler, one, count)
        if low.finish_reason:
            return True
    return False


FLOOD = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(-1, 0)), min_size=1, max_size=3)


@settings(max_examples=examples(60), deadline=None)
@given(FLOOD, st.integers(0, 2), st.integers(1, 4), st.integers(8, 20), st.integers(1, 20), st.integers(1, 10))
def test_nobody_starves_under_a_flood_of_better_requests(flood, priority, seqs, blocks, length, new):
    """Before it come those that arrive within PATIENCE steps for each priority between: their work is the bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "PATIENCE", 4)
        ahead = 4 * (priority + 1) + 1  # steps whose arrivals may go first
        work = ahead * sum(a + b for a, b, _ in flood) + length + new
        assert finishes(request(length, new, priority), flood, seqs, blocks, 4 * work)


def test_a_plain_priority_queue_would_starve(monkeypatch):
    flood = [(4, 3, 0), (4, 3, 0)]
    monkeypatch.setattr(scheduling, "PATIENCE", 50)
    assert not finishes(request(4, 3, priority=1), flood, 2, 8, 40), "better ones go first for a while"
    assert finishes(request(4, 3, priority=1), flood, 2, 8, 300)
    monkeypatch.setattr(scheduling, "PATIENCE", 10**9)
    assert not finishes(request(4, 3, priority=1), flood, 2, 8, 300)


def test_equal_requests_are_served_as_they_come():
    scheduler = make(blocks=6, seqs=3, prefix_reuse=False)
    requests = [request(5, 4) for _ in range(12)]
    for one in requests:
        scheduler.add(one)
    done = []
    while scheduler.waiting or scheduler.running:
        step(scheduler)
        done += [r for r in requests if r.finish_reason and r not in done]
    assert done == requests


def test_a_request_knows_how_long_it_waited(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: next(now))
    scheduler = make(seqs=1)
    first, second = request(3, 2), request(3, 1)
    scheduler.add(first)  # at 0
    scheduler.add(second)  # at 1
    step(scheduler)  # the first is let in at 2
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert (first.queued, second.queued) == (2, 2)  # the second at 3
    again = request(3, 1)
    scheduler.add(again)
    scheduler.admit(again)
    scheduler.preempt(again)
    scheduler.admit(again)
    assert again.queued == 1  # one that gave way was begun already


def test_a_better_priority_takes_the_place_of_the_last():
    scheduler = make(blocks=4, seqs=2)
    first, second = request(7, 9, first=1), request(7, 9, first=2)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    urgent = request(7, 2, priority=-1, first=3)
    scheduler.add(urgent)
    plan = step(scheduler)
    assert urgent in plan.requests and second in scheduler.waiting and first in scheduler.running
    assert second.preemptions == 1 and first.preemptions == 0


def test_who_lacks_memory_takes_it_from_the_last_and_it_is_computed_again():
    scheduler = make(blocks=5, seqs=3, prefix_reuse=False)
    first, last = request(8, 12, first=1), request(8, 4, first=2)
    scheduler.add(first)
    scheduler.add(last)
    preempted = []
    while scheduler.waiting or scheduler.running:
        plan = step(scheduler)
        if last.preemptions and not preempted:
            preempted = list(plan.requests)
            assert last.computed == 0 and last.table is None and len(last.new_tokens) > 0
    assert preempted == [first] and first.preemptions == 0
    assert len(first.new_tokens) == 12 and len(last.new_tokens) == 4


def test_decoding_goes_on_while_a_long_prompt_is_fed_in_chunks():
    scheduler = make(blocks=40, seqs=4, budget=8)
    short = request(3, 20)
    scheduler.add(short)
    step(scheduler)
    long = request(50, 2, first=1)
    scheduler.add(long)
    chunks = []
    while not long.new_tokens:
        before = len(short.new_tokens)
        plan = step(scheduler)
        assert len(short.new_tokens) == before + 1 and plan.requests[0] is short
        chunks.append(plan.counts[1])
    assert chunks == [7, 7, 7, 7, 7, 7, 7, 1]


def test_a_request_reuses_what_another_left():
    scheduler = make(blocks=20)
    for _ in range(2):
        one = request(11, 1, first=5)
        scheduler.add(one)
        step(scheduler)
    assert one.cached == 8 and one.finish_reason == "length"


def test_a_cancelled_prompt_gives_back_its_blocks_in_the_middle():
    scheduler = make(blocks=20, budget=8)
    one = request(40, 2)
    scheduler.add(one)
    step(scheduler)
    assert one.computed == 8 and scheduler.manager.available < 20
    scheduler.drop(one)
    assert scheduler.manager.available == 20 and not scheduler.schedule().requests


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_below_the_number_of_sequences_is_kept(budget):
    scheduler = make(blocks=40, seqs=8, budget=budget)
    requests = [request(3, 3, first=i) for i in range(6)]
    for one in requests:
        scheduler.add(one)
    for _ in range(200):
        step(scheduler)
    assert all(r.finish_reason == "length" for r in requests)


def test_a_request_that_comes_back_with_one_token_left_counts_in_the_budget():
    scheduler = make(blocks=20, budget=10)
    running, back, new = request(1, 9), request(8, 9, first=1), request(1, 9, first=2)
    for one in (running, back):
        scheduler.add(one)
    step(scheduler)
    scheduler.preempt(back)
    scheduler.add(new)
    scheduler.max_num_batched_tokens = 2
    plan = step(scheduler)
    assert plan.requests == [running, back] and plan.counts == [1, 1] and back.table.cached == 8
    assert new in scheduler.waiting


def test_a_prompt_that_stands_first_moves_on_whatever_decodes():
    scheduler = make(blocks=40, seqs=8, budget=4)
    decoding = [request(1, 60, priority=5, first=i) for i in range(4)]
    for one in decoding:
        scheduler.add(one)
    while not all(one.decoding for one in decoding):
        step(scheduler)
    urgent = request(9, 2, priority=-5, first=7)
    scheduler.add(urgent)
    for _ in range(9):
        step(scheduler)
    assert urgent.new_tokens and all(not one.finish_reason for one in decoding)
