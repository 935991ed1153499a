"""Which requests run in the next step, and how many tokens of each."""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, field
from itertools import count

from graft.engine.core import Request
from graft.engine.forecast import Forecast
from graft.engine.kv.manager import BlockManager, Table
from graft.engine.kv.states import StateCache

PATIENCE = 1000  # steps by which a better priority goes ahead
ASK_AGAIN = 16  # steps after which one whom the forecast refused is looked at again, though nobody has left
LONG_PROMPT = 4096  # tokens: attention over that much is slower in a captured step, as small ones are
SCORED = 512  # tokens of prompts whose logits a step keeps: 256 MB of a vocabulary of 128 k, in float32


@dataclass(frozen=True)
class TurnedAway:
    """Who did not get in, and how things stood: blocks that could be had, departures, and the step from which time
    alone may have helped."""

    request: Request
    available: int
    departures: int
    until: float


@dataclass
class StepPlan:
    """One step: `counts[i]` tokens of `requests[i]`. The manager has the moves to be made before it."""

    budget: int  # tokens that may still be taken
    prompts: int  # of these, of prompts that are not long
    requests: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    scorable: int = 0  # of these, tokens of prompts that are scored

    def take(self, request: Request, tokens: int) -> None:
        self.budget -= tokens
        self.requests.append(request)
        self.counts.append(tokens)

    def decoding_first(self) -> StepPlan:
        """Single tokens side by side: attention takes a run of them in one call."""
        pairs = sorted(zip(self.requests, self.counts, strict=True), key=lambda pair: pair[1] > 1)
        return StepPlan(self.budget, self.prompts, [r for r, _ in pairs], [c for _, c in pairs])


