"""The engine, its memory and its key-value cache."""

from __future__ import annotations

from graft.base.errors.base import GraftError, UsageError


class EngineStuck(GraftError):
    def __init__(self, waiting: int, running: int, available: int) -> None:
        super().__init__(
            f"none of the requests can be served (waiting: {waiting}, running: {running}, blocks: {available}); this"
            " is a defect of the scheduler. Please report it with the requests that led to it"
        )


class EngineFailed(GraftError):
    """A step of the engine failed, or the engine takes no request (from here); the message says which."""


class OutOfMemory(GraftError):
    """Memory is not there for what was asked; the message has the numbers."""


class LayoutError(GraftError):
    """Inputs of the engine's graph, or a batch for them, that are not as ops/layout.py has them: a defect."""


class GrammarRefused(UsageError):
    """A schema or grammar that cannot be kept to; the message is the library's, and names the part."""

    def __init__(self, why: str) -> None:
        super().__init__(f"grammar: it cannot be kept to: {why}")
        self.why = why


class OutOfCache(GraftError):
    """The key-value cache has no room for the requests."""


class CacheMisuse(GraftError):
    """A call of the block manager that cannot be meant: a closed table, a write without room. Nothing has changed."""


class CacheCorrupt(GraftError):
    """An invariant of the block manager does not hold: a defect of graft."""


class EventOrder(GraftError):
    """A key-value cache event that cannot follow on those before it: events were lost, repeated or mixed up."""


class NoRanks(GraftError):
    """A graph that is the part of one rank, where there are no others to exchange with."""


class RankFailed(GraftError):
    """A rank of a model on several is gone, or they are out of step; the engine ends with all of them."""

    def __init__(self, rank: int | None, why: str) -> None:
        """rank: None where only the connection to it says so."""
        which = "another rank" if rank is None else f"rank {rank}"
        super().__init__(f"{which} failed: {why}. All ranks of this engine are stopped; load the LLM again")
        self.rank, self.why = rank, why


class RanksDiffer(GraftError):
    """Ranks that cannot compute one model together: another version, configuration or checkpoint."""
