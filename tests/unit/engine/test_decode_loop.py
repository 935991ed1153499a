"""Decoding by captures, a step ahead of the host: the tokens of the engine that does neither."""

from __future__ import annotations

import random
import re

import pytest
import torch

import graft
from capture_cases import engine, run
from graft.base.errors import LogitsError, OutOfMemory
from graft.engine.decode import choose as choosing
from graft.engine.decode.buffers import StepBuffers
from graft.engine.decode.capture import CapturedSteps
from graft.engine.decode.in_flight import InFlightStep


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(n)] for n in lengths]


def greedy(tokens=24, **options):
    return graft.SamplingParams(max_tokens=tokens, ignore_eos=True, **options)


@pytest.mark.some(1)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_tokens_equal_the_synchronous_engine(seed, plain):
    """Arrivals, stops, priorities, n > 1, log probabilities, penalties, a small cache: the same, token for token."""
    options = {"blocks": 9, "max_num_seqs": 12, "max_num_batched_tokens": 48, "admission": "greedy"}
    expected = run(engine("mistral", False, **options), seed, 50, plain)
    llm = engine("mistral", True, **options)
    got = run(llm, seed, 50, plain)
    assert [r.new_tokens for r in got] == [r.new_tokens for r in expected]
    assert [(r.finish_reason, r.stop_reason) for r in got] == [(r.finish_reason, r.stop_reason) for r in expected]
    assert [r.logprobs and [set(p) for p in r.logprobs] for r in got] == [
        r.logprobs and [set(p) for p in r.logprobs] for r in expected
    ]
    for one, other in zip(got, expected, strict=True):
        drew = one.params.seed is None or one.generator.get_state().equal(other.generator.get_state())
        assert drew, "as many numbers sampled, and no more"
    assert llm.engine.loop.launched > 40 and sum(r.preemptions for r in got) > 0


def test_the_host_is_one_step_behind():
    llm = engine("llama", True, max_num_seqs=8)
    expected = engine("llama", False).generate(prompts((5, 9, 17)), greedy())
    loop = llm.engine.loop
    requests = [llm.engine.add(prompt, greedy()) for prompt in prompts((5, 9, 17))]
    for tokens in range(1, 25):  # the first step is that of the prompts
        assert len(llm.engine.step()) == 3
        assert all(len(r.new_tokens) == tokens for r in requests)
        assert len(loop.in_flight) == (tokens < 24), "the next step is launched already, except after the last"
    assert llm.engine.idle and [r.new_tokens for r in requests] == [o.token_ids for o in expected]
    assert llm.stats.replayed_steps == 23 and llm.stats.steps_ahead == 23 and llm.stats.bucket_misses == 0
    assert llm.stats.decode_tokens == 69 and llm.stats.steps == 24 and llm.stats.decode_seconds > 0


def test_requests_cancelled_in_mid_flight_leave_the_others_alone():
    options = {"blocks": 40, "max_num_seqs": 12, "max_num_batched_tokens": 48}
    whole = run(engine("mistral", False, **options), 7, 40, plain=True)
    some = run(engine("mistral", True, **options), 7, 40, plain=True, abort=True)
    aborted = [r for r in some if r.finish_reason == "abort"]
    assert len(aborted) > 3
    for one, other in zip(some, whole, strict=True):
        end = len(one.new_tokens) if one in aborted else None
        assert one.new_tokens == other.new_tokens[:end]


def test_a_step_writes_only_blocks_that_nobody_else_sees():
    """Also for tokens that are thrown away: what is launched never writes a stored or a shared block."""
    llm = engine("mistral", True, blocks=40, max_num_seqs=12, max_num_batched_tokens=48)
    loop, manager, thrown = llm.engine.loop, llm.engine.manager, []
    launch, drop = loop.launch, InFlightStep.drop

    def checked(step):
        before = [tensor.clone() for tensor in llm.engine.tensors]
        launch(step)
        blocks = (loop.buffers.fed[2, : step.capture.rows] // manager.block_size).tolist()
        due = {one.row: one.request.table for one in step.due}
        for row, block in enumerate(blocks):
            if row not in due:
                assert block == manager.blocks, "a row without a request writes the padding block"
            else:
                assert block in due[row].blocks and manager.refs[block] == 1 and manager.entries[block] is None
        others = [b for b in range(manager.blocks) if b not in blocks]
        for tensor, old in zip(llm.engine.tensors, before, strict=True):
            assert tensor[others].equal(old[others])
        return step

    loop.launch = checked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlightStep, "drop", lambda self, request: thrown.append(request) or drop(self, request))
        run(llm, 3, 40, plain=True, abort=True)
    assert len(thrown) > 5 and loop.launched > 40


