"""First runs of several steps together: their Triton kernels are compiled at the same time, and nothing else is.

    step of 256 rows ──run──▶ kernel a? ───waits for its compilation───▶ run ──▶ …
    step of 128 rows                     ──run──▶ kernel b? ───waits───────────────▶ …
    compilers                              a a a a a a a a a a
                                                     b b b b b b b b b

Each step has a thread, but a baton lets one of them run at a time; whoever waits for a compiler hands it on. All
launch on one stream, so the device too runs one kernel after the other, and what is shared between steps (fixed
buffers, counters of kernels, caches of Python) is used as in a single thread. The steps are interleaved, so their
results mean nothing: every row must be padding, which any order of the kernels leaves as it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

COMPILERS = max(8, min(16, os.cpu_count() or 8))  # threads; most of a compilation is outside of Python's lock


class Handed(Future):
    """A compilation. Whoever waits for it lets others run meanwhile."""

    def __init__(self, baton: threading.Lock) -> None:
        super().__init__()
        self.baton = baton

    def result(self, timeout: float | None = None) -> Any:
        if self.done():
            return super().result(timeout)
        self.baton.release()
        try:
            return super().result(timeout)
        finally:
            self.baton.acquire()


class Compilers(Executor):
    """What Triton hands its compilations to."""

    def __init__(self, pool: ThreadPoolExecutor, baton: threading.Lock) -> None:
        self.pool = pool
        self.baton = baton

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = Handed(self.baton)
        self.pool.submit(fn, *args, **kwargs).add_done_callback(lambda done: pass_on(done, future))
        return future


def pass_on(done: Future, future: Future) -> None:
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(error)


def run_together(
    steps: Mapping[Any, Callable[[], Any]], within: Callable[[], AbstractContextManager[Any]]
) -> dict[Any, BaseException]:
    """Runs every step once, each in a thread and inside a `within()` of its own; what was raised, by step.

    Nothing happens where Triton cannot compile aside: whoever records the steps runs them again, one by one.
    """
    mode = compile_mode()
    if mode is None or len(steps) < 2:
        return {}
    baton = threading.Lock()
    known: dict[Any, Any] = {}  # shared, so that each kernel is compiled once

    def run(step: Callable[[], Any], compilers: Compilers) -> None:
        own = mode(compilers)  # a thread enters and leaves its own, which waits for what this thread asked for
        own.future_kernels = known
        with own, baton, within():
            step()

    with ThreadPoolExecutor(COMPILERS) as pool, ThreadPoolExecutor(len(steps)) as threads:
        compilers = Compilers(pool, baton)
        # a context each, like this one's: which kernels were asked for is kept there
        runs = {key: threads.submit(copy_context().run, run, step, compilers) for key, step in steps.items()}
        raised = {key: future.exception() for key, future in runs.items()}
    return {key: error for key, error in raised.items() if error is not None}


def compile_mode() -> Any:
    """Triton's AsyncCompileMode (3.4 and later), or None."""
    try:
        import triton
    except ImportError:
        return None
    return getattr(triton, "AsyncCompileMode", None)
