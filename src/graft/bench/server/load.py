"""A server under load: clients that send their next request when the last is answered (closed loop), or requests that
arrive at a rate, whatever became of those before (open loop). Any server with OpenAI's API.

A request's time begins when it was due, in an open loop too where the machine could not send it in time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace

from graft.base.files import Progress
from graft.bench.loads.spread import Load, Spread, behind_text
from graft.bench.server.http_client import HttpConnection, HttpTarget
from graft.bench.server.request import RequestOutcome, ServerPlan, ask, prompts


@dataclass(frozen=True)
class ServerRow:
    """What one load took. Throughput counts requests that were answered whole. errors: how often each came."""

    load: Load
    clients: int | None
    seconds: float
    answered: int
    output_tokens_per_s: float
    requests_per_s: float
    prompt_tokens: float | None  # of a request, on average; None where the server counts none
    output_tokens: float
    first_token: Spread | None
    between_tokens: Spread | None
    per_output_token: Spread | None
    whole: Spread | None
    errors: Mapping[str, int]
    behind: str = ""
    resent: int = 0  # requests on kept connections that the server had closed

    @property
    def name(self) -> str:
        return f"{self.load.rate:g}/s" if self.clients is None else str(self.clients)


async def measure_server(target: HttpTarget, plan: ServerPlan, words: int, progress: Progress) -> ServerRow:
    load, began = plan.load, time.perf_counter()
    texts = prompts(words, f"{load.name} {load.requests} {plan.clients} {load.rate}")
    outcomes: list[RequestOutcome] = []
    free: list[HttpConnection] = []

    async def one(due: float) -> None:
        connection = free.pop() if free else HttpConnection(target)
        outcome = RequestOutcome(due)
        await ask(connection, plan, plan.body(next(texts), load.osl), outcome, began)
        free.append(connection)
        outcomes.append(outcome)
        progress(f"{plan.clients or load.rate}: requests", len(outcomes), load.requests)

    try:
        await (open_loop(load, one, began) if plan.clients is None else closed_loop(load, plan.clients, one, began))
    finally:
        for connection in free:
            connection.close()
    row = row_of_server(plan, outcomes, time.perf_counter() - began)
    return replace(row, resent=sum(connection.resent for connection in free))


async def closed_loop(
    load: Load, clients: int, one: Callable[[float], Coroutine[None, None, None]], began: float
) -> None:
    left = iter(range(load.requests))

    async def client() -> None:
        for _ in left:
            await one(time.perf_counter() - began)

    await asyncio.gather(*(client() for _ in range(min(clients, load.requests))))


async def open_loop(load: Load, one: Callable[[float], Coroutine[None, None, None]], began: float) -> None:
    async with asyncio.TaskGroup() as group:
        for due in load.arrivals():
            await asyncio.sleep(due - (time.perf_counter() - began))
            group.create_task(one(due))


def row_of_server(plan: ServerPlan, outcomes: list[RequestOutcome], seconds: float) -> ServerRow:
    whole = [one for one in outcomes if one.error is None]
    counted = [one.prompt for one in whole if one.prompt is not None]
    tokens, reached = sum(one.tokens for one in whole), len(whole) / seconds
    spoke = [one for one in whole if one.events]
    pairs = [pair for one in spoke for pair in zip(one.events, one.events[1:], strict=False)]
    return ServerRow(
        plan.load,
        plan.clients,
        seconds,
        len(whole),
        tokens / seconds,
        reached,
        sum(counted) / len(counted) if counted else None,
        tokens / max(len(whole), 1),
        Spread.of([one.events[0] - one.due for one in spoke]),
        Spread.of([later - earlier for earlier, later in pairs]),
        Spread.of([(one.events[-1] - one.events[0]) / (one.tokens - 1) for one in spoke if one.tokens > 1]),
        Spread.of([one.end - one.due for one in whole]),
        dict(Counter(one.error for one in outcomes if one.error is not None)),
        behind_text(plan.load.rate, [one.end for one in whole]) if len(whole) == len(outcomes) else "",
    )
