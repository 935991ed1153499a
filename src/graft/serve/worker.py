"""The engine process: an LLM, its driver thread, one thread that reads what is asked and one that sends what came.

`python -m graft.serve.worker FD`: FD is its end of a socket pair. When the other end is closed, however the HTTP
process ended, it ends. What the driver's steps give is sent by a thread of its own, all that has come since the last
frame together, so that a step never waits for a socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from graft.base.errors import GraftError, UsageError
from graft.base.progress import phase_of
from graft.engine.artifact.request import EngineRequest, Starter
from graft.engine.core import Request
from graft.engine.kv.events import Event
from graft.engine.kv.subscription import EventSubscription
from graft.engine.llm import LLM, engine_options
from graft.engine.params import SamplingParams
from graft.engine.start import start_engine
from graft.engine.watch import Watch
from graft.serve.logs import print_traceback
from graft.serve.options import ModelOptions
from graft.serve.probes import served_model
from graft.serve.wire import AnswerRow, EngineLoad, Message, TokenLogprobs, as_base64, frame, messages

HEARTBEAT = 1.0  # seconds after which an idle engine says that it is there
# seconds until the driver's thread gives way to the one that sends what it made: Python's own 5 ms took 10 ms of the
# time to the first token
SWITCH = 0.0005
BROKEN = 3  # exit status after a step that left the engine unfit, or the loss of a sending thread


class Outbox:
    """What is to be sent. A request that has news is in it once, however many tokens it got since."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.news: SimpleQueue[SentRequest] = SimpleQueue()
        self.lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self.lock:
            self.connection.sendall(frame(message))

    def due(self) -> list[SentRequest]:
        """Those with news; waits for the first of them."""
        found = []
        try:
            found.append(self.news.get(timeout=HEARTBEAT))
            while True:
                found.append(self.news.get_nowait())
        except Empty:
            return found


class SentRequest(Watch):
    """A request and how much of it was sent. The driver rings; the sender reads."""

    def __init__(self, number: int, request: Request, outbox: Outbox) -> None:
        super().__init__([request], each_token=True)
        self.number, self.request, self.outbox = number, request, outbox
        self.sent: dict[int, int] = {}  # tokens of each sample
        self.over: set[int] = set()  # samples whose end was told

    def ring(self) -> None:
        self.outbox.news.put(self)

    def rows(self) -> list[AnswerRow]:
        self.told = False  # before looking: what changes from here on rings again
        family = enumerate(self.request.family)
        found = [self.row(index, one) for index, one in family if index not in self.over]
        return [row for row in found if row.tokens or row.finish_reason]

    def row(self, index: int, one: Request) -> AnswerRow:
        with one.lock:
            start, sent = len(one.prompt), self.sent.get(index, 0)
            tokens, reason, given = one.tokens[start + sent :], one.finish_reason, one.logprobs[sent:]
        self.sent[index] = sent + len(tokens)
        if reason is not None:
            self.over.add(index)
        likely = None
        if (count := one.params.logprobs) is not None:
            likely = [
                TokenLogprobs(each[token].logprob, [(t, p.logprob) for t, p in each.items()][:count])
                for token, each in zip(tokens, given, strict=True)
            ]
        error = None if one.error is None else str(one.error)
        prompt = self.prompt_logprobs() if not index and not sent and tokens else None
        vector = None if one.embedding is None else as_base64(one.embedding)
        return AnswerRow(
            self.number,
            index,
            tokens,
            likely,
            reason,
            one.stop_reason,
            one.cached or 0,
            error,
            prompt,
            round((one.leader or one).queued, 6),
            vector,
        )

    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        asked, count = self.request, self.request.params.prompt_logprobs
        if count is None:
            return None
        pairs = zip(asked.prompt[1:], asked.prompt_logprobs, strict=True)
        return [
            TokenLogprobs(each[token].logprob, [(t, p.logprob) for t, p in each.items()][:count], each[token].rank)
            for token, each in pairs
        ]


