"""What the machine can do: the kernel reads everything, rates come from bytes and medians."""

from __future__ import annotations

import pytest
import torch

from graft.base import timers
from graft.bench.limits import roofline
from graft.bench.limits.roofline import cpu_read, matrix_rate, measure_roofline

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def slow_clock(monkeypatch):
    """Every reading is a quarter of a second later than the one before: each timed call takes that long."""
    now = [0.0]

    def tick() -> float:
        now[0] += 0.25
        return now[0]

    monkeypatch.setattr(timers.time, "perf_counter", tick)


def test_the_read_kernel_reads_every_element():
    """Each program's sum is that of its own 8,192 elements; one that skipped any would be found."""
    from graft.bench.limits.read_kernel import ELEMENTS, make_buffers, read_all

    x, sums = make_buffers(5 * 2 * ELEMENTS, DEVICE)
    assert x.nbytes == 5 * 2 * ELEMENTS and sums.shape == (5,)
    x.copy_(torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(0)))
    sums.fill_(float("nan"))
    read_all(x, sums)
    expected = x.view(5, ELEMENTS).float().sum(1)
    assert torch.equal(sums, expected)
    x[3 * ELEMENTS + 77] += 1
    read_all(x, sums)
    assert not torch.equal(sums, expected) and sums[3] == expected[3] + 1


def test_rates_are_bytes_and_operations_over_seconds(slow_clock, monkeypatch):
    monkeypatch.setattr(roofline, "CPU_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "last_level_cache", lambda: 0)
    rate, how = cpu_read()
    assert rate == pytest.approx((1 << 20) / 0.25) and "0.00 GB" in how
    assert matrix_rate(torch.device("cpu"), torch.float32, 16) == pytest.approx(2 * 16**3 / 0.25)


@pytest.mark.parametrize(("rates", "how"), [((1, 4), "1024³ in float32"), ((4, 1), "256³ in bfloat16")])
def test_the_roofline_of_a_cpu_has_numbers_and_says_how(rates, how, monkeypatch):
    """The GEMM in 16 bits, or in float32 where that is faster, as on a CPU without such instructions."""
    monkeypatch.setattr(roofline, "CPU_BYTES", 1 << 22)
    monkeypatch.setattr(roofline, "last_level_cache", lambda: 0)
    narrow, wide = rates
    monkeypatch.setattr(
        roofline, "matrix_rate", lambda _, dtype, side: 1e12 * (narrow if dtype.itemsize == 2 else wide)
    )
    found = measure_roofline(torch.device("cpu"), torch.bfloat16)
    assert found.read_gb_per_s > 0 and found.matrix_tflops == 4
    assert found.matrix_how == how and "threads" in found.read_how
