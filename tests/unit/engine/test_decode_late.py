"""The decode loop on a device that is as late as it may be: work is done when somebody waits for it.

On a CPU a launch is over when it returns, so a host that overwrites what a step still has to read would not be seen.
Here copies and replays only enter a queue, and read host memory when the queue is worked off.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch

from capture_cases import engine, run
from graft.engine.decode import buffers as decode_buffers
from graft.engine.decode.buffers import Buffers, StepBuffers
from graft.engine.decode.in_flight import Feed
from graft.engine.decode.loop import DecodeLoop
from marks import short


class Late:
    """A tensor of the device, or a host tensor that it copies to: copies wait in the queue."""

    def __init__(self, tensor, queue):
        self.tensor, self.queue = tensor, queue

    def __getitem__(self, index):
        if not isinstance(index, torch.Tensor):
            return Late(self.tensor[index], self.queue)  # a view
        found = Late(torch.empty_like(index), self.queue)
        self.queue.append(lambda: found.tensor.copy_(self.tensor[index]))
        return found

    def copy_(self, source, non_blocking=False):
        source = source.tensor if isinstance(source, Late) else source
        self.queue.append(lambda: self.tensor.copy_(source))

    def tolist(self):
        return self.tensor.tolist()

    @property
    def device(self):
        return self.tensor.device

    def clamp_(self, min):
        self.queue.append(lambda: self.tensor.clamp_(min=min))
        return self

    def index_copy_(self, dim, index, source):
        source = source.tensor if isinstance(source, Late) else source
        self.queue.append(lambda: self.tensor.index_copy_(dim, index, source))


class Device:
    def __init__(self, llm, patch):
        self.queue, self.most = deque(), 0
        loop = llm.engine.loop
        buffers = loop.buffers
        for name in ("tokens", "commands"):
            view = Late(getattr(buffers, name), self.queue)
            patch.setattr(Buffers, name, property(lambda _, view=view: view))
        object.__setattr__(buffers, "uniform", Late(buffers.uniform, self.queue))
        for slot in buffers.ring:
            slot.tokens = Late(slot.tokens, self.queue)
        patch.setattr(StepBuffers, "wait", lambda slot: self.wait(slot))
        for target, name in ((llm.engine, "run"), (loop, "logits"), (Buffers, "fill")):
            patch.setattr(target, name, self.in_order(getattr(target, name)))
        launch = loop.launch

        def launched(step):
            play = step.capture.replay
            late = replace(step.capture, replay=lambda: self.queue.append(play))
            launch(replace_capture(step, late))
            self.queue.append(step.arrival)  # where it is done
            self.most = max(self.most, sum(isinstance(item, StepBuffers) for item in self.queue))
            return step

        patch.setattr(loop, "launch", launched)

    def wait(self, slot):
        """Works the queue off as far as the slot's step."""
        while slot in self.queue:
            self.work()

    def work(self):
        item = self.queue.popleft()
        if not isinstance(item, StepBuffers):
            item()

    def in_order(self, call):
        def after(*args):
            while self.queue:
                self.work()
            return call(*(on_time(arg) for arg in args))

        return after


def on_time(arg):
    """Nothing is in the queue: what was gathered is there."""
    return replace(arg, tokens=arg.tokens.tensor) if isinstance(arg, Feed) and isinstance(arg.tokens, Late) else arg


def replace_capture(step, capture):
    step.capture = capture
    return step


@pytest.fixture
def late(monkeypatch):
    llm = engine("mistral", True, blocks=14, max_num_seqs=8, max_num_batched_tokens=48)
    captures = llm.engine.loop.captures
    for rows in (1, 2, 4, 8):
        for kind in ("sampled", "cut"):  # a capture is made on an idle device
            captures.get(captures.key(rows, 1, kind))
    return llm, Device(llm, monkeypatch)


def expected(seed):
    return run(engine("mistral", False, blocks=14, max_num_seqs=8, max_num_batched_tokens=48), seed, 40, plain=True)


@pytest.mark.parametrize("seed", short([4, 5], 4))
def test_tokens_are_the_same_however_late_the_device_is(late, seed):
    llm, device = late
    got = run(llm, seed, 40, plain=True)
    assert [r.new_tokens for r in got] == [r.new_tokens for r in expected(seed)]
    assert device.most == decode_buffers.RING and llm.engine.loop.launched > 100


def test_a_ring_of_one_would_be_seen(late, monkeypatch):
    """The host would overwrite the random numbers of a step that has not begun."""
    llm, _ = late
    monkeypatch.setattr(DecodeLoop, "next_slot", lambda self: self.buffers.ring[0])
    with pytest.raises((AssertionError, IndexError)):
        got = run(llm, 4, 40, plain=True)
        assert [r.new_tokens for r in got] == [r.new_tokens for r in expected(4)]
