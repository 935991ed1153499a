"""Tensors that are conjugated or negated when they are read: on every route, as state, and in saved modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graft
from graft.base.errors import UsageError


class Lazy(nn.Module):
    """Buffers of one memory that are read in three ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("z", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("c", self.z.conj())
        self.register_buffer("alone", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("n", torch.randn(3, dtype=torch.complex64).conj().imag)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.conj(), x.conj().imag, self.c * x, self.c.imag, self.alone, self.z + 1, self.n + 1, self.n


def same(found: Tensor, right: Tensor) -> bool:
    bits = (found.is_conj(), found.is_neg()) == (right.is_conj(), right.is_neg())
    return bits and torch.equal(found.resolve_conj(), right.resolve_conj())


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
@pytest.mark.parametrize("first", [0, 1])
def test_lazy_views_are_read_as_eager_reads_them(backend, first, tmp_path):
    module, z = Lazy(), torch.randn(3, dtype=torch.complex64)
    inputs = z, z.conj(), torch.randn(3, dtype=torch.complex64).conj()
    compiled = graft.compile(module, (inputs[first],), backend=backend)
    compiled.save(tmp_path / "saved")
    for call in (compiled, graft.load(tmp_path / "saved")):
        for x in (*inputs, inputs[0]):
            assert all(map(same, call(x), module(x)))
    x = inputs[1].clone()
    found, right = compiled(x), module(x)
    x.mul_(2)  # results that are views of it follow
    assert all(map(same, found, right)) and not torch.equal(right[0], module(inputs[1])[0])


def test_inductor_reads_memory_as_it_lies_and_refuses():
    z = torch.randn(3, dtype=torch.complex64)
    compiled = graft.compile(lambda x: x + 1, (torch.ones(3),), backend="inductor")
    with pytest.raises(UsageError, match=r"input 0 is negated when it is read .* pass resolve_neg\(\)"):
        compiled(z.conj().imag)
    with pytest.raises(UsageError, match="n is negated when it is read"):
        graft.compile(Lazy(), (z,), backend="inductor")
    by_torch = torch.compile(lambda x: x + 1, backend="graft")
    assert torch.equal(by_torch(z.real), z.real + 1)
    with pytest.raises(UsageError, match="input 0 is negated"):
        by_torch(z.conj().imag)