@contextmanager
def vital() -> Iterator[None]:
    """The process ends with whatever ends this: without its senders it would take requests that nobody answers."""
    try:
        yield
    except OSError:
        os._exit(0)  # the HTTP process is gone
    except Exception:  # noqa: BLE001  a defect: told, and the HTTP process sees the end
        print_traceback()
        os._exit(BROKEN)


class Worker:
    def __init__(self, llm: LLM, outbox: Outbox) -> None:
        self.llm, self.outbox = llm, outbox
        self.open: dict[int, SentRequest] = {}
        self.lock = threading.Lock()
        self.compiler = ThreadPoolExecutor(1, "graft-grammars")
        self.compiling: set[int] = set()  # requests whose grammar is not compiled yet
        self.dropped: set[int] = set()  # of those: nobody waits for them any more
        self.preemptions = 0
        self.events: EventSubscription | None = None  # while somebody reads them
        if (queue := llm.engine.manager.events) is not None:
            queue.forgo()  # readers have subscriptions; a backlog of 65,536 blocks is tens of MB of tokens

    def take(self, message: Message) -> None:
        """In the reading thread."""
        given = [try_params(one) for one in message.get("params", ())]
        for asked in message.get("submit", ()):
            params = given[asked["params"]]
            if isinstance(params, GraftError):
                self.refuse(asked["id"], str(params))
            elif params.grammar is None:
                self.enter(asked, params)
            else:
                self.compiling.add(asked["id"])
                self.compiler.submit(self.compile, asked, params)
        if "follow_events" in message:
            self.follow_events(message["follow_events"])
        self.abort(message.get("abort", ()), message.get("expire", ()))

    def enter(self, asked: Message, params: SamplingParams) -> None:
        try:
            if self.llm.engine.pooling is not None:
                request = self.llm.embedding_request(asked["prompt"], asked.get("priority", 0))
            else:
                request = self.llm.request(asked["prompt"], params, asked.get("priority", 0))
        except GraftError as error:
            self.refuse(asked["id"], str(error))
            return
        except Exception as error:  # noqa: BLE001  a defect, but of one request: the others go on
            print_traceback()
            self.refuse(asked["id"], f"{type(error).__name__}: {error}")
            return
        sent = SentRequest(asked["id"], request, self.outbox)
        with self.lock:
            self.compiling.discard(sent.number)
            if sent.number in self.dropped:
                self.dropped.remove(sent.number)
                return
            self.open[sent.number] = sent
        self.llm.driver.enter([request], sent)

    def compile(self, asked: Message, params: SamplingParams) -> None:
        """In a thread of its own: a schema may take half a second, in which others go on."""
        with vital():
            self.enter(asked, params)
            with self.lock:  # of one that was refused
                self.compiling.discard(asked["id"])
                self.dropped.discard(asked["id"])

    def abort(self, numbers: Sequence[int], expired: Sequence[int]) -> None:
        """expired: only if they have not begun."""
        with self.lock:
            unmade = self.compiling & {*numbers, *expired}
            self.dropped |= unmade
        late = [AnswerRow(one, 0, [], None, "abort", None, 0, None) for one in expired if one in unmade]
        if late:
            self.outbox.send({"rows": late})
        found = [self.open.get(number) for number in numbers]
        waiting = [self.open.get(number) for number in expired]
        found += [sent for sent in waiting if sent is not None and sent.request.cached is None]  # never admitted
        self.llm.abort(*(sent.request for sent in found if sent is not None))

    def refuse(self, number: int, why: str) -> None:
        self.outbox.send({"rows": [AnswerRow(number, 0, [], None, "error", None, 0, why)]})

    def follow_events(self, number: int | None) -> None:
        """From the present state on; number: marks what belongs to it. Nobody's events cost nothing."""
        if self.events is not None:
            self.events.close()
            self.events = None
        if number is not None and self.llm.engine.manager.events is not None:
            self.events = self.llm.on_kv_cache_events(partial(self.send_events, number))

    def send_events(self, number: int, events: Sequence[Event]) -> None:
        with vital():
            self.outbox.send({"events": [event.to_json() for event in events], "of": number})

    def send_forever(self) -> None:
        """In the sending thread."""
        with vital():
            while True:
                rows = [row for sent in self.outbox.due() for row in self.rows_of(sent)]
                self.outbox.send({"rows": rows, "load": self.load().to_json()})
                if self.llm.engine.broken is not None:
                    with suppress(OSError):  # a full disk
                        print(f"graft: the engine is lost: {self.llm.engine.broken}", file=sys.stderr, flush=True)
                    os._exit(BROKEN)

    def rows_of(self, sent: SentRequest) -> list[AnswerRow]:
        rows = sent.rows()
        if all(one.finish_reason is not None for one in sent.request.family):
            ended = self.open.pop(sent.number, None)
            self.preemptions += sum(one.preemptions for one in sent.request.family) if ended is not None else 0
        return rows

    def load(self) -> EngineLoad:
        engine, manager = self.llm.engine, self.llm.engine.manager
        return EngineLoad(
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting),
            blocks=manager.blocks,
            used_blocks=manager.blocks - manager.available,
            prefix_queries=manager.asked_tokens,
            prefix_hits=manager.reused_tokens - manager.reloaded_tokens,
            host_hits=manager.reloaded_tokens,
            host_misses=0 if manager.host is None else manager.asked_tokens - manager.reused_tokens,
            preemptions=self.preemptions,
            steps=engine.scheduler.clock,
        )