class Scheduler:
    """Requests stand in one fixed order: by arrival, where one better priority counts as PATIENCE steps.

    A step serves them in that order: tokens that decode first, then prompts, in chunks, as far as the budget goes.
    One is let in when the cache will hold all that run until they end (forecast.py), or, without a forecast, when it
    holds the prompt. Whoever lacks memory nevertheless takes it from the last in the order, which waits and is
    computed again later (from the blocks of it that are still there). So the first always moves on, only finitely
    many ever come before a request, and none starves.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_mixed_prefill_tokens: int | None = None,
        *,
        forecast: bool = True,
        states: StateCache | None = None,
    ) -> None:
        self.manager = manager
        self.states = states  # of recurrent layers
        self.forecast = Forecast(manager) if forecast else None
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_mixed_prefill_tokens = max_mixed_prefill_tokens
        self.waiting: list[Request] = []  # both in order
        self.running: list[Request] = []
        self.leaving: set[Request] = set()  # of the running, those whose last token is in flight
        self.preemptions = 0
        self.refused: TurnedAway | None = None
        self.departures = 0
        self.clock = 0
        self.serial = count()

    def add(self, request: Request) -> None:
        """A lower priority number goes first; equal ones go as they come."""
        request.order = (self.clock + PATIENCE * request.priority, next(self.serial))
        request.arrived = time.monotonic()
        insort(self.waiting, request, key=in_order)

    def join(self, sibling: Request, request: Request) -> None:
        """`sibling` goes on from what `request` has in the cache, or from the start where too many run already."""
        assert request.table is not None
        sibling.cached, sibling.order = request.cached, (request.order[0], next(self.serial))
        if len(self.running) >= self.max_num_seqs:
            insort(self.waiting, sibling, key=in_order)
            return
        sibling.table, sibling.computed = self.manager.fork(request.table), request.computed
        self.run(sibling)

    def schedule(self) -> StepPlan:
        self.clock += 1
        if self.forecast is not None:
            self.forecast.forget()
        self.leaving = {request for request in self.running if request.ending}
        while self.waiting and self.running and self.waiting[0].order < self.running[-1].order:
            if not self.admit(self.waiting[0]):
                break
        # kept for those that decode, but one token is left for the first in the order if that is a prompt
        decoding = [request.decoding for request in self.running]
        most, beside = self.max_num_batched_tokens, self.max_mixed_prefill_tokens
        plan = StepPlan(most, beside if beside is not None and any(decoding) else most, scorable=SCORED)
        kept = min(sum(decoding), self.max_num_batched_tokens - 1)
        for request, decodes in zip(tuple(self.running), decoding, strict=True):
            if request.table is None:
                continue  # it has just given way
            kept -= decodes and kept > 0
            if decodes and plan.budget and request.computed + request.feeding < request.table.room:
                plan.take(request, 1)
            else:
                self.serve(request, plan, 0 if decodes else kept)
        while plan.budget and plan.prompts and self.waiting and self.admit(request := self.waiting[0]):
            self.serve(request, plan)
        return plan.decoding_first()

    def serve(self, request: Request, plan: StepPlan, kept: int = 0) -> None:
        """Puts the request's next tokens into the plan, leaving `kept`. Without memory for them it waits again."""
        assert request.table is not None
        granted = min(request.length - request.fed, max(plan.budget - kept, 0))
        limited = request.length <= LONG_PROMPT and not request.decoding
        if limited:
            granted = min(granted, plan.prompts)
        if request.scores_prompt:
            granted = min(granted, plan.scorable)
            plan.scorable -= granted
        if not granted or request.ending:
            return
        if not self.make_room(request, request.table, request.fed + granted):
            self.preempt(request)
            return
        plan.take(request, granted)
        plan.prompts -= granted if limited else 0

    def admit(self, request: Request) -> bool:
        """Lets a waiting request in, with room for all of its tokens; those in the cache, or in host memory, are not
        computed again."""
        while self.full:
            if not self.take_from_last(request):
                return False
        if self.still_refused(request):
            return False
        reuse = not (request.scores_prompt or request.computes_all)
        table = self.manager.open(request.tokens, reuse=reuse)
        foreseen = self.foreseen(request, table)
        if not foreseen or not self.make_room(request, table, len(request.tokens)):
            self.manager.close(table)
            until = float("inf") if foreseen else self.clock + ASK_AGAIN
            self.refused = TurnedAway(request, self.manager.available, self.departures, until)
            return False
        self.refused = None
        if reuse:
            self.manager.reload(table, request.tokens)
        request.table, request.computed = table, table.cached
        if request.cached is None:
            request.cached, request.queued = table.cached, time.monotonic() - request.arrived
        self.waiting.remove(request)
        self.run(request)
        return True

    def run(self, request: Request) -> None:
        insort(self.running, request, key=in_order)
        if self.states is not None:
            request.state_slot = self.states.take()
        if self.forecast is not None:
            self.forecast.entered(request)

    def foreseen(self, request: Request, table: Table) -> bool:
        """Whether the cache will hold it and those before it; those behind it would give way."""
        if self.forecast is None:
            return True
        if not self.running or self.running[-1].order < request.order:
            return self.forecast.holds(self.running, request, table)
        self.forecast.forget()
        held = self.forecast.holds([r for r in self.running if r.order < request.order], request, table)
        self.forecast.forget()
        return held

    @property
    def closed(self) -> bool:
        """Nobody who waits can get in before something changes."""
        if not self.waiting:
            return True
        first = self.waiting[0]
        if not self.running or first.order < self.running[-1].order:
            return False
        return self.full or self.still_refused(first)

    @property
    def full(self) -> bool:
        if self.states is not None and not self.states.free:  # those who leave have theirs until they are gone
            return True
        return len(self.running) - len(self.leaving) >= self.max_num_seqs

    def may_look_ahead(self) -> bool:
        """Whether a step can be scheduled while another is in flight: nobody would have to give way, since what is
        on the way for him cannot be called back."""
        if self.waiting and self.running and self.waiting[0].order < self.running[-1].order:
            return False
        needed = 0
        for request in self.running:
            table = request.table
            assert table is not None
            if len(request.tokens) + request.coming <= table.room:
                continue
            length = min(request.length, request.fed + self.max_num_batched_tokens)
            if length > table.room and not request.ending:  # a block more where its last one is shared
                needed += 1 + max(self.manager.blocks_for(length) - len(table.blocks), 0)
        return needed <= self.manager.available

    def still_refused(self, request: Request) -> bool:
        """Nothing has changed for it since it was refused: looking a long prompt up takes milliseconds."""
        refused = self.refused
        if refused is None or refused.request is not request or self.clock >= refused.until:
            return False
        if self.manager.available > refused.available or self.departures > refused.departures:
            return False
        return not self.running or self.running[-1].order < request.order

    def make_room(self, request: Request, table: Table, length: int) -> bool:
        """Room for `length` tokens, taken from those behind `request` if need be. False: there is none to be had."""
        while self.manager.grow(table, length) is None:
            if not self.take_from_last(request):
                return False
        return True

    def take_from_last(self, request: Request) -> bool:
        """Sends the last of the running back to wait, if it stands behind `request`."""
        if not self.running or self.running[-1].order <= request.order:
            return False
        self.preempt(self.running[-1])
        return True

    def preempt(self, request: Request) -> None:
        self.leave(request)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=in_order)

    def leave(self, request: Request) -> None:
        """A running request gives back its blocks, and its state."""
        assert request.table is not None
        self.departures += 1
        if self.forecast is not None:
            self.forecast.left(request)
        self.running.remove(request)
        self.leaving.discard(request)
        self.manager.close(request.table)
        request.table = None
        if self.states is not None and request.state_slot is not None:
            self.states.give_back(request.state_slot)
            request.state_slot = None

    def drop(self, request: Request) -> None:
        """The request has ended, or is wanted no more, wherever it stands."""
        if self.forecast is not None and request.finish_reason in ("stop", "length"):
            self.forecast.lengths.record(len(request.tokens) - len(request.prompt))
        if request.table is not None:
            self.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)


def in_order(request: Request) -> tuple[int, int]:
    return request.order
