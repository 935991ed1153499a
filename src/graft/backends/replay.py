"""A function on fixed memory, captured once for each kind of call and replayed from then on.

    call ─▶ key of the call ─▶ known? ─ no ─▶ warm up and capture, with all state put back
                                 │ yes              │
                                 ▼                  ▼
            plain inputs ─copy─▶ staging ─▶ replay ─▶ results ─copy─▶ caller
            caches, state: bound by address, never copied

The key holds address and layout of what is bound, the layout of what is staged, and the values of all else. So
another cache tensor or a replaced buffer has a capture of its own, and nothing is written to the old one. Addresses
are all that is kept of the caller's tensors: memory is not held, and a capture is right for any tensor that later
has the same address and layout.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graft.backends.buffers import Staging, Take, copies, locate, untouched
from graft.backends.capture import CapturedRun, Capturer, Run
from graft.backends.keys import STAGED, VALUE, Arguments, Key
from graft.base.errors import CaptureRefused, UsageError

# Each capture holds its intermediate values and staging buffers. Eight are two sets of caches in four shapes.
MOST_CAPTURES = 8
MOST_EVENTS = 256  # a caller who brings a new cache at every call would fill the memory with texts


@dataclass(frozen=True)
class CapturedGraph:
    staging: dict[int, Staging]
    captured: CapturedRun
    takes: list[Take]
    kept: dict[int, torch.Tensor]

    def play(self, args: Sequence[Any], reuse_outputs: bool) -> tuple[list[Any], int]:
        """The results, and the bytes that went through staging."""
        with self.captured.ordered():
            fixed, staged = list(args), 0
            for index, staging in self.staging.items():
                staged += staging.fill(args[index])
                fixed[index] = staging.buffer
            self.captured.replay(fixed, self.kept)
            kept = self.kept if reuse_outputs else copies(self.kept)
        return [take(args, kept) for take in self.takes], staged


class Replays:
    """Calls a function by replaying captures of it. `events` says what was captured and why."""

    def __init__(self, run: Run, arguments: Arguments, capturer: Capturer, *, reuse_outputs: bool) -> None:
        self._run = run
        self._arguments = arguments
        self._capturer = capturer
        self._reuse_outputs = reuse_outputs
        self._captures: OrderedDict[Key, CapturedGraph] = OrderedDict()
        self._events: deque[str] = deque(maxlen=MOST_EVENTS)
        self._lock = threading.Lock()  # two threads would stage into the same buffers
        self.count = 0  # captures made
        self.calls = 0
        self.staged_bytes = 0  # copied into staging buffers, over all calls

    @torch.no_grad()  # a capture has no gradients, and buffers must not join a graph of autograd
    def call(self, *inputs: Any) -> list[Any]:
        self._capturer.check()
        with self._lock:
            args = [*inputs, *self._arguments.state.read()]
            key = self._arguments.key(args)
            capture = self._captures.get(key) or self._make(key, args)
            self._captures.move_to_end(key)
            results, staged = capture.play(args, self._reuse_outputs)
            self.calls += 1
            self.staged_bytes += staged
            return results

    @property
    def events(self) -> tuple[str, ...]:
        """`capture 2: input k: another tensor`, the newest last."""
        return tuple(self._events)

    @property
    def alive(self) -> int:
        """Captures that are kept now."""
        return len(self._captures)

    def _make(self, key: Key, args: Sequence[Any]) -> CapturedGraph:
        arguments, device = self._arguments, self._arguments.device
        for index, (how, _, layout) in enumerate(key.tokens):
            if how != VALUE and layout[-1] != device:
                raise CaptureRefused(f"{arguments.name(index)} is on {layout[-1]}, the graph is captured on {device}")
        staging = {index: Staging.like(args[index]) for index, token in enumerate(key.tokens) if token[0] == STAGED}
        fixed = [staging[index].buffer if index in staging else arg for index, arg in enumerate(args)]
        written = [args[index] for index in sorted(arguments.written) if isinstance(args[index], torch.Tensor)]
        for index, buffer in staging.items():
            buffer.fill(args[index])  # real values: the warm-up may index with them
        with untouched(written, [device] if device.type == "cuda" else []) as put_back:
            captured, outputs = self._capturer.capture(self._run, fixed, put_back)
        takes, kept = locate(outputs, fixed)
        self._note(key)
        # Dropping comes after capture, which waits for the device: nothing of the old one is in use any more.
        self._captures[key] = CapturedGraph(staging, captured, takes, kept)
        if len(self._captures) > MOST_CAPTURES:
            self._captures.popitem(last=False)
        return self._captures[key]

    def _note(self, key: Key) -> None:
        self.count += 1
        last = next(reversed(self._captures), None)
        reason = "first call" if last is None else self._arguments.changes(last, key)
        full = len(self._captures) == MOST_CAPTURES
        dropped = f"; the least recently used of {MOST_CAPTURES} is dropped" if full else ""
        self._events.append(f"capture {self.count}: {reason}{dropped}")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UsageError("captures cannot be copied or saved; compile the module again, or save the compiled module")
