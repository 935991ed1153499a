"""Samples of Python's and numpy's random number generators, refused to a program while it is traced.

    before:  x + random.random()          after:  CaptureError with the line; a graph would hold one number for ever

For that time the functions of `random` and `numpy.random` are others, which ask who calls. Whoever looks at those
modules meanwhile sees the others, so they must do no harm for as long as the process lives:

- modules that are imported then (800 by the first torch.export of a process) get the real functions at the end;
- Dynamo keeps a table of numpy's functions by `id`, made when it is first asked. It is made before; and the functions
  that stand in are kept for good, since a lambda that later lay at a freed one's address would count as numpy's.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graft.base.errors import CaptureError
from graft.ir.program.callers import is_torch, line_of

UNCHANGED = ("getstate", "setstate", "get_state", "set_state")  # Dynamo keeps the state with them
_tracing = threading.local()  # .depth: how many traces this thread is in
_changes: list[tuple[Any, str, Any]] = []  # (Python module, name, real function) while any thread traces
_traces = 0
_lock = threading.Lock()


@contextmanager
def host_samples_refused() -> Iterator[None]:
    """Within it, this thread's program cannot sample; torch and other threads can."""
    from torch._dynamo import trace_rules

    trace_rules.is_numpy(host_samples_refused)  # makes the table
    _tracing.depth = getattr(_tracing, "depth", 0) + 1
    with imports_put_right(put_in()):
        try:
            yield
        finally:
            take_out()
            _tracing.depth -= 1


def put_in() -> dict[int, Any]:
    """The functions that refuse, unless another thread has put them there; the real ones by the ids of those."""
    global _traces
    with _lock:
        if _traces == 0:
            found = list(host_generators())
            _changes[:] = [(module, key, vars(module)[key]) for module, key, _ in found]
            for module, key, call in found:
                setattr(module, key, call)
        _traces += 1
        return {id(vars(module)[key]): real for module, key, real in _changes}


def take_out() -> None:
    global _traces
    with _lock:
        _traces -= 1
        if _traces == 0:
            for module, key, real in _changes:
                setattr(module, key, real)


def host_generators() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(Python module, name, function that refuses) of what samples from the generators of Python and numpy."""
    for module, own, name in (("random", "_inst", "Python's random"), ("numpy.random", "_rand", "numpy.random")):
        found = sys.modules.get(module)
        holder = sys.modules.get("numpy.random.mtrand") if module == "numpy.random" else found
        generator = getattr(holder, own, None)
        for key, value in list(vars(found).items()) if found is not None and generator is not None else ():
            if getattr(value, "__self__", None) is generator and key not in UNCHANGED:
                yield found, key, refusing(value, name)


@functools.cache
def refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, refused to a program that is traced. One for each, which is never freed."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if getattr(_tracing, "depth", 0) and not is_torch(caller):
            raise CaptureError(
                f"forward samples from {name} ({line_of(caller)}), and a graph would hold that one number for ever;"
                " sample with torch, or pass the number as an argument"
            )
        return function(*args, **kwargs)

    return call


@contextmanager
def imports_put_right(real: dict[int, Any]) -> Iterator[None]:
    """At its end, modules that were imported within it have the real objects for those that stood in, named by id."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            names = getattr(sys.modules[name], "__dict__", {})
            names.update({key: real[id(value)] for key, value in list(names.items()) if id(value) in real})
