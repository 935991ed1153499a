"""The HTTP process's end of the socket: starts the engine process, hands requests over, and hands out what comes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from graft.base.errors import EngineGone, GraftError, Overloaded, QueueTimeout
from graft.engine.kv.events import from_json
from graft.engine.params import SamplingParams
from graft.serve.cache_events import CacheFeed
from graft.serve.metrics import Metrics
from graft.serve.options import ServeOptions
from graft.serve.protocol.scheduling import check_priority
from graft.serve.wire import LENGTH, AnswerRow, EngineLoad, Message, ServedModel, frame, submission

WORKER = "graft.serve.worker"
# libraries neither ask the network nor draw bars of their own
QUIET = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip
PATIENCE = 5.0  # seconds that an engine process has to end by itself


@dataclass(eq=False)
class Ticket:
    """What one HTTP request waits for: the answers to its prompts. follow: it wants every token, not only the end."""

    numbers: dict[int, int]  # of the engine's requests -> index of the prompt
    samples: int  # of each prompt
    follow: bool
    prompt: int = 0  # tokens of all prompts
    id: str = ""  # of the HTTP request, with its path
    path: str = ""
    cached: int = 0  # tokens of prompts that were found in the cache
    started: float = field(default_factory=time.monotonic)
    rows: list[tuple[int, AnswerRow]] = field(default_factory=list)  # (index of the prompt, row), not yet read
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    error: GraftError | None = None
    timer: asyncio.TimerHandle | None = None  # runs until its first token
    expired: bool = False  # the timer has run out
    left: int = 0  # answers that have not ended
    last: dict[tuple[int, int], float] = field(default_factory=dict)  # when an answer's newest tokens came
    first_token: float | None = None  # seconds
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = len(self.numbers) * self.samples

    async def read(self) -> list[tuple[int, AnswerRow]]:
        """All that has come since; waits for the bell. Raises what ended the engine."""
        await self.bell.wait()
        self.bell.clear()
        if self.error is not None:
            raise self.error
        rows, self.rows = self.rows, []
        return rows


class EngineLink:
    """One engine process. `model` is there once it has loaded; `gone` says why it takes no requests."""

    def __init__(self, options: ServeOptions, metrics: Metrics, tell: Callable[..., None]) -> None:
        self.options, self.metrics, self.tell = options, metrics, tell
        self.begin()
        self.load = EngineLoad()
        self.stepped = time.monotonic()  # when it was last seen to make a step, or to have nothing to do
        self.tickets: dict[int, Ticket] = {}  # by the engine's request
        self.numbers = itertools.count(1)
        self.cache = CacheFeed(self.ask_events)
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None

    @property
    def open(self) -> int:
        """Answers that have not ended."""
        return sum(ticket.left for ticket in {id(ticket): ticket for ticket in self.tickets.values()}.values())

    def begin(self) -> None:
        """A process is started: of the one before, if there was one, nothing holds. It is loading, not dead."""
        self.model: ServedModel | None = None
        self.gone: str | None = "the model is being loaded"
        self.failed: tuple[str, int] | None = None  # why it could not load, and the exit code
        self.loading = True  # until it is ready, or has ended

    async def run(self, ready: Callable[[], None]) -> str:
        """Starts a process and serves it until it ends; how it ended. ready: called when it has loaded."""
        self.begin()
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", WORKER, str(theirs.fileno()))
        with theirs:
            self.process = process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=2,
                start_new_session=True,  # Ctrl-C is for the HTTP process
                env={**QUIET, **os.environ},
            )  # fmt: skip
        try:
            await self.converse(ours, ready)
        finally:
            how = ended(await self.end(process))
            self.loading = False
        self.gone = f"the engine process {how}"
        self.drop_all(EngineGone(f"{self.gone}; the answer is lost"))
        return how

    async def converse(self, connection: socket.socket, ready: Callable[[], None]) -> None:
        """Until the other side is gone."""
        reader, self.writer = await asyncio.open_connection(sock=connection)
        self.send({"load": asdict(self.options.load)})
        while True:
            try:
                head = await reader.readexactly(LENGTH.size)
                body = await reader.readexactly(LENGTH.unpack(head)[0])
            except (asyncio.IncompleteReadError, OSError):
                return
            self.take(json.loads(body), ready)

    @property
    def connected(self) -> bool:
        """A process that was killed closes its connection a moment before its end is known; loops differ in what a
        write does then (uvloop raises RuntimeError)."""
        return self.gone is None and self.writer is not None and not self.writer.is_closing()

    @property
    def why_gone(self) -> str:
        return self.gone or "the engine process ended"

    def send(self, message: Message) -> None:
        assert self.writer is not None
        self.writer.write(frame(message))

    def take(self, message: Message, ready: Callable[[], None]) -> None:
        if "load" in message:
            self.note_load(EngineLoad(**message["load"]))
        now = time.monotonic()
        for given in message.get("rows", ()):
            self.deliver(AnswerRow.parse(given), now)
        if "events" in message:
            self.cache.take(message["of"], [from_json(one) for one in message["events"]])
        for word in ("progress", "note"):
            if word in message:
                self.tell(word, what=message[word])
        if "failed" in message:
            self.failed = message["failed"], message["exit"]
        if "ready" in message:
            self.model, self.gone, self.stepped = ServedModel(**message["ready"]), None, now
            self.loading = False
            ready()

    def note_load(self, load: EngineLoad) -> None:
        if load.steps != self.load.steps or not load.running + load.waiting:
            self.stepped = time.monotonic()
        self.load = load

    def submit(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, follow: bool, priority: int = 0
    ) -> Ticket:
        """All before the same step. Refuses where too many wait."""
        check_priority(priority, self.options.scheduling_policy)
        if not self.connected or self.model is None:
            raise EngineGone(f"{self.why_gone}; try again later")
        samples = params[0].n
        asked, most = len(prompts) * samples, self.model.max_num_seqs + self.options.max_queued_requests
        if self.open + asked > most:
            raise Overloaded(asked, self.open, most)
        numbers = {next(self.numbers): index for index in range(len(prompts))}
        ticket = Ticket(numbers, samples, follow, sum(map(len, prompts)))
        self.tickets |= dict.fromkeys(ticket.numbers, ticket)
        self.send(submission(ticket.numbers, prompts, params, priority))
        if self.options.max_queue_time:
            later = asyncio.get_running_loop().call_later
            ticket.timer = later(self.options.max_queue_time, self.expire, ticket)
        for ids in prompts:
            self.metrics.prompt_length.observe(len(ids))
            self.metrics.prompt_tokens += len(ids)
        return ticket

    def expire(self, ticket: Ticket) -> None:
        """Whether a request has been begun, the engine knows: it aborts those that have not."""
        if self.connected:
            ticket.expired = True
            self.send({"expire": list(ticket.numbers)})

    def deliver(self, row: AnswerRow, now: float) -> None:
        ticket = self.tickets.get(row.id)
        if ticket is None:
            return  # aborted meanwhile
        if row.finish_reason == "abort" and ticket.expired:
            ticket.error = QueueTimeout(self.options.max_queue_time)
            ticket.bell.set()
            return
        answer, known = (row.id, row.sample), self.metrics
        if row.tokens:
            if not row.sample and answer not in ticket.last:
                ticket.cached += row.cached
            if (before := ticket.last.get(answer)) is not None:
                known.between_tokens.observe((now - before) / len(row.tokens), len(row.tokens))
            elif ticket.first_token is None:
                ticket.first_token = now - ticket.started
                known.first_token.observe(ticket.first_token)
                if ticket.timer is not None:
                    ticket.timer.cancel()
            ticket.last[answer] = now
            ticket.lengths[answer] = ticket.lengths.get(answer, 0) + len(row.tokens)
            known.generation_tokens += len(row.tokens)
        ticket.rows.append((ticket.numbers[row.id], row))
        if row.finish_reason is not None:
            self.count_end(ticket, row, now)
        if ticket.follow or not ticket.left or row.finish_reason == "error":
            ticket.bell.set()

    def count_end(self, ticket: Ticket, row: AnswerRow, now: float) -> None:
        known, length = self.metrics, ticket.lengths.get((row.id, row.sample), 0)
        known.finish(row.finish_reason or "")
        known.answer_length.observe(length)
        whole, first = now - ticket.started, ticket.first_token
        known.whole.observe(whole)
        if first is not None:
            for histogram, value in (
                (known.queued, row.queued), (known.prefill, first - row.queued), (known.decode, whole - first),
                (known.inference, whole - row.queued),
            ):  # fmt: skip
                histogram.observe(max(value, 0.0))
        if length > 1 and ticket.first_token is not None:
            known.per_token.observe((now - ticket.started - ticket.first_token) / (length - 1))
        ticket.left -= 1
        if not ticket.left:
            self.forget(ticket)

    def forget(self, ticket: Ticket) -> None:
        if ticket.timer is not None:
            ticket.timer.cancel()
        for number in ticket.numbers:
            self.tickets.pop(number, None)

    def close(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: what of it has not ended is aborted, after the engine's present step."""
        numbers = [number for number in ticket.numbers if number in self.tickets]
        self.forget(ticket)
        if numbers and ticket.left:
            for _ in range(ticket.left):
                self.metrics.finish("abort")
            if self.connected:
                self.send({"abort": numbers})

    def ask_events(self, number: int | None) -> None:
        """For CacheFeed."""
        if self.connected:
            self.send({"follow_events": number})
        elif number is not None:
            raise EngineGone(f"{self.why_gone}; try again later")

    def drop_all(self, error: GraftError) -> None:
        """Every open request ends with the error."""
        self.cache.fail(error)
        for ticket in set(self.tickets.values()):
            ticket.error = error
            ticket.bell.set()
            for _ in range(ticket.left):
                self.metrics.finish("error")
            self.forget(ticket)
        self.load = EngineLoad()

    def abort_all(self, error: GraftError) -> None:
        for ticket in set(self.tickets.values()):
            ticket.error = error
            ticket.bell.set()

    async def stop(self) -> None:
        """Closes the socket, by which the process ends; kills it where it does not."""
        self.gone = "the server is shutting down"
        if self.writer is not None:
            self.writer.close()
        if self.process is not None:
            if self.model is None and self.process.returncode is None:
                self.process.kill()  # while it loads it reads nothing
            await self.end(self.process)

    async def end(self, process: asyncio.subprocess.Process) -> int:
        try:
            return await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()
            return await process.wait()


def ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