def test_equal_requests_share_their_blocks_while_they_decode():
    """Blocks that become full and are stored already are exchanged, and the device is told without a pause."""
    (prompt,) = prompts((21,))
    expected = engine("llama", False).generate([prompt], greedy(60))[0].token_ids
    llm = engine("llama", True, max_num_seqs=4)
    requests = [llm.engine.add(prompt, greedy(60)) for _ in range(3)]
    for _ in range(50):
        llm.engine.step()
    assert max(llm.engine.manager.refs) == 3
    assert len({tuple(r.table.blocks[:-2]) for r in requests}) == 1 and len(requests[0].table.blocks) > 4
    llm.finish(requests)
    assert [r.new_tokens for r in requests] == [expected] * 3
    assert llm.stats.steps_ahead == 59, "never drained"


def test_rows_that_end_become_padding_and_smaller_captures_follow():
    given = prompts((5, 9, 17, 3, 8))
    params = [greedy(n) for n in (6, 30, 12, 18, 30)]
    expected = [o.token_ids for o in engine("llama", False).generate(given, params)]
    llm = engine("llama", True, max_num_seqs=8)
    sizes, play = [], llm.engine.loop.launch
    llm.engine.loop.launch = lambda step: sizes.append(step.capture.rows) or play(step)
    assert [o.token_ids for o in llm.generate(given, params)] == expected
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {8, 4, 2}


def poison(llm):
    """Everything that no request may read is NaN."""
    for tensor in llm.engine.tensors:
        tensor[:-1].fill_(torch.nan)


def test_capturing_writes_the_padding_block_alone():
    llm = engine("llama", True, max_num_seqs=4)
    assert all(not tensor[:-1].any() for tensor in llm.engine.tensors)
    assert len(llm.engine.tensors[0]) == llm.engine.manager.blocks + 1
    given = prompts((5, 9, 17))
    expected = [o.token_ids for o in engine("llama", False).generate(given, greedy())]
    poison(llm)
    assert [o.token_ids for o in llm.generate(given, greedy())] == expected
    poison(llm)
    sampled = graft.SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    llm.generate(given, sampled)  # captured here, in the middle of everything
    used = {b for b in range(llm.engine.manager.blocks) if not llm.engine.tensors[0][b].isnan().all()}
    assert len(used) <= 6


