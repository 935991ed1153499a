"""Keeping the garbage collector away from what lives long anyway."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOCK = threading.Lock()
INSIDE = 0  # blocks that are open, in all threads
OURS: bool | None = (
    None  # whether nobody had frozen anything before the first; counting takes 50 ms, so it is done once
)


@contextmanager
def old_objects_frozen() -> Iterator[None]:
    """What exists now is not looked through until the last such block ends; what is made meanwhile is, as ever.

    A full collection takes 0.3 s over the graphs and modules of an 8B model, in which no step is launched. Python can
    only thaw everything, so that in a process that had frozen objects before all of this leaves them alone.
    """
    global INSIDE, OURS
    with LOCK:
        if OURS is None:
            OURS = gc.get_freeze_count() == 0
        INSIDE += 1
        if OURS:
            gc.freeze()
    try:
        yield
    finally:
        with LOCK:
            INSIDE -= 1
            if OURS and not INSIDE:
                gc.unfreeze()
