"""How a function on fixed memory is captured: as a CUDA graph, or on a CPU by keeping the function itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from graft.backends.buffers import storage_bytes
from graft.base.errors import CaptureRefused

Run = Callable[..., Sequence[Any]]
# The first run compiles, tunes and allocates workspaces; the second runs the kernels that the tuning chose.
WARM_UPS = 2
# torch's allocator goes on asking the graph of a failed capture for its id, so that must not be freed.
FAILED: list[torch.cuda.CUDAGraph] = []


@dataclass(frozen=True)
class CapturedRun:
    """`replay(args, kept)` computes the results again, into the memory of `kept`. A call runs inside `ordered`."""

    replay: Callable[[Sequence[Any], Mapping[int, torch.Tensor]], None]
    ordered: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Capturer:
    """`capture` warms a function up, captures it, and gives the results in its memory; its last argument puts back
    what a run of it wrote. `check` comes before a call."""

    capture: Callable[[Run, Sequence[Any], Callable[[], None]], tuple[CapturedRun, Sequence[Any]]]
    check: Callable[[], None]


def warm_up(run: Run, args: Sequence[Any], put_back: Callable[[], None]) -> None:
    for _ in range(WARM_UPS):
        run(*args)
        put_back()


def keep_direct(run: Run, args: Sequence[Any], put_back: Callable[[], None]) -> tuple[CapturedRun, Sequence[Any]]:
    """Nothing is captured: a replay calls `run` and copies its results to where the first ones are."""

    def replay(args: Sequence[Any], kept: Mapping[int, torch.Tensor]) -> None:
        results = run(*args)
        for position, tensor in kept.items():
            storage_bytes(tensor).copy_(storage_bytes(results[position]))  # whole storages: results may be expanded

    warm_up(run, args, put_back)
    return CapturedRun(replay, nullcontext), run(*args)


DIRECT = Capturer(keep_direct, lambda: None)


def cuda_capturer(device: torch.device) -> Capturer:
    """Captures on a side stream. Each capture has a memory pool of its own.

    With one pool for all, a replay would overwrite the results of another capture that the caller still reads
    (`reuse_outputs`), and replays on two streams would overwrite each other's intermediate values.
    """

    def record(run: Run, args: Sequence[Any], put_back: Callable[[], None]) -> tuple[CapturedRun, Sequence[Any]]:
        graph, side, here = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(here)
        try:
            # warm-up and capture on one stream: libraries keep a workspace for each
            with torch.cuda.device(device), torch.cuda.stream(side):
                warm_up(run, args, put_back)
                outputs = capture(graph, side, run, args)
        finally:
            here.wait_stream(side)
        done = torch.cuda.Event()
        done.record(here)
        return CapturedRun(lambda _args, _kept: graph.replay(), lambda: in_order_of_calls(device, done)), outputs

    return Capturer(record, refuse_inside_capture)


def capture(
    graph: torch.cuda.CUDAGraph, side: torch.cuda.Stream, run: Run, args: Sequence[Any], pool: Any = None,
    *, emptied: bool = True,
) -> Sequence[Any]:  # fmt: skip
    """The results of the captured call. Captures that share a `pool` overwrite each other's memory. emptied: see
    begun."""
    try:
        with workspaces_inside(), begun(graph, side, pool, emptied=emptied):
            return run(*args)
    except RuntimeError as error:  # what CUDA and the operators raise; the first one is the cause
        FAILED.append(graph)
        cause = error.__context__ or error
        raise CaptureRefused(
            f"a call of the graph cannot be captured: {type(cause).__name__}: {cause}. State is as it was, but torch"
            " does not undo a failed capture: start a new process, with backend='eager' or 'inductor'"
        ) from error


@contextmanager
def begun(
    graph: torch.cuda.CUDAGraph, side: torch.cuda.Stream, pool: Any = None, *, emptied: bool = True
) -> Iterator[None]:
    """emptied: what torch keeps of the device's memory, and of pinned memory, goes back to the driver first. Whoever
    takes it again waits for all that is in flight, so a capture in the middle of serving leaves it."""
    mode = "thread_local"  # such a capture may fall together with other threads' allocations
    if emptied:
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode=mode):
            yield
        return
    torch.cuda.synchronize(side.device)
    with torch.cuda.stream(side):
        graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode=mode)
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def workspaces_inside() -> Iterator[None]:
    """cuBLAS takes its workspace from the capture's own pool, and nothing outside goes on with it.

    A workspace from before is torch's: whoever frees it (torch.compile's CUDA graphs do, for all streams) would leave
    the replays with memory that is somebody else's by then.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def in_order_of_calls(device: torch.device, done: torch.cuda.Event) -> Iterator[None]:
    """Calls on different streams wait for each other: they share the staging buffers and results of a capture."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(done)
    yield
    done.record(stream)


def refuse_inside_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise CaptureRefused("the call is inside another capture, which cannot hold a replay; compile for 'eager'")