@pytest.mark.some(2)
@pytest.mark.parametrize("at", ["graph", "append", "launch", "wait", "draw"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_step_that_fails_is_done_again(at, error, monkeypatch):
    """Wherever it breaks off: tokens, random numbers and blocks are as if it had not been."""
    llm = engine("llama", True, max_num_seqs=4)
    params = [
        graft.SamplingParams(max_tokens=12, temperature=1.1, seed=3, ignore_eos=True),
        greedy(9),
        graft.SamplingParams(max_tokens=10, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True),
    ]
    given = prompts((5, 15, 9))
    expected = [o.token_ids for o in engine("llama", False).generate(given, params)]
    for steps in (1, 2, 4):
        for calls in (0, 1):
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
                patch.setattr(*targets[at], failing(getattr(*targets[at]), calls, error))
                with pytest.raises(error):
                    for _ in range(3):
                        llm.engine.step()
            assert not llm.engine.loop.in_flight
            llm.engine.manager.check()
            llm.finish(requests)
            assert [r.new_tokens for r in requests] == expected
            assert llm.engine.idle and llm.engine.manager.available == llm.engine.manager.blocks


def failing(call, good, error):
    """Runs `good` times, then fails."""
    left = [good]

    def run(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return call(*args, **options)

    return run


def test_no_memory_for_a_step_is_an_error_with_numbers(monkeypatch):
    llm = engine("llama", True, max_num_seqs=4)
    request = llm.engine.add([5, 6], greedy())
    for _ in range(3):
        llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.loop, "launch", failing(None, 0, torch.OutOfMemoryError("CUDA out of memory")))
        with pytest.raises(OutOfMemory, match="no memory for a step of 1 tokens"):
            llm.engine.step()
    llm.finish([request])
    assert request.new_tokens == engine("llama", False).generate([[5, 6]], greedy())[0].token_ids


def test_logits_that_are_no_numbers_end_their_request_alone():
    llm = engine("llama", True, max_num_seqs=4)
    given = prompts((5, 9))
    expected = [o.token_ids for o in engine("llama", False).generate(given, greedy())]
    captures = llm.engine.loop.captures
    graph = captures.graph

    def broken(ids, positions, *inputs):
        (logits,) = graph(ids, positions, *inputs)
        logits[0, positions[0] == 12] = torch.nan  # the first request's eighth new token, the second's fourth
        return (logits,)

    captures.graph = broken
    outputs = llm.generate(given, greedy())
    for output, tokens, prompt in zip(outputs, expected, given, strict=True):
        assert output.finish_reason == "error" and isinstance(output.error, LogitsError)
        assert output.token_ids == tokens[: 13 - len(prompt)]
    assert llm.engine.idle and llm.engine.manager.available == llm.engine.manager.blocks


def test_a_nucleus_wider_than_the_head_is_drawn_on_the_host(monkeypatch):
    """A head of 8 tokens: wide nuclei are told by the capture, counted, noted, and never wrong."""
    given = prompts((5, 9, 4))
    params = [
        graft.SamplingParams(max_tokens=20, temperature=t, top_p=0.9, top_k=k, seed=i, ignore_eos=True)
        for i, (t, k) in enumerate(((0.2, 0), (5.0, 0), (1.0, 9)))
    ]
    expected = engine("llama", False)
    requests = [expected.engine.add(*one) for one in zip(given, params, strict=True)]
    expected.finish(requests)
    monkeypatch.setattr(choosing, "HEAD", 8)
    llm = engine("llama", True, max_num_seqs=4)
    got = [llm.engine.add(*one) for one in zip(given, params, strict=True)]
    llm.finish(got)
    assert [r.new_tokens for r in got] == [r.new_tokens for r in requests]
    for one, other in zip(got, requests, strict=True):
        assert one.generator.get_state().equal(other.generator.get_state())
    assert llm.stats.host_sampled_tokens == 0, "top_k above the head is known beforehand: all steps go the host's way"
    again = [llm.engine.add(*one) for one in zip(given[:2], params[:2], strict=True)]
    llm.finish(again)
    assert [r.new_tokens for r in again] == [r.new_tokens for r in requests[:2]]
    assert llm.stats.host_sampled_tokens >= 1 and any("wider than" in note for note in llm.report.notes)
    assert not llm.engine.loop.wide


def test_a_batch_without_a_capture_is_counted_and_told():
    llm = engine("llama", True, max_num_seqs=4, cudagraph_capture_sizes=[1, 2])
    given = prompts((5, 9, 17))
    params = [greedy(8), greedy(8), greedy(16)]
    expected = [o.token_ids for o in engine("llama", False).generate(given, params)]
    assert [o.token_ids for o in llm.generate(given, params)] == expected
    assert llm.stats.bucket_misses == 7 and llm.stats.replayed_steps == 8
    told = [note for note in llm.report.notes if "larger than 2" in note]
    assert len(told) == 1
    assert any(
        "2 captured steps, which are direct calls on a CPU, for batches of 1, 2" in n for n in llm.report.notes
    )


def test_a_miss_whose_tokens_the_host_chooses_is_counted_once():
    llm = engine("llama", True, max_num_seqs=4, cudagraph_capture_sizes=[1, 2])
    llm.generate(prompts((5, 9, 17)), greedy(8, logprobs=1))
    assert llm.stats.bucket_misses == 7 and llm.stats.replayed_steps == 0 and llm.stats.steps == 8


def test_a_capture_that_fails_is_told_and_decoding_goes_on(monkeypatch):
    def refuse(self, key):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(CapturedSteps, "capture_step", refuse)
    llm = engine("llama", True, max_num_seqs=4)
    given = prompts((5, 9))
    expected = [o.token_ids for o in engine("llama", False).generate(given, greedy())]
    assert [o.token_ids for o in llm.generate(given, greedy())] == expected
    assert llm.stats.bucket_misses == 23 and llm.stats.replayed_steps == 0
    told = [note for note in llm.report.notes if "RuntimeError: no such thing" in note]
    (note,) = told
    assert re.fullmatch(
        "decode steps without a CUDA graph: capturing a greedy step of 4 rows failed: RuntimeError: no such thing;"
        r" launched kernel by kernel, a step of 1 takes \d+\.\d ms",
        note,
    )


def test_other_kinds_are_recorded_when_first_needed_and_noted():
    llm = engine("llama", True, max_num_seqs=2)
    assert {kind for _, _, kind in llm.engine.loop.captures.made} == {"greedy"}
    hot = {"max_tokens": 4, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    for options in (hot, hot | {"top_p": 0.9}, {"max_tokens": 4, "logprobs": 1}):
        llm.generate([[5, 6]], graft.SamplingParams(**options))
    assert {kind for rows, _, kind in llm.engine.loop.captures.made if rows == 1} == {
        "greedy",
        "sampled",
        "cut",
        "logits",
    }
    notes = [note for note in llm.report.notes if note.startswith("captured when first needed")]
    assert notes == [f"captured when first needed: a {kind} step of 1 rows" for kind in ("sampled", "cut", "logits")]


def test_whoever_waits_without_hope_does_not_stop_the_device():
    """More requests than places: the running ones are decoded ahead, and the next gets in when one has ended."""
    given = prompts((5, 9, 7))
    params = [greedy(20), greedy(12), greedy(10)]
    expected = [o.token_ids for o in engine("llama", False).generate(given, params)]
    llm = engine("llama", True, max_num_seqs=2)
    assert [o.token_ids for o in llm.generate(given, params)] == expected
    assert llm.stats.steps_ahead > 14


def test_who_arrives_is_served_at_once():
    """The step behind the one in flight has the new prompt in it, and is launched before that one is known."""
    llm = engine("llama", True, max_num_seqs=4)
    first = llm.engine.add([5, 6], greedy(60))
    for _ in range(5):
        llm.engine.step()
    assert llm.engine.loop.in_flight
    second = llm.engine.add([7, 8], greedy(5))
    llm.engine.step()
    (step,) = llm.engine.loop.in_flight
    assert step.plan.requests == [first, second] and step.plan.counts == [1, 2] and not second.new_tokens
    llm.engine.step()
    assert len(second.new_tokens) == 1 and len(first.new_tokens) == 7
    llm.finish([first, second])
    plain = engine("llama", False)
    assert [r.new_tokens for r in (first, second)] == [
        o.token_ids for o in plain.generate([[5, 6], [7, 8]], [greedy(60), greedy(5)])
    ]


class Numbers:
    """A tokenizer that writes tokens as numbers."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(f"<{t}>" for t in tokens)


def test_stop_strings_and_streams(monkeypatch):
    """The text that ends a request is seen one step late, and nothing after it is kept."""
    plain, llm = engine("llama", False), engine("llama", True, max_num_seqs=4)
    given = prompts((5, 9, 7))
    free = [o.token_ids for o in plain.generate(given, greedy())]
    params = [greedy(stop=f"<{tokens[i]}>") for tokens, i in zip(free, (6, 11, 23), strict=True)]
    for one in (plain, llm):
        monkeypatch.setattr(one.engine, "tokenizer", Numbers())
    expected, got = plain.generate(given, params), llm.generate(given, params)
    assert [o.to_json() for o in got] == [o.to_json() for o in expected]
    assert {o.finish_reason for o in got} == {"stop"} and len(got[0].token_ids) <= 7
    assert "".join(llm.stream(given[0], params[0])) == expected[0].text
    stream = llm.stream(given[1], greedy())
    next(stream)
    next(stream)
    stream.close()  # with a step on the way
    with llm.held() as held:
        assert held.idle and not held.loop.in_flight and held.step() == []
    assert llm.engine.manager.available == llm.engine.manager.blocks
    assert [o.token_ids for o in llm.generate(given, greedy())] == free


def test_time_is_the_devices_where_the_host_comes_late(monkeypatch):
    """A caller who was away finds the step done: the call takes no time, the step did."""
    monkeypatch.setattr(StepBuffers, "seconds", lambda self: 1e6)  # no host takes as long
    llm = engine("llama", True, max_num_seqs=2)
    llm.generate([[5, 6]], greedy(11))
    assert 10e6 <= llm.stats.decode_seconds < 11e6 and llm.stats.decode_tokens == 10
    assert llm.stats.prefill_seconds < 1e6
