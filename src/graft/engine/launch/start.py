"""From the arguments of an LLM to its engine on several ranks: started here, or by torchrun before."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graft import __version__
from graft.base.device_memory import is_out_of_memory
from graft.base.errors import GraftError, OutOfMemory, RankFailed, UsageError
from graft.base.plugins import active_text
from graft.dist.group import TorchGroup, connect, failed_rank
from graft.dist.launcher import Launched, launched, meeting_place
from graft.dist.sizes import check_heads
from graft.dist.workers import JOINING, Workers
from graft.engine.artifact.format import is_engine
from graft.engine.artifact.request import SILENT, EngineRequest, Starter
from graft.engine.artifact.target import source_hash
from graft.engine.engine import Engine
from graft.engine.fresh import build
from graft.engine.ranks.follow import follow
from graft.engine.ranks.leader import LeaderGraph
from graft.engine.ranks.task import RankPlace, place_of
from graft.engine.setup.parts import EngineParts
from graft.models.registry import entries
from graft.passes.registry import load_all

HOST = "127.0.0.1"
THREADS = "GRAFT_NUM_THREADS"


def start_ranks(request: EngineRequest, starter: Starter) -> EngineParts:
    """The engine of rank 0. In the other processes of a launcher this follows rank 0, and never returns."""
    world = request.tensor_parallel_size or 1
    check_early(str(request.model), world)
    found = launched()
    if found is None:
        return led(start_here(request, starter))
    if found.world != world:
        raise UsageError(
            f"tensor_parallel_size is {world}, but {found.by} started {found.world} processes; the two must be equal"
        )
    return led(join_launched(request, found, starter))


def led(parts: EngineParts) -> EngineParts:
    """With an engine that says at once that a rank was lost, also where nothing is running."""
    leader = parts.engine.graph
    assert isinstance(leader, LeaderGraph)
    if leader.workers is not None:
        leader.workers.on_failure = partial(rank_lost, parts.engine, leader)
    return parts


def rank_lost(engine: Engine, leader: LeaderGraph, failed: RankFailed) -> None:
    """Told by the thread that watches the workers: nothing more is taken."""
    leader.gone(failed)
    engine.broken = failed


def check_early(model: str, world: int) -> None:
    """Heads of a model that is only a configuration, before any process starts; others are checked once loaded."""
    entry = entries().get(model)
    if entry is not None and entry.kind == "random":
        from transformers import AutoConfig

        check_heads(AutoConfig.for_model(entry.family.model_type, **entry.settings), world, model)


def start_here(request: EngineRequest, starter: Starter) -> EngineParts:
    world = request.tensor_parallel_size or 1
    device, backend, sharers = place_of(request.device, 0, world)
    threads = threads_of_each(world) if backend == "gloo" else None
    store = torch.distributed.TCPStore(HOST, 0, world, is_master=True, wait_for_workers=False)
    environment = {} if threads is None else {THREADS: str(threads), "OMP_NUM_THREADS": str(threads)}
    if starter.progress is not None:
        starter.progress(f"starting {world} ranks", 0, 1)
    workers = Workers.start(world, store.port, request, environment)
    starter = noticing(starter, workers)
    group: TorchGroup | None = None
    try:
        with told(workers), few_threads(threads):
            wait_for_all(store, workers, world)
            group = met(workers, lambda: connect(0, world, backend, lambda: store))
            return build_rank(request, RankPlace(group, device, sharers, threads), starter, workers)
    except BaseException:
        workers.stop()
        if group is not None:
            group.leave()
        raise


def noticing(starter: Starter, workers: Workers) -> Starter:
    """What rank 0 is doing ends where another rank has died meanwhile: it would wait for it in the end."""

    def progress(what: str, done: int, total: int) -> None:
        if workers.failed is not None:
            raise workers.failed
        if starter.progress is not None:
            starter.progress(what, done, total)

    return replace(starter, progress=progress)


def build_rank(
    request: EngineRequest, place: RankPlace, starter: Starter = SILENT, workers: Workers | None = None
) -> EngineParts:
    """The part of this rank."""
    if place.device.startswith("cuda"):
        torch.cuda.set_device(place.device)  # kernels are launched on the current one
    place.group.agree("version", f"graft {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    place.group.agree("source of graft", source_hash())
    place.group.agree("request", repr(replace(request, model="", device="", dump_dir=None)))
    load_all(request.plugins)
    place.group.agree("set of plugins", active_text())
    place.group.enter()
    own = replace(request, device=place.device, dump_dir=None if place.rank else request.dump_dir)
    if not is_engine(request.model):
        return build(own, starter, place, workers)
    from graft.engine.artifact.load import load_engine

    asked = own.against_folder()
    return load_engine(Path(own.model), own.sizes, asked, starter, place=place, workers=workers)


def follow_rank(parts: EngineParts, group: TorchGroup) -> None:
    """Every other rank, once it is built."""
    from graft.engine.artifact.ranks import write_own

    follow(parts.engine, group, partial(write_own, parts, group.rank))


def wait_for_all(store: Any, workers: Workers, world: int) -> None:
    """Until every worker has come so far, or one has died, which nobody must wait for."""
    until = time.monotonic() + JOINING
    while not store.check([f"rank{rank}" for rank in range(1, world)]):
        if workers.failed is not None:
            raise workers.failed
        if time.monotonic() > until:
            raise RankFailed(1, f"it did not come within {JOINING:.0f} s")
        time.sleep(0.02)


def met(workers: Workers, connect_all: Callable[[], TorchGroup]) -> TorchGroup:
    """The group, or the worker that died on the way to it, which torch would wait for: in a thread that need not
    end."""
    found: Future[TorchGroup] = Future()

    def work() -> None:
        try:
            found.set_result(connect_all())
        except BaseException as error:  # noqa: BLE001 (told by whoever waits)
            found.set_exception(error)

    threading.Thread(target=work, name="graft-meeting", daemon=True).start()
    while not found.done():
        if workers.failed is not None:
            raise workers.failed
        time.sleep(0.02)
    return found.result()


@contextmanager
def told(workers: Workers) -> Iterator[None]:
    """An error of an exchange is told as the end of the worker that caused it. One of graft's own is told as it is:
    every rank meets it, and rank 0 says it best."""
    try:
        yield
    except GraftError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error) from error
        found = workers.failure()
        if found is None:
            raise
        raise found from error


@contextmanager
def others_told() -> Iterator[None]:
    """The same where a launcher started the ranks: whoever is left says that another one is gone."""
    try:
        yield
    except GraftError:
        raise
    except Exception as error:
        raise (out_of_memory(error) if is_out_of_memory(error) else failed_rank(error)) from error


def out_of_memory(error: BaseException) -> OutOfMemory:
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    return OutOfMemory(f"out of memory ({told}); free memory, use more ranks, or a smaller dtype or model")


def threads_of_each(world: int) -> int:
    """Ranks on one machine share its cores."""
    from graft.backends.native.cpu import thread_count

    return max(1, thread_count() // world)


def bound(found: Launched) -> bool:
    """Whether this rank has cores of its own already (srun --cpus-per-task)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found.by == "srun" and cores != os.cpu_count()


@contextmanager
def few_threads(count: int | None) -> Iterator[None]:
    """While rank 0 is built: what it makes keeps the number; torch has one number for each thread that calls it."""
    before = os.environ.get(THREADS)
    if count is not None:
        os.environ[THREADS] = str(count)
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(THREADS, None)
        else:
            os.environ[THREADS] = before


def join_launched(request: EngineRequest, found: Launched, starter: Starter) -> EngineParts:
    rank, world = found.rank, found.world
    device, backend, sharers = place_of(request.device, found.local, found.sharing, alone=found.by == "srun")
    threads = threads_of_each(1 if bound(found) else found.sharing) if backend == "gloo" else None
    with few_threads(threads), others_told():
        group = connect(rank, world, backend, lambda: meeting_place(found))
        parts = build_rank(request, RankPlace(group, device, sharers, threads), SILENT if rank else starter)
    if rank == 0:
        return parts
    with others_told():
        follow_rank(parts, group)
    group.leave()
    sys.exit(0)
