"""One decode step on fixed memory, captured for a batch size: as a CUDA graph, or on a CPU as the call itself.

advance ─▶ the model's graph ─▶ logits [B, vocab] ─▶ choose ─▶ tokens, which the next step's advance feeds
                                                               └▶ deliver: to the host
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from graft.backends.capture import capture
from graft.base.device_memory import is_out_of_memory
from graft.base.errors import CaptureRefused
from graft.base.files import Progress
from graft.base.garbage import old_objects_frozen
from graft.base.timers import cpu_seconds, replay_seconds
from graft.engine.decode.buckets import table_widths
from graft.engine.decode.buffers import Buffers
from graft.engine.decode.choose import Kind, choose
from graft.engine.decode.warming import run_together
from graft.engine.kv.states import StateCache
from graft.ops.advance_rows.op import advance_into
from graft.ops.deliver_rows.op import deliver
from graft.ops.launch import launch_failures

T = TypeVar("T")
DIRECT_REPEATS = 5  # of a step that is not captured, to say what it takes
Step = Callable[[], object]
Key = tuple[int, int, Kind]  # rows, blocks of a table, how tokens are chosen
NO_MEMORY = "no memory was left; lower kv_cache_memory or max_num_seqs"
LATE_CAPTURE = 2 << 30  # bytes free, with which it need not empty torch's caches: a step of 2,048 tokens has less


@dataclass(frozen=True)
class CapturedStep:
    """`replay` runs one step and gives its logits [B, vocab], whose memory the next step overwrites."""

    rows: int
    kind: Kind
    replay: Callable[[], Tensor | None]


class CapturedSteps:
    """Made largest first, in one pool of memory: their steps never run at the same time."""

    def __init__(
        self,
        graph: Callable[..., Any],
        tensors: Sequence[Tensor],
        buffers: Buffers,
        states: StateCache | None = None,  # of recurrent layers
    ) -> None:
        self.graph = graph
        self.tensors = tensors
        self.states = states
        self.buffers = buffers
        self.device = buffers.state.device
        self.made: dict[Key, CapturedStep] = {}
        self.problem: str | None = None  # why no more are made
        self.seconds = 0.0
        self.failures: dict[Key | str, BaseException] = {}  # of first runs, told when the step is captured
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.serving = False  # steps have the memory that they need

    def make_all(
        self, sizes: Sequence[int], progress: Progress | None = None, beside: Mapping[str, Step] | None = None
    ) -> None:
        """The greedy ones, which most steps need; the others are made when they are first asked for. beside: steps
        that are not captured, and run once on a GPU, so that no request waits for their kernels."""
        wanted = [(rows, width) for rows in sorted(sizes, reverse=True) for width in reversed(self.widths(rows))]
        if self.device.type == "cuda":
            self.compile_all([(rows, width, "greedy") for rows, width in wanted], beside or {}, progress)
        for done, (rows, width) in enumerate(wanted):
            if progress:
                progress("capturing CUDA graphs", done, len(wanted))
            if self.get((rows, width, "greedy")) is None:
                return
        if progress:
            progress("capturing CUDA graphs", len(wanted), len(wanted))

    @torch.inference_mode()
    def compile_all(self, keys: Sequence[Key], beside: Mapping[str, Step], progress: Progress | None = None) -> None:
        """Runs each step once on padding rows, their kernels being compiled side by side (warming.py)."""
        if progress:
            progress("compiling kernels", 0, 1)
        started = time.perf_counter()
        self.buffers.fill([], len(self.buffers.block_tables))
        stream, here = self.side_stream(), torch.cuda.current_stream(self.device)
        stream.wait_stream(here)
        steps: dict[Key | str, Step] = {**{key: self.body(key) for key in keys}, **beside}
        failures = run_together(steps, lambda: self.beside(stream))
        here.wait_stream(stream)
        torch.cuda.empty_cache()  # all steps had their memory at once; the captures have a pool of their own
        # one step alone may have room where all together had not; it runs again when it is captured
        self.failures = {key: error for key, error in failures.items() if not is_out_of_memory(error)}
        self.seconds += time.perf_counter() - started

    @contextmanager
    def beside(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """A step in a thread of its own, on a stream that it shares with the others."""
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def side_stream(self) -> torch.cuda.Stream:
        if self.stream is None:
            self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        return self.stream

    def widths(self, rows: int) -> tuple[int, ...]:
        return table_widths(rows, self.buffers.block_tables.shape[1], self.buffers.block_size)

    def key(self, rows: int, tokens: int, kind: Kind) -> Key:
        """The capture of steps of so many rows, the longest of which comes to so many tokens."""
        needed = -(-tokens // self.buffers.block_size)
        return rows, next(width for width in self.widths(rows) if width >= needed), kind

    def get(self, key: Key) -> CapturedStep | None:
        """The capture, made if need be; then all rows of the buffers are padding. None: `problem` says why."""
        rows, _, kind = key
        if key not in self.made:
            made = self.attempt(f"a {kind} step of {rows} rows", lambda: self.capture_step(key))
            if made is not None:
                self.made[key] = made
        return self.made.get(key)

    @torch.inference_mode()
    def attempt(self, what: str, make: Callable[[], T]) -> T | None:
        """What `make` made, or None: `problem` says why, and nothing more is tried."""
        if self.problem is not None:
            return None
        started = time.perf_counter()
        self.buffers.fill([], len(self.buffers.block_tables))
        try:
            with old_objects_frozen():  # torch collects garbage before each capture
                return make()
        except (CaptureRefused, *launch_failures()) as error:
            reason = NO_MEMORY if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            self.problem = f"capturing {what} failed: {reason}"
            return None
        finally:
            self.seconds += time.perf_counter() - started

    def body(self, key: Key) -> Callable[[], Tensor]:
        (rows, width, kind), buffers = key, self.buffers
        (fed, known), tokens = buffers.advance(rows), buffers.tokens[:rows]
        settings, batch = buffers.settings(rows), buffers.batch(rows, width)
        inputs, on_host = batch.inputs(), self.device.type == "cpu"
        states = () if self.states is None else self.states.beside(buffers.state_slots(rows))

        def step() -> Tensor:
            advance_into(fed, *known)
            if on_host:  # the references take sizes from there; kernels of a device know them to be one token each
                batch.lens_cpu[:, 1] = batch.seq_lens
            (logits,) = self.graph(*inputs, *self.tensors, *states)  # [1, B, vocab]
            if kind != "logits":
                choose(kind, tokens, logits[0], settings)
                deliver(tokens, buffers.lines_filled, buffers.delivered)
            return logits[0]

        return step

    def capture_step(self, key: Key) -> CapturedStep:
        (rows, _, kind), step = key, self.body(key)
        if key in self.failures:
            raise self.failures.pop(key)
        play, logits = self.captured(step)
        # only a step whose logits are read keeps them: the memory of the others is the next capture's
        kept = logits if kind == "logits" else None
        return CapturedStep(rows, kind, lambda: replay(play, kept))

    def captured(self, step: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """What runs `step` again, and what it gave; on a CPU that is the call itself."""
        if self.device.type != "cuda":
            return step, step()
        stream = self.side_stream()
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        stream.wait_stream(here)
        try:
            # warm-up and capture on one stream: libraries keep a workspace for each
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                warm_up(step)
                emptied = not self.serving or torch.cuda.mem_get_info(self.device)[0] < LATE_CAPTURE
                result = capture(graph, stream, lambda: [step()], (), self.pool, emptied=emptied)[0]
        finally:
            here.wait_stream(stream)
        return graph.replay, result

    @torch.inference_mode()
    def tell_cost(self, rows: int) -> None:
        """Adds to the problem, if there is one, what a greedy step of so many rows takes without a capture."""
        if self.problem is None:
            return
        self.buffers.fill([], len(self.buffers.block_tables))
        step = self.body((rows, self.widths(rows)[0], "greedy"))
        try:
            seconds = direct_seconds(step, self.device)
        except launch_failures():
            return  # it fails as its capture did
        self.problem = f"{self.problem}; launched kernel by kernel, a step of {rows} takes {seconds * 1e3:.1f} ms"

    def packed(self, what: str, step: Callable[[], None]) -> Callable[[], object] | None:
        """A step with prompts in it: what replays it, or None."""
        return self.attempt(what, lambda: self.captured(step)[0])


def replay(play: Callable[[], object], logits: Tensor | None) -> Tensor | None:
    """The logits that it keeps; on a CPU each call gives new ones."""
    found = play()
    return found if isinstance(found, Tensor) else logits


def warm_up(step: Callable[[], object]) -> None:
    """The first run compiles and tunes; the second must not wait for the device, or it could not be captured.

    Better found here than by a capture, which torch cannot undo when it fails.
    """
    step()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype each time it is set
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def direct_seconds(step: Step, device: torch.device) -> float:
    if device.type != "cuda":
        return cpu_seconds(step, DIRECT_REPEATS)
    with torch.cuda.device(device):
        return replay_seconds(step, DIRECT_REPEATS, warm_up=1)
