"""State that begins anew with a sequence, on a GPU: at position 0 or with another id, in the same memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import UsageError

BACKENDS = ["eager", "cuda_graph", "inductor"]


class Decoder(nn.Module):
    """Keeps what it saw, and how often it was called; rows beyond `position` are read as well."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.full((4, 2), 0.5))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x, position):
        self.cache.index_copy_(0, position, x)
        self.steps += 1
        return self.cache.sum(0) + self.steps


class Counted(Decoder):
    """Writes where its own counter says; `sequence` is told and not used."""

    def forward(self, x, sequence):
        return super().forward(x, self.steps.clone())


def run(call, device, positions=(0, 1, 2)):
    given = [(torch.full((1, 2), p + 1.0, device=device), torch.tensor([p], device=device)) for p in positions]
    return [call(*one) for one in given]


@pytest.mark.parametrize("backend", BACKENDS)
def test_position_zero_begins_anew(device, backend):
    example = torch.ones(1, 2, device=device), torch.tensor([1], device=device)
    compiled = graft.compile(Decoder().to(device), example, backend=backend, restart={"position": 0})
    told = any(f"reads position at every call, which waits for {device}" in n for n in compiled.report.notes)
    assert compiled.backend == backend and told == (device == "cuda")
    memory, expected = compiled.cache.data_ptr(), run(Decoder().to(device), device)
    for _ in range(3):
        torch.testing.assert_close(run(compiled, device), expected)
    assert compiled.steps == 3 and compiled.cache.data_ptr() == memory
    plain = graft.compile(Decoder().to(device), example, backend=backend)
    run(plain, device)
    assert not torch.equal(run(plain, device)[0], expected[0])  # as in eager, where nobody resets
    plain.reset()
    torch.testing.assert_close(run(plain, device), expected)


@pytest.mark.parametrize(("backend", "host"), [("eager", False), ("eager", True), ("cuda_graph", False)])
def test_another_sequence_begins_anew(device, backend, host):
    x, where = torch.ones(1, 2, device=device), "cpu" if host else device
    example = x, torch.tensor(7, device=where)
    compiled = graft.compile(Counted().to(device), example, backend=backend, restart={"sequence": "changed"})
    for sequence in (7, 8, 7):
        reference = Counted().to(device)
        for number in range(3):
            given = x * (10 * sequence + number), torch.tensor(sequence, device=where)
            torch.testing.assert_close(compiled(*given), reference(*given))
    assert compiled.steps == 3


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_the_input_is_found(device, backend):
    example = torch.ones(1, 2, device=device), torch.tensor([1], device=device)
    compiled = graft.compile(Decoder().to(device), example, backend=backend, restart="auto")
    assert any("begins anew before a call whose position starts at 0" in note for note in compiled.report.notes)
    for _ in range(2):
        torch.testing.assert_close(run(compiled, device), run(Decoder().to(device), device))


def test_rows_begin_together_or_are_refused(device):
    class Rows(Decoder):
        def forward(self, x, position):
            self.steps += 1
            return x + position.sum() + self.steps

    rows = [torch.tensor(one, device=device) for one in ([[3, 4], [3, 4]], [[0, 1], [5, 6]], [[0, 1], [0, 1]])]
    x = torch.ones(1, 2, device=device)
    compiled = graft.compile(Rows().to(device), (x, rows[0]), backend="cuda_graph", restart={"position": 0})
    compiled(x, rows[0])
    with pytest.raises(UsageError, match="some rows of position start at 0"):
        compiled(x, rows[1])
    assert compiled.steps == 1
    compiled(x, rows[2])
    assert compiled.steps == 1
