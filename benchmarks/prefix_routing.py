"""Prefix-aware routing against random routing: tokens of prompts that were found in a cache.

    python -m benchmarks.prefix_routing        # the table of docs/scale.md

The caches are the engine's own block managers, whose events feed the router's index; no model runs. The trace has 20
system prompts, each chosen with the same chance, and a question of its own behind it. Events arrive late: the router
sees those of a request only after `late` more have been sent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graft.deploy.policy import PrefixIndex, RoutePolicy
from graft.engine.kv.events import EventQueue
from graft.engine.kv.manager import BlockManager, Table

BLOCK, SHARED_HEAD, SYSTEM, QUESTION, ANSWER = 16, 24, 512, 64, 32  # tokens
PROMPTS = 20


@dataclass(eq=False)
class SimulatedReplica:
    """A cache, and requests that are open in it: at most `most`; then the eldest ends."""

    blocks: int
    most: int = 4
    queue: EventQueue = field(default_factory=EventQueue)
    open: list[Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = BlockManager(self.blocks, BLOCK, fingerprint="trace", events=self.queue)

    def take(self, tokens: Sequence[int], answer: Sequence[int]) -> None:
        while len(self.open) >= self.most:
            self.manager.close(self.open.pop(0))
        table, whole = self.manager.open(tokens), [*tokens, *answer]
        while self.manager.grow(table, len(whole)) is None:
            self.manager.close(self.open.pop(0))
        self.manager.commit(table, whole, len(whole))
        self.open.append(table)


def trace(requests: int, seed: int = 0) -> list[list[int]]:
    """Prompts as tokens. All begin with the same few tokens, as a chat template has them."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(32_000) for _ in range(count)]

    head = tokens(SHARED_HEAD)
    systems = [head + tokens(SYSTEM) for _ in range(PROMPTS)]
    return [draw.choice(systems) + tokens(QUESTION) for _ in range(requests)]


@dataclass(frozen=True)
class RoutedTrace:
    hit_rate: float  # of prompt tokens
    busiest: float  # requests of the busiest replica, over the mean
    seconds: float  # of the processor for one decision, the mean


Route = Callable[[PrefixIndex, Sequence[int], dict[str, int], random.Random], str]


def at_random(_: PrefixIndex, __: Sequence[int], load: dict[str, int], draw: random.Random) -> str:
    return draw.choice(sorted(load))


def by_prefix(index: PrefixIndex, tokens: Sequence[int], load: dict[str, int], _: random.Random) -> str:
    return index.choose(tokens, load, RoutePolicy()).replica


def run_trace(
    route: Route, *, replicas: int, cached_prompts: float, requests: int = 1000, late: int = 4
) -> RoutedTrace:
    """cached_prompts: system prompts that one replica's cache has room for, beside the requests that are open."""
    prompts, draw, index = trace(requests), random.Random(1), PrefixIndex()
    each = -(-(SHARED_HEAD + SYSTEM + QUESTION + ANSWER) // BLOCK)
    made = {f"r{i}": SimulatedReplica(int(each * (cached_prompts + 4))) for i in range(replicas)}
    sent, spent = dict.fromkeys(made, 0), 0.0
    for number, tokens in enumerate(prompts):
        load = {name: len(one.open) for name, one in made.items()}
        began = time.thread_time()
        chosen = route(index, tokens, load, draw)
        spent += time.thread_time() - began
        sent[chosen] += 1
        made[chosen].take(tokens, [draw.randrange(32_000) for _ in range(ANSWER)])
        if number % late == late - 1:
            for name, one in made.items():
                for event in one.queue.drain():
                    index.apply(name, event)
    stats = [one.manager.stats() for one in made.values()]
    rate = sum(one.reused_tokens for one in stats) / sum(one.asked_tokens for one in stats)
    return RoutedTrace(rate, max(sent.values()) * replicas / requests, spent / requests)


def main() -> None:
    print("| replicas | prompts that a cache holds | random | by prefix | ratio | busiest | µs a decision |")
    print("|---|---|---|---|---|---|---|")
    for replicas, room in ((2, 5), (2, 10), (4, 3), (4, 6), (4, 20), (8, 3), (8, 20)):
        base = run_trace(at_random, replicas=replicas, cached_prompts=room)
        found = run_trace(by_prefix, replicas=replicas, cached_prompts=room)
        print(
            f"| {replicas} | {room} of {PROMPTS} | {base.hit_rate:.1%} | {found.hit_rate:.1%} |"
            f" {found.hit_rate / base.hit_rate:.2f} × | {found.busiest:.2f} × the mean | {found.seconds * 1e6:.0f} |"
        )


if __name__ == "__main__":
    main()
