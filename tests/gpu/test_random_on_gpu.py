"""Random numbers on a GPU: sampled as eager samples them, generators of the program's included; never seeded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from graft.base.errors import CaptureError, CaptureRefused

OLD = torch.__version__ < "2.12"  # whose export takes no generator as an argument


class Noise(nn.Module):
    def forward(self, x):
        torch.rand(3, device=x.device)  # nothing reads it, and it advances the generator
        return F.dropout(x, 0.5, training=True) + torch.randn_like(x)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_samples_are_those_of_eager(device, backend):
    x = torch.ones(64, device=device)
    compiled = graft.compile(Noise(), (x,), backend=backend)
    torch.manual_seed(5)
    expected = [Noise()(x) for _ in range(4)]
    torch.manual_seed(5)
    for wanted in expected[:3]:
        assert torch.equal(compiled(x), wanted)
    assert torch.equal(Noise()(x), expected[3])  # the generator stands where eager's does
    assert not torch.equal(compiled(x), compiled(x))


def test_inductor_says_that_it_samples_other_numbers(device):
    compiled = graft.compile(Noise(), (torch.ones(64, device=device),), backend="inductor")
    assert "inductor: it samples other random numbers than eager for the same seed" in compiled.report.notes


def seeds(x):
    torch.manual_seed(3)
    return x + torch.rand(3, device=x.device)


def seeds_the_device(x):
    torch.cuda.manual_seed_all(3)
    return x + torch.rand(3, device=x.device)


def reads_the_state(x):
    torch.cuda.get_rng_state()
    return x + torch.rand(3, device=x.device)


def reads_the_seed(x):
    return x + torch.cuda.initial_seed()


def forks(x):
    with torch.random.fork_rng():
        return x + torch.rand(3, device=x.device)


@pytest.mark.parametrize("program", [seeds, forks])
def test_what_a_graph_would_do_once_is_refused(device, program):
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"random number generator \(\w+, test_random_on_gpu.py:\d+\)"):
        graft.compile(program, (torch.zeros(3, device=device),))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("program", [seeds, seeds_the_device, reads_the_state, reads_the_seed, forks])
def test_the_generator_of_the_device_is_not_seeded_either(program):
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    with pytest.raises(CaptureError, match=r"random number generator \(\w+, test_random_on_gpu.py:\d+\)"):
        graft.compile(program, (torch.zeros(3, device="cuda"),))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert not torch.equal(torch.rand(64, device="cuda"), torch.rand(64, device="cuda"))


def test_capturing_leaves_the_generators_alone(device):
    torch.manual_seed(9)
    wanted = torch.rand(8, device=device)
    torch.manual_seed(9)
    graft.compile(Noise(), (torch.ones(64, device=device),))
    assert torch.equal(torch.rand(8, device=device), wanted)


class Held(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.held, device=x.device) + torch.rand_like(x)


@torch.no_grad()
def test_a_generator_that_the_module_holds_is_sampled_from_as_in_eager(device):
    held, x = torch.Generator(device), torch.zeros(16, device=device)
    if OLD:
        with pytest.raises(CaptureError, match="Generator"):
            graft.compile(Held(held), (x,))
        return
    compiled, results = graft.compile(Held(held), (x,), backend="eager"), []
    for run in (compiled, Held(held)):
        torch.manual_seed(1)
        held.manual_seed(2)
        results.append([run(x) for _ in range(3)])
    assert all(map(torch.equal, *results)) and not torch.equal(results[0][0], results[0][1])
    with pytest.raises(CaptureRefused, match="samples from a generator of its own"):
        graft.compile(Held(held), (x,), backend="cuda_graph")


def several(x):
    part = torch.empty(4, device=x.device)
    part[:3] = x
    done = torch.empty_like(x).copy_(x)
    return done, x + torch.empty(3, device=x.device), part


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x):
        self.kept.add_(torch.empty(3, device=x.device))
        return x * 2


@pytest.mark.parametrize("backend", ["eager", "cuda_graph", "inductor"])
def test_memory_that_nobody_wrote_is_named(device, backend):
    x = torch.zeros(3, device=device)
    found = [n for n in graft.compile(several, (x,), backend=backend).report.notes if n.startswith("uninit")]
    assert [n.partition(" holds")[0].rpartition(": ")[2] for n in found] == ["result 1", "result 2"]
    assert "which nothing has written" in found[0] and "of which only a part is written" in found[1]
    notes = graft.compile(Keeps().to(device), (x,), backend=backend).report.notes
    assert any(n.startswith("uninitialised") and n.endswith("has written into kept") for n in notes)
