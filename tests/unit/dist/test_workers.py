"""Processes of other ranks: what they say when they die, and that none is left."""

from __future__ import annotations

import signal
import time

import pytest

import graft.dist.workers as workers_module
from graft.dist.workers import Workers, log_file

SOON = 300.0  # seconds, of the slowest machine; each of these waits for an end that comes by itself


@pytest.fixture(autouse=True)
def small_workers(monkeypatch):
    monkeypatch.setattr(workers_module, "MODULE", "rank_worker")


def wait_for_line(workers, rank):
    until = time.monotonic() + SOON
    while "was told" not in (text := log_file(workers.folder, rank).read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    return text


def test_a_worker_that_fails_is_told_with_its_last_lines_and_ends_the_others():
    workers = Workers.start(3, 1, "fail 2", {})
    failed = workers.failure(SOON)
    assert failed is not None and failed.rank == 2
    assert "it ended with exit code 3" in str(failed) and "no memory left here" in str(failed)
    assert workers.processes[1].wait(SOON) == -signal.SIGKILL
    workers.stop()
    assert not workers.folder.exists()


def test_workers_end_with_their_input():
    workers = Workers.start(2, 1, "wait", {})
    assert "rank 1 of 2 was told wait" in wait_for_line(workers, 1)
    workers.stopping = True
    workers.processes[1].stdin.close()  # all that is left of a rank 0 that was killed
    assert workers.processes[1].wait(SOON) == 0 and workers.failed is None
    assert not workers.folder.exists()


def test_a_worker_that_does_not_listen_is_killed(monkeypatch):
    monkeypatch.setattr(workers_module, "LEAVING", 0.2)
    workers = Workers.start(2, 1, "wait", {"RANK_WORKER": "deaf"})
    workers.stop()
    assert workers.processes[1].returncode == -signal.SIGKILL and workers.failed is None


def test_a_killed_worker_is_told_by_its_signal():
    workers = Workers.start(2, 1, "wait", {})
    wait_for_line(workers, 1)
    workers.processes[1].kill()
    failed = workers.failure(SOON)
    assert failed is not None and "rank 1 failed: it was killed by signal 9" in str(failed)
    workers.stop()
