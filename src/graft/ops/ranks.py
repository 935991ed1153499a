"""The ranks that compute one model together, as graft::all_reduce and graft::all_gather see them.

A process has one group (`join`, from dist/group.py); a thread may have another for a while (`as_rank`): the ranks of
a model can then run as threads of one process, which is how rewrites are checked without starting any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from graft.base.errors import NoRanks

if TYPE_CHECKING:
    from graft.ops.peers import PeerMemory

Result = TypeVar("Result")
STUCK = 600.0  # seconds; a rank that made fewer exchanges than the others never comes


class RankGroup(Protocol):
    """What a group must be able to do; every rank calls the same in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def broken(self) -> bool:
        """A rank is gone: whoever exchanged anything would wait for it."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, equal on each; x stays as it is."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The parts of all ranks side by side in the last dim."""
        ...

    def peer_memory(self, width: int, x: Tensor) -> PeerMemory:
        """Memory that all ranks read of each other (peers.py), for an exchange of x in rows of so many bytes."""
        ...


class Place(threading.local):
    group: RankGroup | None = None


THREAD = Place()
PROCESS: list[RankGroup] = []  # at most one


def join(group: RankGroup | None) -> None:
    """The group of this process from now on; None: it has none."""
    PROCESS[:] = [] if group is None else [group]


def current_group(world: int) -> RankGroup:
    """The group of this thread, or of the process; it must have so many ranks."""
    group = THREAD.group or next((group for group in PROCESS if not group.broken), None)
    if group is None or group.world != world:
        found = "this process has none" if group is None else f"the group here has {group.world}"
        raise NoRanks(
            f"the graph is one of {world} parts and needs a group of {world} ranks, but {found}; run it with"
            f" LLM(..., tensor_parallel_size={world}) or `graft run --tensor-parallel {world}`"
        )
    return group


def in_thread() -> bool:
    """Whether this thread is a rank by itself."""
    return THREAD.group is not None


@contextmanager
def as_rank(group: RankGroup) -> Iterator[None]:
    before, THREAD.group = THREAD.group, group
    try:
        yield
    finally:
        THREAD.group = before


@dataclass
class Meeting:
    """What threads that are ranks of one group share. The last to come sums; a rank that fails lets nobody wait."""

    world: int
    parts: list[Any] = field(default_factory=list)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [None] * self.world
        self.barrier = threading.Barrier(self.world)


@dataclass(frozen=True)
class ThreadRank:
    """One of several ranks in this process."""

    rank: int
    world: int
    meeting: Meeting
    broken: bool = False

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.exchange(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.exchange(x), dim=-1)

    def peer_memory(self, width: int, x: Tensor) -> PeerMemory:  # noqa: ARG002
        raise NoRanks("ranks that are threads of one process have no memory that kernels wait for each other in")

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.meeting.parts[self.rank] = x
        self.meeting.barrier.wait(STUCK)
        parts = list(self.meeting.parts)
        self.meeting.barrier.wait(STUCK)  # nobody writes the next parts before all have read these
        return parts


def run_as_ranks(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Each call in a thread of its own, as the rank with its index; the first error of one is raised."""
    meeting = Meeting(len(calls))
    first: list[BaseException] = []

    def run(rank: int) -> Result:
        try:
            with as_rank(ThreadRank(rank, len(calls), meeting)):
                return calls[rank]()
        except threading.BrokenBarrierError:
            raise
        except BaseException as error:
            first.append(error)
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(calls)) as pool:
        done = [pool.submit(run, rank) for rank in range(len(calls))]
        for each in done:
            each.exception()
    if first:
        raise first[0]
    return [each.result() for each in done]
