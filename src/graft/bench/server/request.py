"""One request to a server with OpenAI's API, and what became of it: when each piece of its stream came.

Prompts are random words, no two alike; how many words make the tokens asked for is found out from what the server
counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.base.errors import ServerFailed
from graft.bench.loads.spread import Load
from graft.bench.server.http_client import HttpConnection, HttpFailed, HttpTarget

ENDPOINTS = {"completions": "/completions", "chat": "/chat/completions"}
# short words, which most vocabularies have as one token each
WORDS = str.split(
    "the of and to in is was he for it with as his on be at by had not are but from or have an they which one you"
    " were all her she there would their we him been has when who will no more if out so up said what its about than"
    " into them can only other time new some could these two may first then do any like my now over such our man me"
    " even most made after also did many off before must well back through years much where your way down should"
)
PROBES = (8, 4)  # of so many tokens that are asked for, a word is sent to learn what words come to
FAILURES = (HttpFailed, OSError, asyncio.IncompleteReadError, TimeoutError, ValueError)


@dataclass(frozen=True)
class ServerPlan:
    """What is sent. endpoint: of ENDPOINTS. extra: fields over those that we send; null takes one away."""

    model: str
    endpoint: str
    load: Load
    clients: int | None = None  # closed loop; None: open
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0  # seconds of one request

    def body(self, prompt: str, new: int) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}
        made = {
            "model": self.model, **asked, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **self.extra,
        }  # fmt: skip
        return {name: value for name, value in made.items() if value is not None}


@dataclass
class RequestOutcome:
    """What became of a request. Times in seconds after the beginning; tokens as the server counted them, or the
    events with text where it counts none."""

    due: float
    events: list[float] = field(default_factory=list)  # when those with text came
    end: float = 0.0
    prompt: int | None = None
    new: int | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        return len(self.events) if self.new is None else self.new


async def first_model(target: HttpTarget, timeout: float = 30.0) -> str:
    """What the server calls its model."""
    connection = HttpConnection(target)
    try:
        async with asyncio.timeout(timeout):
            status, headers = await connection.send("GET", "/models")
            told = await connection.body(headers)
        if status != 200:
            raise ServerFailed(target.name, f"GET {target.base}/models: {refusal(status, told)}")
        return json.loads(told)["data"][0]["id"]
    except FAILURES as error:
        raise ServerFailed(target.name, reason(error)) from error
    except (LookupError, TypeError) as error:
        raise ServerFailed(target.name, f"GET {target.base}/models names no model; give its name") from error
    finally:
        connection.close()


async def words_for(target: HttpTarget, plan: ServerPlan) -> int:
    """How many words a prompt of `isl` tokens has, by two short requests, which warm the server up as well. A chat
    template adds a constant; a server that counts no tokens is taken to have one a word."""
    found: list[int] = []
    sizes = [max(index, plan.load.isl // part) for index, part in enumerate(PROBES, 1)]
    for words in sizes:
        outcome = RequestOutcome(0.0)
        connection = HttpConnection(target)
        prompt = next(prompts(words, f"probe {words}"))
        await ask(connection, plan, plan.body(prompt, 2), outcome, time.perf_counter())
        connection.close()
        if outcome.error is not None:
            raise ServerFailed(target.name, f"a first request failed: {outcome.error}")
        if outcome.prompt is None:
            return plan.load.isl
        found.append(outcome.prompt)
    each = max((found[1] - found[0]) / (sizes[1] - sizes[0]), 1e-3)
    return max(1, round((plan.load.isl - found[0]) / each) + sizes[0])


def prompts(words: int, seed: str) -> Iterator[str]:
    source = random.Random(seed)
    while True:
        yield " ".join(source.choice(WORDS) for _ in range(words))


async def ask(
    connection: HttpConnection, plan: ServerPlan, body: Mapping[str, Any], outcome: RequestOutcome, began: float
) -> None:
    """One request; whatever goes wrong is in its outcome."""
    try:
        async with asyncio.timeout(plan.timeout):
            status, headers = await connection.send("POST", ENDPOINTS[plan.endpoint], body)
            if status != 200:
                outcome.error = refusal(status, await connection.body(headers))
            else:
                await read_events(connection, headers, outcome, began)
    except FAILURES as error:
        outcome.error = reason(error)
    finally:
        outcome.end = time.perf_counter() - began
        if outcome.error is not None:
            connection.close()


async def read_events(
    connection: HttpConnection, headers: Mapping[str, str], outcome: RequestOutcome, began: float
) -> None:
    done = False
    async for line in connection.lines(headers):
        if not line.startswith(b"data:"):
            continue
        if (data := line[5:].strip()) == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if not isinstance(event, dict):
            raise HttpFailed(f"an event is no JSON object: {data[:40].decode(errors='replace')}")
        if event.get("error") is not None:
            raise HttpFailed(f"error in the stream: {message_of(event)}")
        if any(text_of(choice) for choice in event.get("choices") or ()):
            outcome.events.append(time.perf_counter() - began)
        if usage := event.get("usage"):
            outcome.prompt, outcome.new = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not done:
        raise HttpFailed("the stream ended without [DONE]")


def text_of(choice: Mapping[str, Any]) -> Any:
    """Of an event; reasoning and tool calls are text, too."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


def message_of(body: Any) -> str:
    found = body.get("error", body) if isinstance(body, Mapping) else body
    return str(found.get("message", found) if isinstance(found, Mapping) else found)[:200]


def refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {message_of(json.loads(body))}"
    except ValueError:
        return f"HTTP {status}"


def reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, asyncio.IncompleteReadError):
        return "the answer was cut off"
    if isinstance(error, json.JSONDecodeError):
        return f"an event is no JSON: {error}"
    return str(error) or type(error).__name__
