"""Keeping the garbage collector away from what lives long anyway."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOCK = threading.Lock()
INSIDE = 0  # blocks that are open, in all threads
OURS: bool | None = None  # whether nobody else had frozen objects before; counting takes 50 ms, so it is done once
# Collections of the middle generation before a full one, by default ten. Under load those come every second and go
# through the token lists of all requests: 41 in 35 s, 0.07 s each and more with every request, a tenth of the time
# and the 99th percentile between tokens (8B, 1,024 at once, H200). A thousand take a minute.
RARELY = 1000
BEFORE: tuple[int, int, int] | None = None  # the thresholds outside of all blocks, where they were changed
FROM_THE_START = 2000  # Python 3.12 itself has frozen some 400; a program that freezes has more than 4,000 to freeze


@contextmanager
def old_objects_frozen() -> Iterator[None]:
    """What exists now is not looked through until the last such block ends, and what is made meanwhile rarely, once
    it has lived through two collections of what is young.

    A full collection takes 0.3 s over the graphs and modules of an 8B model, in which no step is launched. Python can
    only thaw everything, so that in a process where somebody had frozen objects all of this leaves them alone.
    """
    global INSIDE, OURS, BEFORE
    with LOCK:
        if OURS is None:
            OURS = gc.get_freeze_count() < FROM_THE_START
        INSIDE += 1
        if OURS:
            gc.freeze()
            young, middle, old = gc.get_threshold()
            if BEFORE is None and 0 < old < RARELY:
                BEFORE = (young, middle, old)
                gc.set_threshold(young, middle, RARELY)
    try:
        yield
    finally:
        with LOCK:
            INSIDE -= 1
            if OURS and not INSIDE:
                gc.unfreeze()
                if BEFORE is not None and gc.get_threshold() == (*BEFORE[:2], RARELY):  # nobody else has set them
                    gc.set_threshold(*BEFORE)
                BEFORE = None
