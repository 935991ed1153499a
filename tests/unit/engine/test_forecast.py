"""Who is let in when the cache will hold everybody to the end: no one is sent away, and no one waits for nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graft.engine.core import Request
from graft.engine.forecast import FIRST, REMEMBERED, OutputLengths, peak_blocks
from graft.engine.kv.manager import BlockManager
from graft.engine.params import SamplingParams
from graft.engine.scheduler import ASK_AGAIN, Scheduler

BLOCK = 4


def request(length, new, **options):
    return Request([1] * length, SamplingParams(max_tokens=new, **{"ignore_eos": True, **options}))


def run(scheduler, requests, seen=None):
    """All of them to the end, one token a request and step once its prompt is in. Returns the steps."""
    for one in requests:
        scheduler.add(one)
    steps = 0
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        steps += 1
        assert plan.requests, "requests are there and none is served"
        for one, count in zip(plan.requests, plan.counts, strict=True):
            one.computed += count
            scheduler.manager.commit(one.table, one.tokens, one.computed)
            if one.computed == len(one.tokens):
                one.tokens.append(1)
                if len(one.new_tokens) == one.params.max_tokens:
                    one.finish_reason = "length"
                    scheduler.drop(one)
        if seen is not None:
            seen.append(len(scheduler.running))
    return steps


def made(blocks, forecast=True, seqs=64, budget=64):
    return Scheduler(BlockManager(blocks, BLOCK, prefix_reuse=False), seqs, budget, forecast=forecast)


SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=12)


@given(SIZES)
def test_the_peak_is_the_most_that_is_held_at_any_time(needs):
    """Against every moment counted; a block more for each is what its last one leaves empty."""
    held = 0
    for time in range(max(remaining for _, remaining in needs) + 1):
        held = max(held, sum(-(-(length + time) // BLOCK) for length, remaining in needs if remaining >= time))
    assert held <= peak_blocks(needs, BLOCK) <= held + len(needs) + 1


@given(SIZES, st.integers(24, 60))
def test_nobody_is_sent_away_where_lengths_are_known(sizes, blocks):
    scheduler = made(blocks)
    requests = [request(*size) for size in sizes]
    run(scheduler, requests)
    assert scheduler.preemptions == 0 and all(len(r.new_tokens) == r.params.max_tokens for r in requests)


def test_without_a_forecast_prompts_are_computed_again():
    """And with it as many run at once as the cache holds, not fewer."""
    requests = [(8, 56)] * 24
    greedy, seen = made(blocks=64, forecast=False), []
    run(greedy, [request(*size) for size in requests])
    assert greedy.preemptions > 5
    careful = made(blocks=64)
    run(careful, [request(*size) for size in requests], seen)
    assert careful.preemptions == 0 and max(seen) == 4, "four of 16 blocks each"


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 16))
def test_those_that_fill_the_cache_run_at_once(length, new, count):
    """Down to the last block: one who is left out runs alone when the others have ended."""
    scheduler = made(count * -(-(length + new - 1) // BLOCK), budget=4096)
    steps = run(scheduler, [request(length, new) for _ in range(count)])
    assert steps == new and scheduler.preemptions == 0


def test_those_that_end_soon_make_room_for_the_next():
    """Ten that are nearly done and one that needs their blocks later: it need not wait for them."""
    scheduler = made(blocks=48, budget=256)
    short, long = [request(9, 3) for _ in range(10)], request(8, 100)
    for one in (*short, long):
        scheduler.add(one)
    scheduler.schedule()
    assert long in scheduler.running, "30 and 27 blocks, but never at the same time"
    crowded = made(blocks=48, budget=256)
    for one in (*[request(9, 60) for _ in range(2)], request(8, 100)):
        crowded.add(one)
    crowded.schedule()
    assert len(crowded.running) == 2 and len(crowded.waiting) == 1


def test_one_who_was_refused_is_asked_again_though_nobody_left():
    """All end at the same time; the later the last comes, the less it has grown by then."""
    scheduler = made(blocks=40)
    early = [request(4, 60) for _ in range(2)]
    late = request(4, 60)
    seen = []
    run(scheduler, [*early, late], seen)
    entered = seen.index(3)
    assert 0 < entered < 60 and entered % ASK_AGAIN == 0 and scheduler.preemptions == 0


def test_a_request_alone_is_let_in_whatever_is_expected_of_it():
    scheduler = made(blocks=4)
    run(scheduler, [request(4, 12), request(4, 12)])
    assert scheduler.preemptions == 0


def test_blocks_that_are_shared_count_once():
    """Ten that begin alike: the cache holds them together, and not with a prompt each."""
    scheduler = Scheduler(BlockManager(60, BLOCK), 64, 4096)
    prompt = list(range(160))  # 40 blocks
    first = Request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    run(scheduler, [first])
    for _ in range(4):
        scheduler.add(Request(prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    scheduler.schedule()
    assert len(scheduler.running) == 4


def test_siblings_are_counted_with_the_first():
    one, other = request(8, 40, n=4, temperature=1.0), request(8, 40)
    scheduler = made(blocks=40)
    scheduler.add(one)
    scheduler.add(other)
    scheduler.schedule()
    assert scheduler.running == [one]
    alone = made(blocks=40)
    one = request(8, 40)
    alone.add(one)
    alone.add(other)
    alone.schedule()
    assert alone.running == [one, other]


def test_siblings_that_joined_count_by_themselves():
    """Four of twelve blocks each, when the first has its prompt in the cache and when it has shared it."""
    scheduler, one = made(blocks=100), request(8, 40, n=4, temperature=1.0)
    scheduler.add(one)
    scheduler.schedule()
    assert scheduler.forecast.total == 4 * 12
    one.computed = 8
    scheduler.manager.commit(one.table, one.tokens, 8)
    for _ in range(3):
        scheduler.join(Request(one.prompt, one.params, leader=one), one)
    assert scheduler.forecast.total == 4 * 12 and len(scheduler.running) == 4
    scheduler.drop(one)
    assert scheduler.forecast.total == 3 * 12


def test_what_is_expected_of_those_that_may_stop():
    lengths, asked = OutputLengths(), request(4, 5000, ignore_eos=False)
    assert lengths.remaining(asked) == FIRST, "before any has ended"
    assert lengths.remaining(request(4, 5000)) == 5000, "nothing but its limit ends this one"
    assert lengths.remaining(request(4, 5000, stop_token_ids=(3,))) == FIRST
    for tokens in (10, 20, 30, 40):
        lengths.record(tokens)
    assert lengths.remaining(asked) == 30
    asked.tokens += [1] * 25
    assert lengths.remaining(asked) == 15, "of those that came further the longer half begins at 40"
    asked.tokens += [1] * 75
    assert lengths.remaining(asked) == 100, "further than all of them: half way"
    assert lengths.remaining(request(4, 7, ignore_eos=False)) == 7, "never more than it may"
    for _ in range(REMEMBERED):
        lengths.record(3)
    assert lengths.ordered == [3] * REMEMBERED, "what was long ago is forgotten"
