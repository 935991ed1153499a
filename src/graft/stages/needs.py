"""Private names of torch: whether they are there, and how they are put back after they were watched."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

TESTED = ((2, 11), (2, 13))  # the first and the last version of torch that the adapters are written for


def missing(needs: Sequence[str]) -> str:
    """Which of `module:Class.name` this torch does not have; empty if all are there."""
    absent = [need for need in needs if not present(need)]
    return f"torch {torch.__version__} has no {', '.join(absent)}" if absent else ""


def present(need: str) -> bool:
    module, _, path = need.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split(".") if path else ():
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True


def version_note() -> str:
    """What to say of a torch that the adapters were never run on; empty for those that they were."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if TESTED[0] <= version <= TESTED[1]:
        return ""
    first, last = (".".join(map(str, v)) for v in TESTED)
    return f"torch {torch.__version__} is outside {first} to {last}, which the adapters of the stages are written for"


@contextmanager
def swapped(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it, `owner.name` is what `make` makes of it; afterwards it is the very same object as before."""
    before = inspect.getattr_static(owner, name)
    made: Any = make(getattr(owner, name) if isinstance(before, (staticmethod, classmethod)) else before)
    setattr(owner, name, staticmethod(made) if isinstance(before, (staticmethod, classmethod)) else made)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Reached:
    """How far the run under way has come, for the story of one that fails. Stage 0: the program itself runs.

    call: which of the calls is made. graph: whose code runs; empty outside of it. failed: the error that generated
    code raised, and what it was doing. told: is called with every step.
    """

    def __init__(self) -> None:
        self.stage, self.doing, self.call, self.graph = 1, "tracing", 1, ""
        self.failed: tuple[BaseException, str] | None = None
        self.told: Callable[[int, str], None] | None = None

    def at(self, stage: int, doing: str) -> None:
        self.stage, self.doing = stage, doing
        if self.told is not None:
            self.told(stage, doing)

    def compiled(self) -> None:
        """A compilation is over. One that failed on its way stays where it was."""
        if self.stage <= 1:
            self.at(0, f"running call {self.call}")

    def running(self, call: Callable[..., Any], graph: str) -> Callable[..., Any]:
        """Generated code that says when it runs."""

        def run(*args: Any) -> Any:
            doing = f"running call {self.call}, in the code of graph {graph}"
            self.at(6, doing)
            around, self.graph = self.graph, graph
            try:
                return call(*args)
            except BaseException as error:
                self.failed = (error, doing)
                raise
            finally:
                self.graph = around
                self.at(0, f"running call {self.call}")

        return run
