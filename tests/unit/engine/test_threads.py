"""One driver thread, many callers: the tokens of one alone, cancelled requests freed, nothing left."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graft
from capture_cases import engine as capturing_engine
from capture_cases import random_params
from graft.base.errors import EngineFailed, PromptTooLong, UsageError
from graft.engine.core import Request
from graft.engine.driver import Shift
from graft.engine.watch import ThreadWatch
from marks import examples
from thread_cases import GREEDY, LONG, PATIENCE, Gate, Numbers, empty, engine, prompts


@pytest.mark.some(1)
@pytest.mark.parametrize("captured", [False, True])
def test_eight_threads_get_the_tokens_of_one_after_another(captured):
    llm = capturing_engine("llama", captured, max_num_seqs=6, max_num_batched_tokens=64)
    given_prompts = prompts(24)
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in given_prompts]
    start = threading.Barrier(8)

    def ask(thread):
        start.wait()
        mine = given_prompts[thread::8]
        if thread % 2:
            return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in mine]
        return [output.token_ids for output in llm.generate(mine, GREEDY)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(8)))
    assert [tokens for thread in range(8) for tokens in found[thread]] == [
        tokens for thread in range(8) for tokens in alone[thread::8]
    ]
    assert empty(llm)


@settings(max_examples=examples(8), deadline=None)
@given(seed=st.integers(0, 1000), threads=st.integers(2, 6), captured=st.booleans(), blocks=st.sampled_from([12, 60]))
def test_whatever_threads_do_the_tokens_are_those_of_one_alone(seed, threads, captured, blocks):
    """generate, stream, submit and finish, coroutines; some break off in the middle. Any parameters with a seed."""
    rng = random.Random(seed)
    llm = capturing_engine("llama", captured, blocks=blocks, max_num_seqs=5, max_num_batched_tokens=48)
    llm.engine.tokenizer = Numbers()
    asked = []
    for prompt in prompts(3 * threads, seed):
        params = random_params(rng)
        asked.append((prompt, params, rng.choice(["generate", "submit", "task", "stream", "drop"])))
    alone = [llm.generate([prompt], params)[0] for prompt, params, _ in asked]
    start = threading.Barrier(threads)

    def ask(index):
        start.wait()
        for (prompt, params, way), expected in list(zip(asked, alone, strict=True))[index::threads]:
            if way == "generate" or params.n > 1:
                (output,) = llm.generate([prompt], params)
                assert [o.token_ids for o in (output, *output.alternatives)] == [
                    o.token_ids for o in (expected, *expected.alternatives)
                ]
            elif way == "submit":
                request = llm.submit(prompt, params)
                llm.finish([request])
                assert request.new_tokens == expected.token_ids
            elif way == "task":
                (output,) = asyncio.run(llm.agenerate([prompt], params))
                assert output.token_ids == expected.token_ids
            elif way == "stream":
                assert "".join(llm.stream(prompt, params)) == expected.text
            else:
                pieces = llm.stream(prompt, params)
                assert expected.text.startswith(next(pieces, ""))
                pieces.close()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(ask, range(threads)))
    assert empty(llm)


def test_requests_of_several_threads_share_a_batch():
    llm = engine()
    gate, seen = Gate(llm), []
    with llm.held():
        pass  # the thread is there
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(llm.generate, [[5, 6]], GREEDY)
        gate.came.acquire()  # the first step waits: the others come meanwhile
        entered = [llm.submit(prompt, GREEDY) for prompt in ([7, 8], [9])]
        run = gate.run
        gate.run = lambda *inputs: seen.append(len(inputs[2])) or run(*inputs)
        gate.open()
        threads.submit(llm.finish, entered).result()
        first.result()
    assert seen[:2] == [1, 3]


def test_a_stream_that_is_closed_or_never_begun_frees_its_request():
    llm = engine()
    begun, never = llm.stream([5, 6], LONG), llm.stream([7, 8], LONG)
    assert next(begun).startswith("<")
    begun.close()
    del never
    request = llm.submit([9], LONG)
    unread = llm.follow(request)
    del unread
    assert empty(llm) and request.finish_reason == "abort"
    gate = Gate(llm)
    late = llm.submit([4], LONG)
    gate.came.acquire()  # in the middle of a step
    llm.abort(late)
    gate.open()
    assert empty(llm) and late.finish_reason == "abort" and len(late.new_tokens) == 1


def test_a_cancelled_task_frees_its_request():
    llm = engine()
    gate = Gate(llm)

    async def main():
        task = asyncio.create_task(llm.agenerate([[5, 6], [7]], LONG))
        await asyncio.to_thread(gate.came.acquire)
        task.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        pieces = llm.astream([5, 6], LONG)
        assert (await anext(pieces)).startswith("<")
        await pieces.aclose()
        never = llm.astream([5], LONG)
        del never
        outputs, text = await asyncio.gather(llm.agenerate([5, 6], GREEDY), whole(llm.astream([5, 6], GREEDY)))
        assert outputs[0].text == text
        with pytest.raises(UsageError, match="a stream is one text"):
            await anext(llm.astream([5], graft.SamplingParams(n=2, temperature=1.0)))
        with pytest.raises(PromptTooLong):
            await llm.agenerate([5] * 200, LONG)

    async def whole(pieces):
        return "".join([piece async for piece in pieces])

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert empty(llm)


def test_a_loop_that_is_closed_does_not_stop_the_driver():
    """Nobody is there to be told of the end."""
    llm = engine()
    gate = Gate(llm)
    loop = asyncio.new_event_loop()
    task = loop.create_task(llm.agenerate([5, 6], GREEDY))
    loop.run_until_complete(asyncio.sleep(0))
    gate.came.acquire()
    loop.close()
    gate.open()
    assert len(llm.generate([[5, 6]], LONG)[0].token_ids) == 200, "it ends later than the other"
    assert empty(llm)
    task._log_destroy_pending = False


def test_ctrl_c_while_waiting_frees_the_requests():
    llm = engine()
    gate = Gate(llm)

    def interrupt():
        gate.came.acquire()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6], [7, 8]], LONG)
    sender.join()
    gate.open()
    assert empty(llm)


def test_whoever_holds_the_engine_steps_it_alone():
    llm = engine()
    expected = llm.generate([[5, 6]], GREEDY)[0].token_ids
    with ThreadPoolExecutor(1) as threads:
        with llm.held() as held:
            request = held.add([5, 6], GREEDY)
            other = threads.submit(llm.generate, [[5, 6]], GREEDY)
            while not held.idle:
                held.step()
            assert request.new_tokens == expected and not other.done()
            with pytest.raises(EngineFailed, match="this thread holds the engine"):
                llm.generate([[5]], GREEDY)
            left = held.add([5, 6], GREEDY)
            llm.abort(held.add([7], LONG))
        assert other.result(PATIENCE)[0].token_ids == expected
        llm.finish([left])
        assert left.new_tokens == expected
    assert empty(llm)


def test_progress_is_told_in_the_callers_thread():
    llm, told, may = engine(), [], threading.Event()
    run, steps = llm.engine.graph, []

    def third_waits(*inputs):
        steps.append(1)
        if len(steps) == 3:
            may.wait(PATIENCE)
        return run(*inputs)

    def progress(what, done, total):
        told.append((what, done, total, threading.current_thread()))
        if done == 1:
            may.set()

    llm.engine.graph = third_waits
    params = [graft.SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3, 3)]
    llm.generate([[5], [6], [7]], params, progress=progress)
    expected = [("generating", done, 3, threading.main_thread()) for done in (0, 1, 2)]
    assert told in (expected[:2], expected), "the last two end in one step: the caller may wake between them"


def test_the_thread_count_of_the_caller_holds():
    llm, seen = engine(), []
    run = llm.engine.graph
    llm.engine.graph = lambda *inputs: seen.append(torch.get_num_threads()) or run(*inputs)
    before = torch.get_num_threads()
    try:
        for count in (2, 1, 3):
            torch.set_num_threads(count)
            llm.generate([[5]], graft.SamplingParams(max_tokens=1))
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 1, 3]


def test_a_caller_is_told_of_every_sample_of_its_request():
    """Also after the first of them has ended: a stream of n > 1 would wait for all others to end."""
    leader = Request([5], graft.SamplingParams(n=2, temperature=1.0), finish_reason="length")
    sibling = Request([5], leader.params, leader=leader)
    leader.siblings.append(sibling)
    watch = ThreadWatch([leader], each_token=True)
    shift = Shift(SimpleNamespace(step=lambda: [sibling], ended=[]))
    shift.watches[leader] = [watch]
    shift.step()
    assert watch.told