def try_params(fields: Message) -> SamplingParams | GraftError:
    try:
        return SamplingParams(**fields)
    except GraftError as error:
        return error


def load_model(options: ModelOptions, outbox: Outbox) -> LLM:
    """As `graft run` loads it; each phase is told once."""
    told: list[str] = []

    def progress(what: str, _done: int, _total: int) -> None:
        if (phase := phase_of(what)) not in told:
            told.append(phase)
            outbox.send({"progress": phase})

    request = EngineRequest(
        options.model, engine_options(options.engine), options.dtype, options.device, options.config,
        options.backend, quantize=options.quantize, trust_remote_code=options.trust_remote_code, sets=options.sets,
        plugins=options.plugins, use_cache=options.use_cache, recompile=options.recompile,
        tensor_parallel_size=options.tensor_parallel,
    )  # fmt: skip

    def tell(notes: Sequence[str]) -> None:
        for note in notes:
            outbox.send({"note": note})

    return LLM.of(start_engine(request, Starter(tell=tell, progress=progress)))


def run(connection: socket.socket) -> None:
    outbox, asked = Outbox(connection), messages(connection)
    first = next(asked, None)
    if first is None:
        return
    given: Any = {**first["load"]}
    options = replace(ModelOptions(**given), sets=tuple(given["sets"]), plugins=tuple(given["plugins"]))
    try:
        llm = load_model(options, outbox)
        outbox.send({"ready": asdict(served_model(llm))})
    except GraftError as error:
        outbox.send({"failed": str(error), "exit": error.exit_code})
        return
    except Exception as error:  # noqa: BLE001  the HTTP process tells it
        print_traceback()
        outbox.send({"failed": f"{type(error).__name__}: {error}", "exit": 1})
        return
    if llm.engine.pooling is None:
        with suppress(UsageError):  # where there can be no grammar, whoever asks for one is told
            _ = llm.grammars  # reading the vocabulary holds up every thread: now, and not with the first schema
    worker = Worker(llm, outbox)
    threading.Thread(target=worker.send_forever, name="graft-sender", daemon=True).start()
    for message in asked:
        worker.take(message)
    os._exit(0)  # in the middle of a step, too: nobody is left to read it


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH)
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or an init system: the HTTP process drains first
        signal.signal(number, signal.SIG_IGN)
    run(socket.socket(fileno=int(sys.argv[1])))
