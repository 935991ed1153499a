"""Whether the cache will hold all that run until they end, if one more is let in.

A request that is let in because its prompt fits takes a block every few steps from then on. Where many do, memory
runs out, the last are sent away and computed again: of all tokens of a load of 2048/2048, 1,024 at once over a cache
of 1.85 million, 37 % more. What is needed at most can be told instead. Let the requests need r1 >= r2 >= ... tokens
more; just before the i-th ends, the first i are still there, each r_i tokens longer:

    peak = max over i of  sum of lengths of the first i  +  i * r_i        (in blocks, less those that are shared)

How many tokens a request still brings is known where nothing but max_tokens can end it. Of others it is taken from
those that ended lately. A forecast that was too low costs what it always did: the last gives way.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

from graft.engine.core import Request
from graft.engine.kv.manager import BlockManager, Table

REMEMBERED = 256  # requests that ended
FIRST = 512  # tokens that one brings before any has ended

Need = tuple[int, int]  # of a request: its tokens, and those still to come


def may_stop(request: Request) -> bool:
    """Whether anything but max_tokens can end it."""
    params = request.params
    return not params.ignore_eos or bool(params.stop or params.stop_token_ids)


def to_come(request: Request) -> int:
    """Samples of n > 1 that begin when its prompt is in the cache."""
    return request.params.n - 1 if request.leader is None and request.length == len(request.prompt) else 0


class OutputLengths:
    """Of the requests that ended lately, and what is to be expected of others."""

    def __init__(self) -> None:
        self.latest: deque[int] = deque()
        self.ordered: list[int] = []

    def record(self, tokens: int) -> None:
        if len(self.latest) == REMEMBERED:
            self.ordered.pop(bisect_right(self.ordered, self.latest.popleft()) - 1)
        self.latest.append(tokens)
        insort(self.ordered, tokens)

    def remaining(self, request: Request) -> int:
        """Tokens that it will still bring: as many as those that came further than it did brought in the middle. One
        that has come further than all of them is taken to be half way."""
        done = request.length - len(request.prompt)
        left = max(request.params.max_tokens - done, 0)
        if not may_stop(request):
            return left
        after = bisect_right(self.ordered, done)
        if after < len(self.ordered):
            return min(left, self.ordered[(after + len(self.ordered)) // 2] - done)
        return min(left, done if self.ordered else max(FIRST - done, done))


def peak_blocks(needs: Iterable[Need], block_size: int) -> int:
    """The most blocks that the requests hold at a time, were none shared."""
    most = lengths = 0
    for count, (length, remaining) in enumerate(sorted(needs, key=lambda need: -need[1]), 1):
        lengths += length
        most = max(most, -(-(lengths + count * remaining) // block_size) + count)  # a last block is never quite full
    return most


class Forecast:
    """`holds` is asked for every request that would be let in. Where the cache holds everybody at their utmost that
    is a comparison; else what it found out of the others is kept until `forget`."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.lengths = OutputLengths()
        self.utmost: dict[Request, int] = {}  # blocks of all that run, were each to come to max_tokens
        self.total = 0  # of these
        self.known: list[Need] | None = None

    def entered(self, request: Request) -> None:
        """Those of a sibling no longer count with the first of the samples."""
        leader = request.leader
        if leader is not None and leader in self.utmost:
            self.count(leader, self.manager.blocks_for(leader.most_tokens))
        self.count(request, self.most_blocks(request))

    def count(self, request: Request, blocks: int) -> None:
        self.total += blocks - self.utmost.get(request, 0)
        self.utmost[request] = blocks

    def left(self, request: Request) -> None:
        self.total -= self.utmost.pop(request)
        self.forget()

    def forget(self) -> None:
        self.known = None

    def holds(self, running: Sequence[Request], request: Request, table: Table) -> bool:
        """Whether `request`, with what `table` found in the cache, can be let in beside `running`, all before it."""
        blocks = self.manager.blocks
        if not running or self.total + self.most_blocks(request) <= blocks:
            self.forget()
            return True
        if self.known is None:
            self.known = [need for other in running for need in self.needs(other)]
        mine = self.needs(request)
        held = sum(len(each.blocks) for other in running if (each := other.table) is not None) + len(table.blocks)
        shared = max(held - (blocks - self.manager.available), 0)
        if peak_blocks([*self.known, *mine], self.manager.block_size) - shared > blocks:
            return False
        self.known += mine
        return True

    def needs(self, request: Request) -> list[Need]:
        """Of the request, and of siblings that wait for its prompt, which they will share."""
        remaining = self.lengths.remaining(request)
        return [(request.length, remaining), *((0, remaining) for _ in range(to_come(request)))]

    def most_blocks(self, request: Request) -> int:
        """With those of its siblings. Not one to spare: of 840 requests that fill the cache six would wait for all
        others to end, and then take 2,048 steps alone."""
        return self.manager.blocks_for(request.most_tokens) * (1 + to_come(request))
