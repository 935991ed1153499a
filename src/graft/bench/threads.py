"""One number of threads for every engine of a benchmark on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graft.backends.native.cpu import THREADS, available_cores, thread_count
from graft.base.errors import TooManyThreads, UsageError


def checked_threads(asked: int | None, device: torch.device) -> int | None:
    """What was asked for, by default the cores that the process may use; on a GPU None, which changes nothing."""
    if asked is None:
        return thread_count() if device.type == "cpu" else None
    if asked < 1:
        raise UsageError(f"--threads must be at least 1, but is {asked}")
    if asked > available_cores():
        raise TooManyThreads(asked, available_cores(), "--threads")
    return asked


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """torch and native graphs that are built inside have `count` threads; afterwards all is as it was."""
    if count is None:
        yield
        return
    before, named = torch.get_num_threads(), os.environ.get(THREADS)
    torch.set_num_threads(count)
    os.environ[THREADS] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if named is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = named
