"""First runs of steps together: compilations overlap, steps never do, and errors stay with their step."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from graft.engine.decode import warming
from graft.engine.decode.warming import run_together
from graft.ops.launch import counters

triton = pytest.importorskip("triton")
ASYNC = pytest.importorskip("triton.runtime._async_compile")
SECONDS = 20  # only a defect waits that long


class Kernels:
    """Stands for Triton's launches: compiles what is not known, by the mode that is on, and then runs."""

    def __init__(self):
        self.known, self.compiled, self.log = {}, [], []

    def launch(self, name, work=lambda: None):
        mode = ASYNC.active_mode.get()
        assert mode is not None, "no mode is on in this thread"
        if name not in self.known:

            def compile_it():
                self.compiled.append(name)
                work()
                return name

            kernel = mode.submit(name, compile_it, lambda kernel: self.known.__setitem__(name, kernel))
            assert kernel.result() == name
        self.log.append((threading.get_ident(), name))


def test_kernels_of_different_steps_compile_at_the_same_time():
    kernels, meeting = Kernels(), threading.Barrier(3, timeout=SECONDS)
    steps = {n: (lambda n=n: kernels.launch(f"of {n}", meeting.wait)) for n in range(3)}
    assert run_together(steps, nullcontext) == {}  # the barrier breaks where they do not meet
    assert sorted(kernels.known) == ["of 0", "of 1", "of 2"]


def test_a_kernel_that_all_steps_share_is_compiled_once():
    kernels = Kernels()

    def step(n):
        kernels.launch("shared")
        kernels.launch(f"of {n}")
        kernels.launch("shared, later")

    assert run_together({n: (lambda n=n: step(n)) for n in range(9)}, nullcontext) == {}
    assert sorted(kernels.compiled) == sorted({"shared", "shared, later", *(f"of {n}" for n in range(9))})
    assert len(kernels.log) == 27 and len({thread for thread, _ in kernels.log}) > 1


def test_steps_do_not_run_at_the_same_time():
    """Between two launches a step is alone: what it does to shared things is what a single thread does."""
    kernels, inside, shared, seen = Kernels(), [], [0], []

    def step(n):
        for k in range(20):
            inside.append(n)
            before = shared[0]
            for _ in range(200):  # long enough for Python to switch threads, if it could
                shared[0] += 1
            seen.append((before, shared[0], inside[-1] == n))
            kernels.launch(f"{n}.{k}")

    assert run_together({n: (lambda n=n: step(n)) for n in range(4)}, nullcontext) == {}
    assert shared == [4 * 20 * 200] and all(after - before == 200 and own for before, after, own in seen)


def test_without_the_baton_they_would(monkeypatch):
    """The test above can fail: steps that meet in a barrier do so only where nothing holds them apart."""
    meeting = threading.Barrier(2, timeout=0.3)
    failures = run_together({0: meeting.wait, 1: meeting.wait}, nullcontext)
    assert {type(error) for error in failures.values()} == {threading.BrokenBarrierError}
    monkeypatch.setattr(warming, "threading", SimpleNamespace(Lock=nullcontext))
    meeting = threading.Barrier(2, timeout=SECONDS)
    assert run_together({0: meeting.wait, 1: meeting.wait}, nullcontext) == {}


def test_an_error_stays_with_its_step():
    kernels, done = Kernels(), []

    def broken():
        raise RuntimeError("no such instruction")

    def refuse():
        raise ValueError("a step's own")

    steps = {
        "compiler": lambda: kernels.launch("bad", broken),
        "step": refuse,
        "sound": lambda: (kernels.launch("good"), done.append(1)),
    }
    failures = run_together(steps, nullcontext)
    assert {key: str(error) for key, error in failures.items()} == {
        "compiler": "no such instruction",
        "step": "a step's own",
    }
    assert done == [1] and "good" in kernels.known and "bad" not in kernels.known


def test_each_step_has_its_own_context_and_the_counters_are_handed_out_as_ever():
    entered, given = [], []

    @contextmanager
    def within():
        entered.append(threading.get_ident())
        with torch.inference_mode():
            yield

    def step():
        assert torch.is_inference_mode_enabled()
        given.append(counters(16, torch.device("cpu")).storage_offset())

    assert run_together(dict.fromkeys(range(6), step), within) == {}
    assert len(entered) == 6 and len(set(given)) == 6 and not torch.is_inference_mode_enabled()


def test_nothing_is_done_for_one_step_or_without_such_a_triton(monkeypatch):
    ran = []
    assert run_together({0: lambda: ran.append(0)}, nullcontext) == {}
    monkeypatch.setattr(triton, "AsyncCompileMode", None)
    assert run_together({0: lambda: ran.append(0), 1: lambda: ran.append(1)}, nullcontext) == {}
    assert ran == []
