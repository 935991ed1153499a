"""The driver thread when a step fails, the engine is dropped, the process forks or ends: told, and nothing left."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import graft
from graft.base.errors import EngineFailed
from processes import run_python
from thread_cases import GREEDY, LONG, PATIENCE, Gate, empty, engine


@pytest.mark.exhaustive
def test_a_step_that_fails_reaches_every_caller_and_the_next_request_runs():
    llm = engine()
    expected = llm.generate([[5, 6]], GREEDY)[0].token_ids
    graph, gate, put, jobs = llm.engine.graph, Gate(llm), threading.Semaphore(0), llm.driver.put
    llm.driver.put = lambda work: (jobs(work), put.release())
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(llm.generate, [[5, n]], LONG) for n in range(3, 5)]
        waiting += [threads.submit(lambda: "".join(llm.stream([9], LONG)))]
        waiting += [threads.submit(lambda: asyncio.run(llm.agenerate([8], LONG)))]
        for _ in range(5):  # a stream puts two jobs
            put.acquire()
        gate.came.acquire()  # the first step, with whoever came first
        gate.may.release()
        gate.came.acquire()  # the second has them all
        gate.run = lambda *inputs: 1 / 0
        gate.open()
        for one in waiting:
            with pytest.raises(EngineFailed, match="ZeroDivisionError: division by zero") as raised:
                one.result(PATIENCE)
            assert isinstance(raised.value.__cause__, ZeroDivisionError)
    gate.run = graph
    assert llm.generate([[5, 6]], GREEDY)[0].token_ids == expected and empty(llm)


def test_a_request_that_nobody_watched_keeps_the_error_of_its_step():
    llm = engine()
    llm.engine.graph = lambda *inputs: 1 / 0
    request = llm.submit([5], GREEDY)
    with llm.held():
        pass
    with pytest.raises(EngineFailed):
        "".join(llm.follow(request))


def test_an_engine_that_cannot_be_emptied_refuses(monkeypatch):
    llm = engine()
    llm.engine.graph = lambda *inputs: 1 / 0
    monkeypatch.setattr(llm.engine.scheduler, "leave", lambda request: 1 / 0)
    with pytest.raises(EngineFailed):
        llm.generate([[5]], GREEDY)
    for ask in (lambda: llm.generate([[5]], GREEDY), lambda: llm.engine.add([5], GREEDY)):
        with pytest.raises(EngineFailed, match="broken since a step failed"):
            ask()


def test_an_engine_whose_device_is_lost_refuses():
    llm = engine()

    def lost(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    llm.engine.graph = lost
    with pytest.raises(EngineFailed, match="lost to this process: start another"):
        llm.generate([[5]], GREEDY)
    with pytest.raises(EngineFailed, match="broken since a step failed"):
        llm.generate([[5]], GREEDY)


def test_a_dropped_llm_ends_its_thread_and_frees_its_cache():
    idle, busy = engine(), engine()
    idle.generate([[5, 6]], GREEDY)
    gate = Gate(busy)
    busy.submit([5, 6], LONG)
    gate.came.acquire()
    threads = [llm.driver.seat.thread for llm in (idle, busy)]
    freed = threading.Semaphore(0)
    caches = [[weakref.ref(t, lambda _: freed.release()) for t in llm.engine.tensors] for llm in (idle, busy)]
    gc.disable()
    try:
        del idle
        for _ in caches[0]:  # the thread may still be behind its last step
            assert freed.acquire(timeout=PATIENCE), "without the garbage collector"
        assert all(cache() is None for cache in caches[0])
        del busy
        gate.open()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert all(cache() is None for cache in caches[1])
    finally:
        gc.enable()


def in_child(check) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_a_thread_that_has_no_request_left(monkeypatch):
    """Results are told within a step: whoever forks at once finds the thread still inside."""
    forking = threading.Event()
    os.register_at_fork(before=forking.set)  # called ahead of those that were registered earlier

    @contextmanager
    def leaves_slowly():
        yield
        forking.wait(PATIENCE)

    monkeypatch.setattr("graft.engine.driver.old_objects_frozen", leaves_slowly)
    llm = engine()
    expected = llm.generate([[5, 6]], GREEDY)[0].token_ids
    assert in_child(lambda: llm.generate([[5, 6]], GREEDY)[0].token_ids == expected) == 0
    assert llm.generate([[5, 6]], GREEDY)[0].token_ids == expected, "the parent goes on"
    with llm.held():  # a thread that holds the engine may fork, and does not wait for itself
        assert in_child(lambda: True) == 0


def test_a_forked_child_generates_or_is_refused():
    llm = engine()
    expected = llm.generate([[5, 6]], GREEDY)[0].token_ids

    def refused() -> bool:
        try:
            llm.generate([[5, 6]], GREEDY)
        except EngineFailed as error:
            return "forked while it was at work" in str(error)
        return False

    assert in_child(lambda: llm.generate([[5, 6]], GREEDY)[0].token_ids == expected) == 0
    gate = Gate(llm)
    request = llm.submit([5, 6], GREEDY)
    gate.came.acquire()
    assert in_child(refused) == 0
    gate.open()
    llm.finish([request])
    assert request.new_tokens == expected, "the parent goes on"


def test_a_program_ends_whatever_is_under_way():
    """An unread request, a stream in the middle, a thread that waits: the interpreter does not hang, nor complain."""
    program = """
import threading, types
import torch
import graft
import graft
from graft.base.errors import EngineFailed
from graft.engine.kv.manager import BlockManager
from graft.engine.driver import Driver
from graft.engine.engine import Engine
from graft.engine.frontend import Frontend
from graft.engine.scheduler import Scheduler

class Numbers:
    def decode(self, tokens, skip_special_tokens):
        return "".join(f"<{t}>" for t in tokens)

def graph(ids, positions, index, *inputs):
    return (torch.zeros(1, len(index), 128),)

llm = Frontend()
scheduler = Scheduler(BlockManager(64, 16), 8, 64)
llm.engine = Engine(graph, [torch.zeros(64, 16, 1, 1)], scheduler, tokenizer=Numbers())
config = types.SimpleNamespace(vocab_size=128)
llm.model = types.SimpleNamespace(context=10**6, module=types.SimpleNamespace(config=config), name="zeros")
params = graft.SamplingParams(max_tokens=300, ignore_eos=True)
pieces = llm.stream([5, 6], params)
print(next(pieces)[:1])
llm.submit([7], params)

def ask():
    try:
        while True:
            llm.generate([[9]], params)
    except EngineFailed:
        pass

threading.Thread(target=ask, daemon=True).start()
"""
    done = run_python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "<\n", "")


@pytest.mark.exhaustive
def test_engines_that_are_loaded_side_by_side_are_built_one_after_another():
    """torch.export fails where another runs beside it; every engine gives what one that was loaded alone gives."""
    params = graft.SamplingParams(max_tokens=4, ignore_eos=True)
    with ThreadPoolExecutor(3) as pool:
        made = pool.map(lambda _: graft.LLM("tiny-llama", use_cache=False), range(3))
        answers = [llm.generate([[1, 2, 3]], params)[0].token_ids for llm in made]
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 4
