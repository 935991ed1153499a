"""One thread owns the engine: it steps while there is work, and takes requests from any thread between two steps.

    callers   put(job) ──▶ queue ──▶ driver thread: jobs, step, jobs, step, …, idle
              wait     ◀── ring  ◀── after a step that ended a request, or gave a token to one that is followed

Steps run back to back; no step is handed from one thread to another. A caller is woken when something of its own has
changed. While it has nothing to do, the thread refers to its queue alone: whoever drops the LLM frees the engine, and
the thread ends. A step that fails is told to every caller, all requests are aborted, and the next ones begin with an
empty engine.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch

from graft.base.errors import EngineFailed, GraftError, RankFailed
from graft.base.garbage import old_objects_frozen
from graft.engine.core import Request
from graft.engine.engine import Engine
from graft.engine.watch import Watch

LEAVING = 5.0  # seconds that a fork waits for a thread without requests: at most a step that was in flight ends


@dataclass(frozen=True)
class Job:
    """What the thread is to do between two steps. It carries the engine, which the thread has from nowhere else."""

    engine: Engine
    work: Callable[[Shift], None]
    threads: int = field(default_factory=torch.get_num_threads)  # the caller's: torch has one number for each thread


@dataclass(eq=False)
class Seat:
    """The driver's thread and its queue; None in the queue ends it. Its lock may be taken again by the same thread:
    the garbage collector may close a stream while a request is put."""

    jobs: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)
    lock: threading.RLock = field(default_factory=threading.RLock)  # pyrefly: ignore
    thread: threading.Thread | None = None
    closed: bool = False

    def put(self, job: Job) -> bool:
        with self.lock:
            if self.closed:
                return False
            if self.thread is None:
                self.thread = threading.Thread(target=serve, args=(self.jobs,), name="graft-driver", daemon=True)
                self.thread.start()
                THREADS.add(self.thread)
            self.jobs.put(job)
            return True

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.jobs.put(None)


class Driver:
    """The callers' side. The thread starts with the first request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.holder: int | None = None  # the thread that steps the engine itself, see `held`
        self.paused = False  # while the process forks
        self.take_seat()
        if (device := engine.tensors[0].device).type == "cuda":
            torch.cuda.synchronize(device)  # the thread's stream need not be the one that filled the cache
        DRIVERS.add(self)

    def take_seat(self) -> None:
        self.seat = Seat()
        self.closing = weakref.finalize(self, self.seat.close)

    def put(self, work: Callable[[Shift], None]) -> None:
        if self.holder == threading.get_ident():
            raise EngineFailed("this thread holds the engine (llm.held): step it with engine.step, or let go")
        if not self.seat.put(Job(self.engine, work)):
            raise EngineFailed("this LLM was closed, or its process forked while it was at work; load it again")

    def enter(self, requests: Iterable[Request], watch: Watch | None = None) -> None:
        """Hands requests over, all before the same step; they run from now on, watched or not."""
        self.put(partial(Shift.enter, requests=tuple(requests), watch=watch))

    def watch(self, watch: Watch) -> None:
        """The watch is told of its requests from now on; at once of those that have ended."""
        self.put(partial(Shift.watch, watch=watch))

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends those that have not ended, after the present step. Does not wait: it is called by whoever drops a
        stream, the garbage collector included."""
        left = tuple(one for one in requests if any(each.finish_reason is None for each in one.family))
        if left and self.holder == threading.get_ident():
            self.engine.abort(left)
        elif left:
            self.seat.put(Job(self.engine, partial(Shift.abort, requests=left)))

    @contextmanager
    def held(self) -> Iterator[Engine]:
        """The engine for the calling thread alone, between two steps; the requests of others wait."""
        taken: SimpleQueue[None] = SimpleQueue()
        given_back: SimpleQueue[None] = SimpleQueue()
        try:
            self.put(partial(Shift.lend, taken=taken, given_back=given_back))
            taken.get()
            with self.engine.lock:
                self.holder = threading.get_ident()
                try:
                    yield self.engine
                finally:
                    self.holder = None
        finally:
            given_back.put(None)

    def close(self) -> None:
        """Aborts all requests and ends the thread."""
        self.closing()

    def before_fork(self) -> None:
        """Waits for a thread that has no request left: callers have their results a little before it is through."""
        scheduler, own = self.engine.scheduler, threading.current_thread() is self.seat.thread
        if not (own or self.holder or scheduler.running or scheduler.waiting):
            self.paused = self.engine.lock.acquire(timeout=LEAVING)

    def go_on(self) -> None:
        """Behind a fork, in the parent and in the child."""
        if self.paused:
            self.engine.lock.release()
        self.paused = False

    def after_fork(self) -> None:
        """In the child there is no thread, and what it was at is lost."""
        self.go_on()
        idle = self.engine.idle and self.engine.lock.acquire(blocking=False)
        if idle:
            self.engine.lock.release()
        self.closing.detach()
        self.take_seat()
        self.seat.closed = not idle or self.seat.closed


class Shift:
    """What the thread has from the job that wakes it until nothing is left to do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.watches: dict[Request, list[Watch]] = {}

    def enter(self, requests: tuple[Request, ...], watch: Watch | None) -> None:
        if watch is not None:
            self.register(watch)  # of new requests, of which there is nothing to tell
        try:
            for request in requests:
                self.engine.enter(request)
        except Exception as error:  # noqa: BLE001  the caller raises it
            self.fail(error, requests)

    def watch(self, watch: Watch) -> None:
        self.register(watch)
        if watch.requests and watch.each_token:
            self.tell(watch)

    def register(self, watch: Watch) -> None:
        for request in watch.requests:
            self.watches.setdefault(request, []).append(watch)
            self.settle(request)
        if not watch.requests:
            self.tell(watch)

    def abort(self, requests: tuple[Request, ...]) -> None:
        self.engine.abort(requests)
        for request in requests:
            self.settle(request)

    def lend(self, taken: SimpleQueue[None], given_back: SimpleQueue[None]) -> None:
        self.engine.lock.release()
        taken.put(None)
        given_back.get()
        self.engine.lock.acquire()
        for request in tuple(self.watches):
            self.settle(request)

    def step(self) -> None:
        grown = self.engine.step()
        for request in grown:
            for watch in self.watches.get(request.leader or request, ()):
                if watch.each_token:
                    self.tell(watch)
        for request in self.engine.ended:
            self.settle(request.leader or request)

    def settle(self, request: Request) -> None:
        """Tells of the request's end, if all samples of it have come to theirs."""
        if any(one.finish_reason is None for one in request.family):
            return
        for watch in self.watches.pop(request, ()):
            watch.open.discard(request)
            self.tell(watch)

    def tell(self, watch: Watch) -> None:
        try:
            watch.tell()
        except RuntimeError:  # its event loop is closed: nobody will ask for the rest
            self.engine.abort(watch.requests)

    def fail(self, error: BaseException, requests: tuple[Request, ...] = ()) -> None:
        """Every request ends with the error, and the engine is empty; where it is not, it takes no more."""
        engine = self.engine
        failure = error if isinstance(error, GraftError) else step_failed(error)
        try:
            for request in (*engine.scheduler.running, *engine.scheduler.waiting, *requests):
                request.error = failure
                engine.end(request, "error")
            whole = engine.idle and engine.manager.available == engine.manager.blocks
        except Exception as second:  # noqa: BLE001  every caller gets it, with the first
            whole, failure.__context__ = False, second
        if engine.broken is None and not (whole and not lost_device(error)):
            engine.broken = failure
        for watch in {watch for watches in self.watches.values() for watch in watches}:
            watch.error = failure
            self.tell(watch)
        self.watches, engine.ended = {}, []  # the error knows frames that know the engine


