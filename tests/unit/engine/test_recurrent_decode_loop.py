"""Recurrent layers decoded by captures, a step ahead of the host: who is taken back is computed from its start."""

from __future__ import annotations

import random

import pytest
import torch

import graft
from capture_cases import engine, run
from graft.base.errors import LogitsError
from graft.engine.decode import choose as choosing
from graft.engine.decode.build import loop_problem
from graft.engine.decode.in_flight import InFlightStep
from graft.engine.options import EngineOptions
from graft.engine.setup.self_check import self_check
from marks import short

FAMILIES = short(["lfm2", "qwen3-next"], "lfm2")


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(n)] for n in lengths]


def greedy(tokens=24, **options):
    return graft.SamplingParams(max_tokens=tokens, ignore_eos=True, **options)


def sampled(seed, tokens=24, **options):
    return graft.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, **options)


def same(got, expected):
    assert [r.new_tokens for r in got] == [r.new_tokens for r in expected]
    assert [(r.finish_reason, r.stop_reason) for r in got] == [(r.finish_reason, r.stop_reason) for r in expected]
    for one, other in zip(got, expected, strict=True):
        drew = one.params.seed is None or one.generator.get_state().equal(other.generator.get_state())
        assert drew, "as many numbers sampled, and no more"


def played(llm, given, params):
    requests = [llm.engine.add(*one) for one in zip(given, params, strict=True)]
    llm.finish(requests)
    return [one for request in requests for one in request.family]


def whole(llm):
    """Every block and every slot has come back."""
    llm.engine.manager.check()
    assert llm.engine.idle and llm.engine.manager.available == llm.engine.manager.blocks
    assert sorted(llm.engine.states.free) == list(range(llm.engine.states.slots))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("seed", short(range(4), 0))
