"""What rank 0 tells the others comes out as it went in, however long it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graft.dist.messages import COPY, SHORT, STEP, STOP, Messages, decode, encode


class Wire:
    """A broadcast as two ends see it: what one sends, the other receives into its arrays."""

    def __init__(self):
        self.sent = []

    def put(self, values):
        self.sent.append(values.copy())

    def get(self, values):
        values[:] = self.sent.pop(0)


@pytest.mark.parametrize("tokens", [1, 7, SHORT - 20, SHORT, 5 * SHORT])
def test_a_step_comes_out_as_it_went_in(monkeypatch, tokens):
    wire, tensors = Wire(), [torch.arange(tokens)[None], torch.arange(12).view(3, 4), torch.zeros(0, dtype=torch.int64)]
    messages = Messages(None)
    monkeypatch.setattr(messages, "broadcast", wire.put)
    messages.send(STEP, tensors)
    assert len(wire.sent) == (1 if len(encode(STEP, tensors)) <= SHORT else 2)
    monkeypatch.setattr(messages, "broadcast", wire.get)
    kind, found = messages.receive()
    assert kind == STEP and not wire.sent
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


def test_kinds_without_tensors():
    assert decode(encode(STOP, [])) == (STOP, [])
    kind, (pairs,) = decode(np.pad(encode(COPY, [torch.tensor([[1, 2]])]), (0, 9)))
    assert kind == COPY and pairs.tolist() == [[1, 2]]
