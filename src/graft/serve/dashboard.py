"""What /dashboard shows, twice a second: requests, the batch, the cache's blocks, and counts of which the page makes
rates and quantiles. No text and no token of anybody's is in it, nor a hash from which one could be guessed."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from graft.engine.kv.events import Created, Event, Removed, Stored, Updated
from graft.serve.cache_events import EventReader
from graft.serve.link import EngineLink, Ticket
from graft.serve.protocol import answers
from graft.serve.state import ServerState

EVERY = 0.5  # seconds
SHOWN = 100  # requests, the oldest first
KEPT, IN_USE = 1, 2  # of a cell; 0 is free


class BlockMap:
    """Stored blocks on cells. Events have no addresses: a block takes the lowest free cell, and keeps it."""

    def __init__(self) -> None:
        self.clear()
        self.size = 0

    def clear(self, total: int = 0) -> None:
        self.total, self.cells, self.free = total, dict[str, int](), list(range(total))
        self.told = dict[int, list[int]]()  # cell: state, cell of its parent (-1: none), times that it was used
        self.changed = set[int]()
        self.reset = True

    def apply(self, event: Event) -> None:
        if isinstance(event, Created):
            self.clear(sum(event.levels))
            self.size = event.block_size
        elif isinstance(event, Stored):
            parent = event.parent
            for block in event.blocks:
                cell = self.cells[block.hash] = heapq.heappop(self.free)
                self.told[cell] = [IN_USE, -1 if parent is None else self.cells[parent], 1]
                self.changed.add(cell)
                parent = block.hash
        elif isinstance(event, Updated) and event.what == "in_use":
            for cell in map(self.cells.__getitem__, event.hashes):
                self.told[cell][0] = IN_USE if event.new else KEPT
                self.told[cell][2] += event.new
                self.changed.add(cell)
        elif isinstance(event, Removed):
            for cell in map(self.cells.pop, event.hashes):
                heapq.heappush(self.free, cell)
                del self.told[cell]
                self.changed.add(cell)

    def news(self) -> dict[str, Any]:
        """Since the last time."""
        changed = [[cell, *self.told.get(cell, (0, -1, 0))] for cell in sorted(self.changed)]
        found = {"reset": self.reset, "total": self.total, "block_size": self.size, "changed": changed}
        self.changed, self.reset = set(), False
        return found


def request_row(ticket: Ticket, now: float) -> dict[str, Any]:
    return {
        "id": ticket.id,
        "path": ticket.path,
        "stream": ticket.follow,
        "prompt": ticket.prompt,
        "cached": ticket.cached,
        "answers": len(ticket.numbers) * ticket.samples,
        "tokens": sum(ticket.lengths.values()),
        "age": round(now - ticket.started, 3),
        "first_token": ticket.first_token,
    }


def requests_of(link: EngineLink) -> dict[str, Any]:
    """Requests of clients; those of the server itself have no path."""
    now = time.monotonic()
    open_ = sorted({ticket for ticket in link.tickets.values() if ticket.path}, key=lambda ticket: ticket.started)
    return {"open": len(open_), "shown": [request_row(ticket, now) for ticket in open_[:SHOWN]]}


def seen(state: ServerState, blocks: BlockMap) -> dict[str, Any]:
    metrics, link = state.metrics, state.link
    histograms = {name.removeprefix("vllm:"): found for name, found in metrics.histograms()}
    return {
        "time": time.time(),
        "model": state.options.names[0],
        "max_num_seqs": 0 if link.model is None else link.model.max_num_seqs,
        "up": round(time.monotonic() - state.started, 1),
        "status": state.health()[1],
        "load": asdict(link.load),
        "requests": requests_of(link),
        "prompt_tokens": metrics.prompt_tokens,
        "generation_tokens": metrics.generation_tokens,
        "finished": metrics.finished,
        "refused": metrics.refused,
        "restarts": metrics.restarts,
        "slow_clients": metrics.slow_clients,
        "histograms": {
            name: {"bounds": one.bounds, "counts": one.counts, "sum": one.total} for name, one in histograms.items()
        },
        "blocks": blocks.news(),
    }


async def dashboard_stream(state: ServerState, reader: EventReader) -> AsyncGenerator[bytes]:
    feed, blocks = state.link.cache, BlockMap()
    feed.follow(reader)
    try:
        while True:
            for event in reader.take():
                blocks.apply(event)
            yield answers.event(seen(state, blocks))
            await asyncio.sleep(EVERY)
    finally:
        feed.leave(reader)
