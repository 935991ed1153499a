"""Samples of Python's and numpy's random number generators, refused to a program while it is traced.

    before:  x + random.random()          after:  CaptureError with the line; a graph would hold one number for ever

For that time the functions of `random` and `numpy.random` are others, which ask who calls. Whoever looks at those
modules meanwhile sees the others, so they must do no harm for as long as the process lives:

- variables of the program that hold one (`from random import random`) are put back;
- modules that are imported then (800 by the first torch.export of a process) get the real functions at the end;
- Dynamo keeps a table of numpy's functions by `id`, made when it is first asked. It is made before; and the functions
  that stand in are kept for good, since a lambda that later lay at a freed one's address would count as numpy's.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graft.base.errors import CaptureError
from graft.ir.program.callers import is_torch, line_of
from graft.ir.program.own_code import Variable

UNCHANGED = ("getstate", "setstate", "get_state", "set_state")  # Dynamo keeps the state with them
# what makes a generator that begins anew at every call, seeds the one of all, or samples without one
WITHOUT_STATE = {"numpy.random": ("default_rng", "seed"), "secrets": ("choice", "randbelow", "randbits")}
_tracing = threading.local()  # .depth: how many traces this thread is in
_changes: list[tuple[Any, str, Any]] = []  # (Python module, name, real function) while any thread traces
_traces = 0
_lock = threading.Lock()


@contextmanager
def host_samples_refused(looked_up: Sequence[Variable] = (), held: Iterable[Any] = ()) -> Iterator[None]:
    """Within it, this thread's program cannot sample; torch and other threads can.

    looked_up: variables of its code; held: objects that it holds. Generators among both (`random.Random`, those of
    `numpy.random`) must be at the end as they were, and are put back.
    """
    from torch._dynamo import trace_rules

    trace_rules.is_numpy(host_samples_refused)  # makes the table
    _tracing.depth = getattr(_tracing, "depth", 0) + 1
    real = put_in()
    standing_in = {id(function): vars(module)[key] for module, key, function in _changes}
    by_name = [one for one in looked_up if id(one.value) in standing_in]
    own = [*held, *(one.value for one in looked_up)]
    objects = [Sampler(one, state) for one in unique(own) if (state := state_of(one)) is not None]
    with imports_put_right(real):
        try:
            for one in by_name:
                one.put(standing_in[id(one.value)])
            yield
        finally:
            for one in by_name:
                one.put(one.value)
            take_out()
            _tracing.depth -= 1
            sampled = [one for one in objects if one.put_back()]
    if sampled:
        raise refusal(f"a {type(sampled[0].generator).__name__} object")


@dataclass(frozen=True)
class Sampler:
    """A generator of Python or numpy that the program holds, and its state before the trace."""

    generator: Any
    state: bytes

    def put_back(self) -> bool:
        """Whether it was sampled from, or seeded."""
        if state_of(self.generator) == self.state:
            return False
        state = pickle.loads(self.state)
        if isinstance(self.generator, random.Random):
            self.generator.setstate(state)
        elif hasattr(self.generator, "bit_generator"):
            self.generator.bit_generator.state = state
        else:
            self.generator.set_state(state)
        return True


def state_of(value: Any) -> bytes | None:
    """None for what is no generator, or one that has no state (SystemRandom)."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, random.Random):
        return pickle.dumps(value.getstate())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    return None


def unique(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def refusal(name: str, line: str = "") -> CaptureError:
    return CaptureError(
        f"forward samples from {name}{f' ({line})' if line else ''}, and a graph would hold that one number for ever;"
        " sample with torch, or pass the number as an argument"
    )


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
    for module, keys in WITHOUT_STATE.items():
        found = sys.modules.get(module)
        for key in keys if found is not None else ():
            yield found, key, refusing(vars(found)[key], f"{module}.{key}")


@functools.cache
def refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, refused to a program that is traced. One for each, which is never freed."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if getattr(_tracing, "depth", 0) and not is_torch(caller):
            raise refusal(name, line_of(caller))
        return function(*args, **kwargs)

    return call


@contextmanager
def imports_put_right(real: dict[int, Any]) -> Iterator[None]:
    """At its end, modules that were imported within it have the real objects for those that stood in, named by id."""
    before = list(sys.modules)  # lists compare by identity: sets of 6,000 names take 1 % of a small export
    try:
        yield
    finally:
        now = list(sys.modules)
        for name in set(now).difference(before) if now != before else ():
            names = getattr(sys.modules[name], "__dict__", {})
            names.update({key: real[id(value)] for key, value in list(names.items()) if id(value) in real})
