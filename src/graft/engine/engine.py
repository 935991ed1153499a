"""The engine. `step` is its heart: schedule, run the graph, sample, take stock. engine/driver.py runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graft.base.device_memory import free_memory, is_out_of_memory, size_text
from graft.base.errors import EngineFailed, EngineStuck, GraftError, LogitsError, OutOfCache, OutOfMemory, UsageError
from graft.engine.batch import pack
from graft.engine.core import FinishReason, Request, Stats
from graft.engine.counting import counted
from graft.engine.decode.choose import WIDE
from graft.engine.decode.in_flight import Feed, InFlightStep
from graft.engine.decode.loop import Counts, DecodeLoop
from graft.engine.due import Due
from graft.engine.kv.manager import BlockManager
from graft.engine.kv.moves import Copy, Move
from graft.engine.kv.tensors import copy_blocks
from graft.engine.masks import TokenMask
from graft.engine.params import SamplingParams
from graft.engine.sampling.sampling import SampledToken, make_generator, sample
from graft.engine.scheduler import Scheduler, StepPlan
from graft.engine.scoring import scored_prompts, take_scores
from graft.engine.text.detokenize import TextStream
from graft.models.pooling import Pooling


class Engine:
    """Runs requests over one lowered graph and one cache. Add requests at any time; each `step` moves them on.

    One thread at a time has its `lock`: the driver's while it has work, or the one that steps the engine itself.
    """

    pooling: Pooling | None = None  # of one that embeds (engine/pooling.py)

    def __init__(
        self,
        graph: Callable[..., Any],
        tensors: Sequence[Tensor],  # [blocks, rows, kv_heads, head_dim] each (ops/paged_cache.py)
        scheduler: Scheduler,
        *,
        end_tokens: frozenset[int] = frozenset(),
        tokenizer: Any = None,
        loop: DecodeLoop | None = None,
        notes: Sequence[str] = (),
        move: Callable[[Sequence[Tensor], Sequence[Move]], None] = copy_blocks,
    ) -> None:
        self.graph = graph
        self.tensors = tensors
        self.scheduler = scheduler
        self.manager: BlockManager = scheduler.manager
        self.states = scheduler.states  # of recurrent layers
        self.end_tokens = end_tokens
        self.tokenizer = tokenizer
        self.loop = loop  # decodes by captures, a step ahead of the host; None: every step is `run`
        self.pending: StepPlan | None = None  # made while a step was in flight, and not launched yet
        self.move = move  # blocks of the cache; rank 0 of several tells the others
        self.said = tuple(notes)
        self.stats = Stats()
        self.lock = threading.RLock()
        self.ended: list[Request] = []  # since the last step began
        self.broken: GraftError | None = None  # after this it is in no state to go on

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Feeds the next tokens and returns the requests that got a new one."""
        with self.lock:
            self.ended = []
            return self.next_step()

    def next_step(self) -> list[Request]:
        started, loop = time.perf_counter(), self.loop
        if loop is not None:
            loop.follow_stream()
            if loop.in_flight:  # one step is on its way already
                return self.take_stock(loop.in_flight[0], started)
        plan = self.next_plan()
        if not plan.requests:
            return self.nothing_to_do()
        due: list[Due] = []
        with self.undone_on_error(plan, due):
            self.move_blocks()
            due += self.due(plan)
            scored = scored_prompts(plan)
            step = None if loop is None or scored else loop.begin(plan, due, self.run)
            if step is None:
                capture = None if loop is None or scored else loop.captured(plan, "logits")
                if loop is not None and capture is not None:
                    logits = loop.logits(plan, capture)
                else:
                    logits = self.run(plan, scored=[index for one in scored for index in one.indices])
                logits = take_scores(scored, logits)
                fed = zip(plan.requests, plan.counts, strict=True)
                self.advance(fed, due, self.choose(due, logits))  # logits: [n, vocab]
        if step is not None:
            return self.take_stock(step, started)
        grown = [one.request for one in due if one.request.error is None]
        self.count(plan, grown, time.perf_counter() - started)
        return grown

    def run(self, plan: StepPlan, feed: Feed | None = None, scored: Sequence[int] = ()) -> Tensor:
        """[n, vocab]. feed: tokens of it that only the device knows. scored: tokens of it with logits of their own,
        which come behind, [n + len(scored), vocab]."""
        if not scored and self.loop is not None and (found := self.loop.packed.logits(plan, feed)) is not None:
            return found
        batch = pack(plan, self.manager.block_size, self.tensors[0].device, scored)
        if feed is not None:
            feed.into(batch.input_ids[0])
        states = () if self.states is None else self.states.inputs([slot_of(request) for request in plan.requests])
        (logits,) = self.graph(*batch.inputs(), *self.tensors, *states)  # [1, n, vocab]
        return logits[0]

    def next_plan(self) -> StepPlan:
        """The one that was made ahead and could not be launched then, without those who are gone since; or a new
        one."""
        plan, self.pending = self.pending, None
        if plan is None:
            return self.scheduler.schedule()
        left = [(r, n) for r, n in zip(plan.requests, plan.counts, strict=True) if r.table is not None]
        if not left:
            return self.scheduler.schedule()
        return replace(plan, requests=[r for r, _ in left], counts=[n for _, n in left])

    def move_blocks(self) -> None:
        """Before a step is launched. A block that should have come out of host memory and did not holds wrong numbers
        under a right name, wherever the move failed: nothing in the cache can be believed then."""
        moves = self.manager.take_moves()
        try:
            self.move(self.tensors, moves)
        except BaseException as error:
            if not all(isinstance(move, Copy) for move in moves):
                self.broken = EngineFailed(
                    f"moving blocks between device and host failed ({error}); load the LLM again"
                )
            raise

    def go_ahead(self, step: InFlightStep) -> None:
        """Launches the step after `step`, or makes its plan, where that can be done before `step` is known."""
        loop = self.loop
        assert loop is not None
        if loop.go_ahead(step) is not None or self.pending is not None:
            return
        if not self.scheduler.may_look_ahead():
            return
        plan = self.scheduler.schedule()
        if not plan.requests:
            return
        due = self.due(plan)
        self.pending = plan
        with self.undone_on_error(plan, due):
            copies = any(isinstance(move, Copy) for move in self.manager.moves)
            alone = bool(copies or scored_prompts(plan))  # it needs the host, and nothing in flight
            if not alone:
                self.move_blocks()
            ahead = None if alone else loop.begin(plan, due, self.run, step)
        if ahead is not None:
            self.pending = None

    def take_stock(self, step: InFlightStep, started: float) -> list[Request]:
        """Launches the step after `step`, where it can be launched unseen, and then looks at what `step` gave."""
        assert self.loop is not None
        with self.undone_on_error(step.plan, step.due):
            self.go_ahead(step)
            tokens = step.tokens()  # waits
            self.loop.land(step)
            token_of = {one.request: tokens[step.index[one.request]] for one in step.due}
            for one in step.due:
                if token_of[one.request] == WIDE:
                    step.fed.pop(one.request)
                    self.loop.sample_on_host(one)
            due = [one for one in step.due if token_of[one.request] != WIDE]
            choices = [chosen(token_of[one.request]) for one in due]
            self.advance(step.fed.items(), due, choices)
        grown = [one.request for one in due if one.request.error is None]
        # whoever comes back late finds the step done: what it took then is the device's time
        seconds = max(time.perf_counter() - started, step.seconds)
        self.count(step.plan, grown, seconds, decoding=step.capture is not None)
        return grown

    @contextmanager
    def undone_on_error(self, plan: StepPlan, due: list[Due]) -> Iterator[None]:
        """What is in flight is undone, last first, then this step."""
        try:
            yield
        except BaseException as error:
            if self.loop is not None:
                for step in self.loop.take_back():
                    self.undo(step.plan, step.due)
            self.undo(plan, due)
            if is_out_of_memory(error):
                raise self.out_of_memory(plan) from error
            raise

    def due(self, plan: StepPlan) -> list[Due]:
        """Who gets a token: those all of whose tokens are in the cache after this step, and new samples of n > 1."""
        found = []
        for row, (request, count) in enumerate(zip(plan.requests, plan.counts, strict=True)):
            if request.fed + count == request.length:
                found += [Due.of(one, row) for one in (request, *self.make_siblings(request))]
        return found

    def choose(self, due: list[Due], logits: Tensor) -> list[SampledToken]:
        if not due:
            return []
        rows = [one.row for one in due]
        some = logits if rows == list(range(len(logits))) else logits[rows]
        return sample(some, [one.request for one in due], self.end_tokens)

    def advance(self, fed: Iterable[tuple[Request, int]], due: list[Due], choices: list[SampledToken]) -> None:
        """Takes note of what is in the cache now, then of the new tokens."""
        for request, count in fed:
            self.keep(request, count)
        for one in due:
            leader = one.request.leader
            if leader is not None and one.request not in leader.siblings:
                leader.siblings.append(one.request)
                self.scheduler.join(one.request, leader)
                if self.states is not None and one.request.state_slot is not None:
                    self.states.copy(slot_of(leader), one.request.state_slot)
        for one, choice in zip(due, choices, strict=True):
            self.append_token(one.request, choice)

    def keep(self, request: Request, count: int) -> None:
        """So many more of its tokens are in the cache."""
        assert request.table is not None
        request.computed += count
        self.manager.commit(request.table, request.tokens, request.computed)

    def undo(self, plan: StepPlan, due: list[Due]) -> None:
        """The step failed. Those that got no token are computed again, with the random numbers that they had."""
        for one in due:
            request, leader = one.request, one.request.leader
            if len(request.tokens) > one.length:
                continue
            one.restore()
            if leader is not None and len(leader.tokens) == len(leader.prompt):  # it makes its siblings anew
                leader.siblings = []
                self.scheduler.drop(request)
        grown = {one.request for one in due if len(one.request.tokens) > one.length}
        for request in (*plan.requests, *(one.request for one in due)):
            if request.table is not None and request not in grown:
                self.scheduler.preempt(request)

    def append_token(self, request: Request, choice: SampledToken) -> None:
        """The request's next token, and whether it is the last."""
        with request.lock:
            self.take_token(request, choice)

    def take_token(self, request: Request, choice: SampledToken) -> None:
        params = request.params
        if choice.error is not None:
            request.error = choice.error
            self.end(request, "error")
            return
        request.tokens.append(choice.token)
        if choice.logprobs is not None:
            request.logprobs.append(choice.logprobs)
        if request.mask is not None and (why := request.mask.accept(choice.token)):
            request.error = EngineFailed(f"its grammar cannot go on: {why}")
            self.end(request, "error")
            return
        ends = frozenset() if params.ignore_eos else self.end_tokens
        if choice.token in ends or choice.token in (params.stop_token_ids or ()):
            self.end(request, "stop", choice.token)
        elif self.meets_stop_string(request):
            self.end(request, "stop", request.stream.stopped if request.stream else None)
        elif len(request.tokens) - len(request.prompt) >= params.max_tokens:
            self.end(request, "length")

    def meets_stop_string(self, request: Request) -> bool:
        if not request.params.stop or request.stream is None:
            return False
        request.read_text()
        return request.stream.stopped is not None

    def end(self, request: Request, reason: FinishReason, what: int | str | None = None) -> None:
        request.finish_reason, request.stop_reason = reason, what
        self.ended.append(request)
        if self.loop is not None:
            self.loop.forget(request)
        self.scheduler.drop(request)

    def add(self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0) -> Request:
        """Makes a request and takes it, for whoever steps the engine."""
        request = self.make(prompt, params, priority=priority)
        self.enter(request)
        return request

    def make(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        mask: TokenMask | None = None,
    ) -> Request:
        """A request, in any thread; one that could never run is refused. mask: what its parameters ask for."""
        if params.masked and mask is None:
            raise UsageError("LLM.submit makes the masks of a grammar, allowed_token_ids and bad_words; use it")
        stream = self.stream(prompt, params)
        request = Request(list(prompt), params, make_generator(params.seed), stream, priority, mask=mask)
        needed = self.manager.blocks_for(request.most_tokens)
        if needed > self.manager.blocks:
            raise OutOfCache(
                f"a request of up to {request.most_tokens} tokens needs {needed} blocks, but the key-value cache has"
                f" only {self.manager.blocks} ({size_text(self.cache_bytes)}); shorten it, lower max_tokens, or raise"
                " kv_cache_memory"
            )
        return request

    def enter(self, request: Request) -> None:
        if self.broken is not None:
            raise EngineFailed(f"the engine is broken since a step failed ({self.broken}); load the LLM again")
        with self.lock:
            if self.idle:
                self.stats, self.scheduler.preemptions = Stats(), 0
                if self.loop is not None:
                    self.loop.counts = Counts()
            self.scheduler.add(request)

    def make_siblings(self, request: Request) -> list[Request]:
        """The other samples of n > 1: they begin when the prompt is in the cache, and share its blocks."""
        params = request.params
        if request.leader is not None or request.length > len(request.prompt):
            return []
        made = []
        for index in range(1, params.n):
            seed = None if params.seed is None else params.seed + index
            stream = self.stream(request.prompt, params)
            one = Request(request.prompt, params, make_generator(seed), stream, request.priority, leader=request)
            one.mask = None if request.mask is None else request.mask.copy()
            made.append(one)
        return made

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> TextStream | None:
        return None if self.tokenizer is None else TextStream(self.tokenizer, list(prompt), params)

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends those that have not ended, wherever they stand; their blocks are free again."""
        with self.lock:
            for request in requests:
                for each in request.family:
                    if each.finish_reason is None:
                        self.end(each, "abort")

    def nothing_to_do(self) -> list[Request]:
        if not self.idle:
            raise EngineStuck(len(self.scheduler.waiting), len(self.scheduler.running), self.manager.available)
        return []

    @property
    def notes(self) -> tuple[str, ...]:
        """For the report: how it decodes, and what could not be done as planned."""
        return (*self.said, *((*self.loop.notes, *self.loop.packed.notes) if self.loop is not None else ()))

    @property
    def idle(self) -> bool:
        return not self.scheduler.waiting and not self.scheduler.running

    @property
    def cache_bytes(self) -> int:
        """Of the blocks that requests get; the padding block of captures is not one of them."""
        return sum(tensor[0].nbytes for tensor in self.tensors) * self.manager.blocks

    def count(self, plan: StepPlan, grown: list[Request], seconds: float, decoding: bool = False) -> None:
        counts = self.loop.counts if self.loop is not None else Counts()
        self.stats = counted(self.stats, plan, grown, seconds, counts, self.scheduler.preemptions, decoding)

    def out_of_memory(self, plan: StepPlan) -> OutOfMemory:
        device = self.tensors[0].device
        free = size_text(free_memory(device))
        return OutOfMemory(
            f"no memory for a step of {sum(plan.counts)} tokens (requests: {len(plan.counts)}): {free} are free on"
            f" {device}, the key-value cache holds {size_text(self.cache_bytes)}. Lower kv_cache_memory,"
            " max_num_batched_tokens or max_num_seqs"
        )


def slot_of(request: Request) -> int:
    assert request.state_slot is not None
    return request.state_slot


def chosen(token: int) -> SampledToken:
    """What the device chose."""
    return SampledToken(token, error=LogitsError() if token < 0 else None)
