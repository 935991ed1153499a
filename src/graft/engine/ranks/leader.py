"""Rank 0's side of a step: it tells the others what to feed, and runs its own part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graft.base.device_memory import size_text
from graft.base.errors import RankFailed
from graft.dist.group import TorchGroup, failed_rank
from graft.dist.messages import COPY, COPY_STATE, SAVE, STEP, STOP, Messages, as_ints
from graft.dist.workers import Workers
from graft.engine.engine import Engine
from graft.engine.kv.moves import Copy, Move
from graft.engine.kv.tensors import copy_blocks
from graft.engine.ranks.task import RankPlace
from graft.ops import ranks
from graft.ops.layout import NAMES


@dataclass(eq=False)
class LeaderGraph:
    """Takes the place of the lowered graph: the same call, on all ranks. caches: tensors of keys and values among its
    inputs, each rank's own. workers: the processes that this one started."""

    graph: Callable[..., Any]
    group: TorchGroup
    caches: int
    workers: Workers | None = None
    messages: Messages = field(init=False)
    steps: int = 0
    seconds: float = 0.0  # of all steps
    lost: RankFailed | None = None

    def __post_init__(self) -> None:
        self.messages = Messages(self.group)
        self.group.seconds, self.group.calls, self.group.bytes = 0.0, 0, 0

    def __call__(self, *inputs: Tensor) -> Any:
        started = time.perf_counter()
        result = self.together(lambda: self.step(inputs))
        self.steps, self.seconds = self.steps + 1, self.seconds + time.perf_counter() - started
        return result

    def step(self, inputs: Sequence[Tensor]) -> Any:
        slots = len(NAMES) + self.caches  # of recurrent states, which come behind them
        self.messages.send(STEP, [*inputs[: len(NAMES)], *inputs[slots : slots + 1]])
        result = self.graph(*inputs)
        self.group.settle()
        return result

    def copy(self, tensors: Sequence[Tensor], moves: Sequence[Move]) -> None:
        """copy_blocks, on every rank. It refuses other moves: ranks have no host memory for blocks."""
        copies = [move for move in moves if isinstance(move, Copy)]
        if copies:
            pairs = torch.tensor([[copy.source, copy.target] for copy in copies])
            self.together(lambda: self.messages.send(COPY, [pairs]))
        copy_blocks(tensors, moves)

    def tell_state(self, source: int, target: int) -> None:
        """States of recurrent layers are copied, on every rank."""
        self.together(lambda: self.messages.send(COPY_STATE, [torch.tensor([source, target])]))

    def save(self, order: str, own: Callable[[], str]) -> list[str]:
        """Every rank writes its part, as it is told, and says what came of it; `own` does so here."""

        def work() -> list[str]:
            self.messages.send(SAVE, [as_ints(order)])
            return self.group.said(own())

        return self.together(work)

    def together(self, work: Callable[[], Any]) -> Any:
        """A rank that fails leaves the others in the middle of a step: there is no way back from that."""
        if self.lost is not None:
            raise self.lost
        try:
            return work()
        except Exception as error:
            self.lost = self.failure(error)
            self.end()
            raise self.lost from error
        except BaseException:
            self.lost = RankFailed(0, "it was interrupted in the middle of a step")
            self.end()
            raise

    def gone(self, failed: RankFailed) -> None:
        """A worker died, whatever rank 0 was doing."""
        self.lost = self.lost or failed
        self.group.give_up()

    def failure(self, error: Exception) -> RankFailed:
        """The worker that died, or what went wrong here."""
        found = self.workers.failure() if self.workers is not None else None
        return found or failed_rank(error)

    def end(self) -> None:
        self.group.give_up()
        if self.workers is not None:
            self.workers.stop()

    def close(self) -> None:
        """Nothing more will come: nobody has the LLM any more, or the process ends."""
        if self.workers is None and self.lost is None:
            self.messages.send(STOP)
        self.lost = self.lost or RankFailed(0, "the engine was closed")
        self.end()
        if self.group in ranks.PROCESS:
            self.group.leave()

    @property
    def note(self) -> str:
        group = self.group
        said = f"tensor parallel: {group.world} ranks over {group.backend}"
        if not self.steps:
            return said
        each = f"{group.calls / self.steps:.0f} exchanges and {size_text(group.bytes // self.steps)} a step"
        share = (
            f"communication is {group.seconds / self.seconds:.0%} of a step on rank 0, waiting for others included"
        )
        times = f"{1000 * group.seconds / self.steps:.2f} of {1000 * self.seconds / self.steps:.2f} ms"
        return f"{said}; {each}; {share} ({times}, {self.steps} steps)"


def lead(engine: Engine, place: RankPlace | None, workers: Workers | None) -> None:
    """On rank 0 of several: its steps are those of all."""
    if place is not None and place.rank == 0:
        leader = LeaderGraph(engine.graph, place.group, len(engine.tensors), workers)
        engine.graph, engine.move = leader, leader.copy
        if engine.states is not None:
            engine.states.tell = leader.tell_state
