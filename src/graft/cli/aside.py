"""What somebody else's program prints while graft runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def output_aside() -> Iterator[None]:
    """Within it all that is printed goes to standard error, also what is written to file 1 itself, as C does:
    standard output is the command's own answer, which may be JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