def lost_device(error: BaseException) -> bool:
    """An error of the device's own, such as an illegal access, or ranks that are gone: whatever else the process
    asks of it fails too."""
    return isinstance(error, (torch.AcceleratorError, RankFailed))


def step_failed(error: BaseException) -> EngineFailed:
    what = f"a step of the engine failed ({type(error).__name__}: {error}); every request that was open is aborted"
    then = "the device is lost to this process: start another" if lost_device(error) else "new ones can be made"
    failure = EngineFailed(f"{what}, {then}")
    failure.__cause__ = error
    return failure


def serve(jobs: SimpleQueue[Job | None]) -> None:
    """The thread. Between two shifts it holds nothing of an engine."""
    while work_off(jobs.get(), jobs):
        pass


def work_off(job: Job | None, jobs: SimpleQueue[Job | None]) -> bool:
    """One shift. False: there will be no other."""
    if job is None:
        return False
    engine = job.engine
    shift, device = Shift(engine), engine.tensors[0].device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own
    with engine.lock, old_objects_frozen():
        while True:
            if job is None:
                shift.fail(EngineFailed("the LLM was closed"))
                return False
            try:
                if job.threads != torch.get_num_threads():
                    torch.set_num_threads(job.threads)
                job.work(shift)
                while jobs.empty() and not engine.idle:
                    shift.step()
            except BaseException as error:  # noqa: BLE001  every caller raises it
                shift.fail(error)
            if jobs.empty():
                return True  # idle, or broken
            job = jobs.get()


DRIVERS: weakref.WeakSet[Driver] = weakref.WeakSet()
THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def close_all() -> None:
    """At exit: a thread must not be inside a step when the interpreter goes."""
    for driver in tuple(DRIVERS):
        driver.close()
    for thread in tuple(THREADS):
        thread.join()


def at_fork(do: Callable[[Driver], None]) -> Callable[[], None]:
    def of_all() -> None:
        for driver in tuple(DRIVERS):
            do(driver)

    return of_all


atexit.register(close_all)
os.register_at_fork(
    before=at_fork(Driver.before_fork),
    after_in_parent=at_fork(Driver.go_on),
    after_in_child=at_fork(Driver.after_fork),
)
