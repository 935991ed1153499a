"""What of torch does not live on in a forked process."""

from __future__ import annotations

import sys


def forget_threads() -> None:
    """Inductor hands C++ to a pool of threads, which it keeps. A forked process has the pool without its threads, and
    waits for ever for what it hands to them; torch resets its pools of processes there, and not this one."""
    compiling = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        compiling.AsyncCompile.pool.cache_clear()