def test_tokens_equal_the_synchronous_engine(family, seed, plain):
    """Arrivals, stops, priorities, n > 1, log probabilities, penalties, a small cache: the same, token for token."""
    options = {"blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 48, "admission": "greedy"}
    expected = run(engine(family, False, **options), seed, 14, plain)
    llm = engine(family, True, **options)
    got = run(llm, seed, 14, plain)
    same(got, expected)
    whole(llm)
    assert llm.engine.loop.launched > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_whoever_gives_way_in_mid_flight_is_computed_again(family):
    """Three requests that come to twelve blocks, of which there are eight; a fourth that waits for a slot."""
    options = {"blocks": 8, "max_num_seqs": 3, "admission": "greedy"}
    given = prompts((30, 29, 31, 12))
    params = [greedy(20), sampled(1, 20, temperature=1.2), greedy(20), sampled(2, 9, temperature=0.7, top_p=0.9)]
    expected = played(engine(family, False), given, params)
    llm = engine(family, True, **options)
    same(played(llm, given, params), expected)
    whole(llm)
    assert llm.stats.preemptions > 0 and llm.stats.steps_ahead > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_cancelled_in_mid_flight_leave_the_others_alone(family):
    """Their slots go to others while a step is on its way that writes to them."""
    options = {"blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": 48}
    expected = run(engine(family, True, **options), 7, 20, plain=True)
    llm = engine(family, True, **options)
    some = run(llm, 7, 20, plain=True, abort=True)
    aborted = [r for r in some if r.finish_reason == "abort"]
    assert len(aborted) > 2
    for one, other in zip(some, expected, strict=True):
        end = len(one.new_tokens) if one in aborted else None
        assert one.new_tokens == other.new_tokens[:end]
    whole(llm)


def test_the_device_is_a_step_ahead():
    llm = engine("lfm2", True, max_num_seqs=8)
    given = prompts((5, 9, 17))
    expected = engine("lfm2", False).generate(given, greedy())
    assert [o.token_ids for o in llm.generate(given, greedy())] == [o.token_ids for o in expected]
    assert llm.stats.replayed_steps == llm.stats.steps_ahead == 23 and llm.stats.bucket_misses == 0


def test_rows_that_end_leave_the_slot_that_another_has_by_then():
    """A row that has left a capture writes to nobody's slot, like padding: its own may be another request's."""
    llm = engine("lfm2", True, max_num_seqs=8)
    loop, states, seen = llm.engine.loop, llm.engine.states, []
    launch = loop.launch

    def checked(step):
        before = [tensor.clone() for tensor in states.tensors]
        launch(step)
        slots = loop.buffers.state_slots(step.capture.rows).tolist()
        rows = {one.row: one.request.state_slot for one in step.due}
        assert slots == [rows.get(row, states.nobody) for row in range(step.capture.rows)]
        others = [slot for slot in range(states.slots) if slot not in rows.values()]
        for tensor, old in zip(states.tensors, before, strict=True):
            assert tensor[others].equal(old[others])
        seen.append(slots.count(states.nobody))
        return step

    loop.launch = checked
    params = [greedy(6), greedy(20), greedy(12, stop_token_ids=tuple(range(0, 128, 5))), greedy(20), greedy(9)]
    given = prompts((5, 9, 7, 3, 8))
    expected = played(engine("lfm2", False, max_num_seqs=8), given, params)
    same(played(llm, given, params), expected)
    assert {0, 1, 3} <= set(seen) and llm.stats.steps_ahead > 15


@pytest.mark.parametrize("family", FAMILIES)
def test_a_nucleus_wider_than_the_head_is_computed_again(family, monkeypatch):
    """A head of 8 tokens: a capture tells of a wider one when its step, and the one behind it, have fed the state."""
    given = prompts((5, 9, 4, 6))
    params = [sampled(i, 20, temperature=t, top_p=0.9) for i, t in enumerate((0.2, 5.0, 1.0))] + [greedy(20)]
    expected = played(engine(family, False), given, params)
    monkeypatch.setattr(choosing, "HEAD", 8)
    llm = engine(family, True, max_num_seqs=4)
    same(played(llm, given, params), expected)
    whole(llm)
    assert llm.stats.host_sampled_tokens >= 1 and llm.stats.preemptions >= 1
    assert not llm.engine.loop.wide


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", short([0, 2], 0))
def test_wide_nuclei_in_any_traffic(family, seed, monkeypatch):
    """With prompts that come while a step is on its way, blocks that run out, and requests that are cancelled."""
    options = {"blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 48, "admission": "greedy"}
    expected = run(engine(family, False, **options), seed, 16, plain=True)
    monkeypatch.setattr(choosing, "HEAD", 8)
    llm = engine(family, True, **options)
    same(run(llm, seed, 16, plain=True), expected)
    whole(llm)
    some = run(llm, seed, 16, plain=True, abort=True)
    for one, other in zip(some, expected, strict=True):
        end = len(one.new_tokens) if one.finish_reason == "abort" else None
        assert one.new_tokens == other.new_tokens[:end]
    whole(llm)
    assert any("wider than" in note for note in llm.report.notes)


def test_a_nucleus_that_gets_wide_in_the_middle_is_computed_again(monkeypatch):
    """Of a request that decodes ahead of the host, beside others that go on."""
    given = prompts((5, 9, 7))
    params = [sampled(0, 30, temperature=1.0, top_p=0.9), greedy(30), sampled(3, 30, temperature=1.3)]
    expected = played(engine("lfm2", False), given, params)
    llm = engine("lfm2", True, max_num_seqs=4)
    original = InFlightStep.tokens
    monkeypatch.setattr(InFlightStep, "tokens", lambda step: wide_at(step, original(step), 11))
    requests = played(llm, given, params)
    same(requests, expected)
    whole(llm)
    assert [r.preemptions for r in requests] == [1, 0, 0] and llm.stats.host_sampled_tokens == 1


def wide_at(step, tokens, at):
    """The first request's token is said to have a nucleus that is too wide when it has so many."""
    for one in step.due:
        new = len(one.request.tokens) - len(one.request.prompt)
        if one.request.params.top_p < 1 and new == at:
            tokens[step.index[one.request]] = choosing.WIDE
    return tokens


@pytest.mark.some(2)
@pytest.mark.parametrize("at", ["graph", "append", "launch", "wait", "draw"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_step_that_fails_is_computed_again(at, error, monkeypatch):
    llm = engine("lfm2", True, max_num_seqs=4)
    params = [sampled(3, 12, temperature=1.1), greedy(9), sampled(5, 10, temperature=0.8, top_p=0.9)]
    given = prompts((5, 15, 9))
    expected = [o.token_ids for o in engine("lfm2", False).generate(given, params)]
    for steps in (1, 2, 4):
        for calls in (0, 1, 2):
            requests = [llm.engine.add(*one) for one in zip(given, params, strict=True)]
            for _ in range(steps):
                llm.engine.step()
            targets = {
                "graph": (llm.engine.loop.captures, "graph"),
                "append": (llm.engine, "append_token"),
                "launch": (llm.engine.loop, "launch"),
                "wait": (InFlightStep, "tokens"),
                "draw": (torch, "rand"),
            }
            with monkeypatch.context() as patch:
                patch.setattr(*targets[at], late(getattr(*targets[at]), calls, error))
                with pytest.raises(error):
                    for _ in range(4):
                        llm.engine.step()
            assert not llm.engine.loop.in_flight
            llm.finish(requests)
            assert [r.new_tokens for r in requests] == expected
            whole(llm)


def late(call, good, error):
    """Runs `good` times, then fails when it has done what it does."""
    left = [good]

    def run(*args, **options):
        left[0] -= 1
        found = call(*args, **options)
        if left[0] < 0:
            raise error
        return found

    return run


def test_logits_that_are_no_numbers_end_their_request_alone():
    llm = engine("lfm2", True, max_num_seqs=4)
    given = prompts((5, 9))
    expected = [o.token_ids for o in engine("lfm2", False).generate(given, greedy())]
    captures = llm.engine.loop.captures
    graph = captures.graph

    def broken(ids, positions, *inputs):
        (logits,) = graph(ids, positions, *inputs)
        logits[0, positions[0] == 12] = torch.nan
        return (logits,)

    captures.graph = broken
    for output, tokens, prompt in zip(llm.generate(given, greedy()), expected, given, strict=True):
        assert output.finish_reason == "error" and isinstance(output.error, LogitsError)
        assert output.token_ids == tokens[: 13 - len(prompt)]
    captures.graph = graph
    assert [o.token_ids for o in llm.generate(given, greedy())] == expected, "no NaN is left in a slot"
    whole(llm)


class Numbers:
    """A tokenizer that writes tokens as numbers."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(f"<{t}>" for t in tokens)


def test_stop_strings_are_seen_a_step_late_and_the_slot_goes_on(monkeypatch):
    """To requests that wait for it."""
    plain, llm = engine("lfm2", False, max_num_seqs=2), engine("lfm2", True, max_num_seqs=2)
    given = prompts((5, 9, 7, 6))
    free = [o.token_ids for o in plain.generate(given, greedy())]
    params = [greedy(stop=f"<{tokens[i]}>") for tokens, i in zip(free, (6, 11, 20, 3), strict=True)]
    for one in (plain, llm):
        monkeypatch.setattr(one.engine, "tokenizer", Numbers())
    expected, got = plain.generate(given, params), llm.generate(given, params)
    assert [o.to_json() for o in got] == [o.to_json() for o in expected]
    assert {o.finish_reason for o in got} == {"stop"}
    stream = llm.stream(given[1], greedy())
    next(stream)
    next(stream)
    stream.close()  # with a step on the way
    assert [o.token_ids for o in llm.generate(given, greedy())] == free
    whole(llm)


def test_samples_of_one_prompt_begin_with_its_state_alone():
    """While others decode, a step ahead."""
    given = prompts((12, 5, 9))
    params = [greedy(30), sampled(5, 9, temperature=2.0, n=3), sampled(8, 12, temperature=1.5, n=2)]
    expected = played(engine("lfm2", False, max_num_seqs=8), given, params)
    llm = engine("lfm2", True, max_num_seqs=8)
    same(played(llm, given, params), expected)
    assert len({tuple(r.new_tokens) for r in expected}) == 6 and llm.stats.steps_ahead > 20
    whole(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_looks_at_the_states_of_captured_steps(family):
    """As many tokens are in them as were looked at, though the engine runs a step ahead; and nothing is left."""
    llm = engine(family, True)
    cache = llm.cache
    assert "agree" in self_check(llm.engine, llm.model, cache.tensors(), cache.state_names)
    assert not any(tensor[:-1].any() for tensor in llm.engine.states.tensors)
    assert not any(tensor[:-1].any() for tensor in llm.engine.tensors)


def test_recurrent_layers_are_no_reason_against_captures():
    assert loop_problem(torch.device("cuda"), "eager", EngineOptions()) is None
