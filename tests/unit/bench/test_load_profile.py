"""Idle time between kernels, as benchmarks/load_profile.py tells it."""

from __future__ import annotations

from benchmarks.load_profile import Gap, idle

from graft.bench.kernels.kernel_times import Launch


def launch(name, start, duration):
    return Launch(name, "", start, duration)


def test_gaps_are_counted_by_the_kernels_on_both_sides():
    launches = [
        launch("gemm", 0, 100), launch("norm", 101, 50), launch("gemm", 1151, 100), launch("norm", 1251, 50),
        launch("gemm", 2301, 10),
    ]  # fmt: skip
    assert idle(launches) == [Gap("norm", "gemm", 2, 2.0)]
    assert idle(launches[::-1]) == idle(launches), "in any order"


def test_what_runs_beside_a_longer_kernel_is_no_gap():
    beside = [launch("copy", 0, 1000), launch("fill", 10, 5), launch("gemm", 1000, 10), launch("gemm", 1500, 10)]
    assert idle(beside) == [Gap("gemm", "gemm", 1, 0.49)]
    assert idle(beside[:1]) == []
