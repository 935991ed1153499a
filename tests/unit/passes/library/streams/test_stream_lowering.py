"""Stream ops lowered for a GPU, on a device that only writes down what it is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graft.backends.eager import lower_eager
from stream_modules import Branches, placed


class FakeCuda:
    """Stands for torch.cuda: streams and events are names, and `log` is what was asked for."""

    def __init__(self, monkeypatch):
        self.log, self.current, self.made, self.capturing = [], FakeStream(self, 100), 0, False
        for name in ("Stream", "Event", "current_stream", "stream", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"fake_{name}"))
        monkeypatch.setattr("graft.backends.streams.device_of", lambda _: torch.device("cuda"))

    def fake_Stream(self, device):
        self.made += 1
        return FakeStream(self, 99 + self.made)  # the first one is the caller's own, as after 32 others

    def fake_Event(self):
        return FakeEvent(self)

    def fake_current_stream(self, device):
        return self.current

    def fake_is_current_stream_capturing(self):
        return self.capturing

    def fake_stream(self, stream):
        return On(self, stream)


class FakeStream:
    def __init__(self, cuda, number):
        self.cuda, self.cuda_stream = cuda, number

    def wait_event(self, event):
        self.cuda.log.append(("wait", self.cuda_stream, id(event)))

    def wait_stream(self, other):
        self.cuda.log.append(("follow", self.cuda_stream, other.cuda_stream))


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self, stream):
        self.cuda.log.append(("record", stream.cuda_stream, id(self)))


class On:
    def __init__(self, cuda, stream):
        self.cuda, self.stream = cuda, stream

    def __enter__(self):
        self.before, self.cuda.current = self.cuda.current, self.stream
        self.cuda.log.append(("call", self.stream.cuda_stream))

    def __exit__(self, *_):
        self.cuda.current = self.before


def test_the_lowering_switches_for_each_call_and_records_and_waits(monkeypatch):
    module, x = Branches(), torch.randn(2, 8)
    gm = placed(module, [0, 0, 0, 0, 1, 1, 0])
    cuda = FakeCuda(monkeypatch)
    lowered = lower_eager(gm)
    assert str(lowered.kernels["graft::stream_switch"]) == "2 CUDA streams"
    got = lowered.call(x)
    assert torch.equal(got[0] if isinstance(got, (list, tuple)) else got, module(x))
    assert cuda.log.pop() == ("follow", 101, 100)
    kinds = [entry[:2] for entry in cuda.log]
    assert kinds == [("record", 100), ("wait", 101), ("call", 101), ("call", 101), ("record", 101), ("wait", 100)]
    assert cuda.log[0][2] == cuda.log[1][2] != cuda.log[4][2] == cuda.log[5][2]
    cuda.log.clear()
    cuda.capturing = True
    lowered.call(x)
    assert [entry[:2] for entry in cuda.log] == kinds and cuda.made == 2  # streams and events are kept


def test_an_error_on_a_side_stream_leaves_nothing_switched(monkeypatch):
    gm = placed(Branches(), [0, 0, 0, 0, 1, 1, 0])
    cuda = FakeCuda(monkeypatch)
    call = lower_eager(gm).call
    call.b.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(RuntimeError):
        call(torch.randn(2, 8))
    assert cuda.log[-1] == ("call", 101)  # it failed there
    assert cuda.current.cuda_stream == 100
