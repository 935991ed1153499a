"""The process group of a model's ranks: torch.distributed, with NCCL on GPUs of their own and gloo elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from graft.base.errors import RankFailed, RanksDiffer, UsageError
from graft.ops import ranks
from graft.ops.peers import PeerMemory

STUCK = timedelta(minutes=10)  # one exchange takes milliseconds; a first step may compile for minutes
IDLE = timedelta(days=365)  # a rank without work waits for the next message
MESSAGE_TAG = "graft-messages"
NO_INTERFACE = ("Unable to find address", "Unable to find interface", "no socket interface found")  # gloo, NCCL

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Timed out waiting")


@dataclass
class TorchGroup:
    """The ranks of this process's model. seconds, calls, bytes: spent in exchanges since they were last set to 0;
    seconds are None on a GPU, where a call ends before the exchange does."""

    rank: int
    world: int
    backend: str
    data: Any  # the group that numbers go through
    messages: Any  # gloo, for what the ranks tell each other
    seconds: float = 0.0
    calls: int = 0
    bytes: int = 0
    broken: bool = False  # a rank is gone
    peers: dict[int, PeerMemory] = field(default_factory=dict)  # by the bytes of a row

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        with self.counted(total):
            distributed.all_reduce(total, group=self.data)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.world)]
        with self.counted(own):
            distributed.all_gather(parts, own, group=self.data)
        return torch.cat(parts, dim=-1)

    def peer_memory(self, width: int, x: Tensor) -> PeerMemory:
        """All ranks ask at the same call of the same graph, so that they meet when it is made."""
        if width not in self.peers:
            from graft.dist.peer_memory import share_memory

            self.peers[width] = share_memory(self, width, x.device)
        with self.counted(x):
            return self.peers[width]

    def settle(self) -> None:
        """Behind a step: kernels that waited for a rank that is gone have given up, and their numbers are nobody's."""
        if self.peers:
            torch.cuda.synchronize()
        if self.peers and self.broken:
            raise RankFailed(None, "it never wrote its part of a sum; what it has printed says why")

    def give_up(self) -> None:
        """A rank is gone; whatever waits for it here ends."""
        self.broken = True
        for memory in self.peers.values():
            memory.let_go()

    @contextmanager
    def counted(self, x: Tensor) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
        self.calls += 1
        self.bytes += x.nbytes

    def agree(self, what: str, own: str) -> None:
        """Refuses ranks of which one has something else here than rank 0."""
        said = self.said(own)
        other = next((rank for rank, text in enumerate(said) if text != said[0]), None)
        if other is not None:
            raise RanksDiffer(
                f"rank {other} has another {what} than rank 0 ({said[other]}, not {said[0]}); start all ranks with the"
                " same versions, options and checkpoint"
            )

    def said(self, own: str) -> list[str]:
        """What each rank has to say, on all of them."""
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, own, group=self.messages)
        return found

    def least(self, number: int) -> int:
        """The smallest that a rank has."""
        found = torch.tensor(number)
        distributed.all_reduce(found, op=distributed.ReduceOp.MIN, group=self.messages)
        return int(found)

    def enter(self) -> None:
        """This process computes with the others from now on."""
        ranks.join(self)

    def leave(self) -> None:
        ranks.join(None)
        if distributed.is_initialized():
            distributed.destroy_process_group()


def connect(rank: int, world: int, backend: str, meeting: Callable[[], Any]) -> TorchGroup:
    """Meets the other ranks at the store that `meeting` gives; it is not asked where there is no meeting."""
    for group in ranks.PROCESS:
        if isinstance(group, TorchGroup) and group.broken:
            group.leave()
    if distributed.is_initialized():
        raise UsageError("this process is a rank of another model already; load one LLM with several ranks a process")
    if not distributed.is_available() or not available(backend):
        raise UsageError(f"this build of torch has no {backend}, which ranks exchange numbers with")
    try:
        reset_group_names()
        distributed.init_process_group(backend, rank=rank, world_size=world, timeout=STUCK, store=meeting())
        messages = distributed.new_group(backend="gloo", timeout=IDLE)
    except RuntimeError as error:
        if not any(word in str(error) for word in NO_INTERFACE):
            raise  # a rank that died on the way, say: whoever started it knows
        raise UsageError(
            f"ranks find no network interface to exchange numbers over ({str(error).splitlines()[0][-80:]}); correct or"
            f" unset GLOO_SOCKET_IFNAME{' and NCCL_SOCKET_IFNAME' if backend == 'nccl' else ''}"
        ) from error
    return TorchGroup(rank, world, backend, distributed.group.WORLD, messages)


def reset_group_names() -> None:
    """torch names groups by a count, which an init_process_group that fails leaves behind: the next group of this
    process would have another name than on the other ranks, and all would wait for each other for STUCK. The end of a
    group that did begin sets the count back."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    distributed.destroy_process_group()


def failed_rank(error: Exception) -> RankFailed:
    """Of an error in the middle of something that all ranks do together, where no process is watched: the connection
    to another broke, or it is this rank's own."""
    told = f"{type(error).__name__}: {error}"
    lost = next((word for word in LOST if word in told), None)
    if lost is not None or isinstance(error, distributed.DistError):
        why = lost or told.splitlines()[0][:120]
        return RankFailed(None, f"the connection to it is lost ({why}); what it has printed says why")
    return RankFailed(distributed.get_rank() if distributed.is_initialized() else None, told)


def available(backend: str) -> bool:
    return {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}[backend]()
