"""Keeping the garbage collector away from what lives long anyway."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOCK = threading.Lock()
INSIDE = 0  # blocks that are open, in all threads


@contextmanager
def old_objects_frozen() -> Iterator[None]:
    """What exists now is not looked through until the last such block ends; what is made meanwhile is, as ever.

    A full collection takes 0.3 s over the graphs and modules of an 8B model, in which no step is launched.
    """
    global INSIDE
    with LOCK:
        INSIDE += 1
        gc.freeze()
    try:
        yield
    finally:
        with LOCK:
            INSIDE -= 1
            if not INSIDE:
                gc.unfreeze()
