"""Steps without waiting: the device runs one step ahead of what the host knows.

    step()     launch t, launch t+1, wait for t, take stock of t
    step()     launch t+2,           wait for t+1, take stock of t+1        …

Where the same requests go on decoding, the device has all it needs (`go_ahead`). Any other step, one with prompts in
it too, is scheduled as if the step in flight were known, and the tokens that it feeds are taken from where the device
has them (`begin`).

A step that is launched before the one ahead of it is known may feed a request that has ended. Its token is thrown
away. What it wrote lies behind all that was committed, so in a block that is not stored and that no other table has:
the manager gives such a block to others as a free one, and their steps run behind this one on the same stream.
A recurrent state has nothing behind it: what a step fed cannot be fed again or be otherwise. So whoever goes on from
a step that is taken back, or from a token that the host chooses anew, is computed again from its start, in any slot.
A lack of memory, a capture that has to be made, parameters that need logits on the host: these wait until nothing is
in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graft.engine.core import Request
from graft.engine.decode.arrival import Arrival, host
from graft.engine.decode.buckets import BatchSizes, bucket_for
from graft.engine.decode.buffers import Buffers, StepBuffers
from graft.engine.decode.capture import CapturedStep, CapturedSteps
from graft.engine.decode.choose import Kind, choose, host_reason, kind_of, settings_of, uniform_numbers
from graft.engine.decode.in_flight import Feed, InFlightStep
from graft.engine.decode.packed import PackedSteps
from graft.engine.due import Due
from graft.engine.sampling.distribution import HEAD
from graft.engine.scheduler import Scheduler, StepPlan
from graft.ops.advance_rows.reference import LEAVE, NOTHING
from graft.ops.layout import on_host

Run = Callable[[StepPlan, Feed | None], Tensor]  # [n, vocab] of a step
RANK: dict[Kind, int] = {"greedy": 0, "sampled": 1, "cut": 2, "logits": 3}  # each can do what those before it can


def decodes(plan: StepPlan) -> bool:
    """A token of every request, and nothing else."""
    return all(r.decoding for r in plan.requests) and all(count == 1 for count in plan.counts)


def longest_of(requests: Sequence[Request]) -> int:
    """Tokens in the cache of the longest of them, when each has fed one more."""
    return max(r.fed for r in requests) + 1


@dataclass
class Counts:
    """Since the engine was last idle."""

    replays: int = 0  # decode steps that a capture ran
    ahead: int = 0  # steps launched before the step ahead of them was known
    misses: int = 0  # decode steps without a capture
    host_sampled: int = 0  # tokens whose nucleus was wider than a CUDA graph can sample from


@dataclass
class DeviceRows:
    """What the device knows: the request of each row and the blocks of its table."""

    requests: list[Request | None] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)


class DecodeLoop:
    """Launches decode steps and says what became of them. The engine takes stock."""

    def __init__(
        self,
        scheduler: Scheduler,
        buffers: Buffers,
        captures: CapturedSteps,
        packed: PackedSteps,
        sizes: BatchSizes,
        notes: Sequence[str],
    ) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.manager
        self.buffers = buffers
        self.captures = captures
        self.packed = packed  # steps with prompts in them
        self.sizes = sizes
        self.notes = list(notes)
        self.in_flight: list[InFlightStep] = []  # in order; the engine takes the first
        self.layout = DeviceRows()
        self.launched = 0
        self.counts = Counts()
        self.wide: set[Request] = set()  # whose nuclei are sampled on the host
        self.stream: torch.cuda.Stream | None = None  # of the last launch

    def captured(self, plan: StepPlan, kind: Kind) -> CapturedStep | None:
        """The one for this plan, if it decodes a token of every request and there is one."""
        if not decodes(plan):
            return None
        rows = self.sizes.take(len(plan.requests))
        if rows is None:
            self.miss(f"decode batches larger than {self.sizes.every[-1]} run without a CUDA graph")
            return None
        if any(r.most_tokens > self.buffers.longest for r in plan.requests):
            self.miss(f"requests of more than {self.buffers.longest} tokens are decoded without a CUDA graph")
            return None
        key = self.captures.key(rows, longest_of(plan.requests), kind)
        before = key in self.captures.made
        found = self.captures.get(key)
        if found is None:
            self.miss(f"decode steps without a CUDA graph: {self.captures.problem}")
        elif not before:
            self.note(f"captured when first needed: a {kind} step of {rows} rows")
        return found

    def kind(self, requests: Sequence[Request]) -> Kind:
        kinds: list[Kind] = ["greedy"]
        for request in requests:
            new = request.length - len(request.prompt)
            kinds.append("logits" if request in self.wide else kind_of(request.params, new))
        return max(kinds, key=RANK.__getitem__)

    def logits(self, plan: StepPlan, capture: CapturedStep) -> Tensor:
        """One step whose tokens the host chooses. [n, vocab]."""
        for request in plan.requests:
            reason = host_reason(request.params, len(request.tokens) - len(request.prompt))
            if reason is not None:
                self.note(f"decode: with {reason} the host chooses the tokens of the batch, and no step runs ahead")
        self.buffers.fill(plan.requests, capture.rows)
        logits = capture.replay()
        self.counts.replays += 1
        assert logits is not None
        return logits[: len(plan.requests)]

    def begin(
        self, plan: StepPlan, due: list[Due], run: Run, after: InFlightStep | None = None
    ) -> InFlightStep | None:
        """Launches the step if the device chooses its tokens, behind `after` if that is in flight still. `run` gives
        the logits of a step that is no capture. None: the host has to choose, or nothing may be in flight."""
        kind = self.kind([one.request for one in due])
        if kind == "logits" or len(due) > len({one.row for one in due}):
            return None  # samples of n > 1 begin with what the host knows of the first
        if after is not None and self.must_capture(plan, kind):
            return None
        feed = None if after is None else after.feed(plan.requests)
        capture = self.captured(plan, kind)
        self.counts.ahead += after is not None
        if capture is not None:
            return self.start(plan, due, capture, feed)
        return self.launch_run(plan, due, kind, lambda: run(plan, feed))

    def must_capture(self, plan: StepPlan, kind: Kind) -> bool:
        """Whether the step would be captured now. That runs it, on the memory of what is in flight."""
        if self.captures.problem is not None:
            return False
        if not decodes(plan):
            return self.packed.must_capture(plan)
        rows = self.sizes.peek(len(plan.requests))
        if rows is None:
            return self.packed.must_capture(plan)
        longest = min(longest_of(plan.requests), self.buffers.longest)
        return self.captures.key(rows, longest, kind) not in self.captures.made

    def start(self, plan: StepPlan, due: list[Due], capture: CapturedStep, feed: Feed | None = None) -> InFlightStep:
        """Launches a step with these requests in the first rows."""
        tables = [list(r.table.blocks) for r in plan.requests if r.table is not None]
        self.layout = DeviceRows([*plan.requests], tables)
        self.buffers.fill(plan.requests, capture.rows, self.launched)
        if feed is not None:
            feed.into(self.buffers.tokens)
        return self.launch(self.step_of(plan, due, self.next_slot(), capture))

    def step_of(self, plan: StepPlan, due: list[Due], slot: StepBuffers, capture: CapturedStep) -> InFlightStep:
        return InFlightStep(plan, due, self.buffers.tokens, slot, {one.request: one.row for one in due}, capture)

    def go_ahead(self, step: InFlightStep) -> InFlightStep | None:
        """Launches the step after `step` with those who may go on, if that is all that the next step would do."""
        staying = [one for one in step.due if not one.request.ending]
        if step.capture is None or not staying:
            return None
        if len(self.scheduler.running) != len(step.due) or not self.scheduler.closed:
            return None
        rows = self.sizes.take(len(staying))
        if rows is None or rows != bucket_for(max(one.row for one in staying) + 1, self.sizes.used):
            return None  # fewer rows would do
        going_on = [one.request for one in staying]
        capture = self.captures.made.get(self.captures.key(rows, longest_of(going_on), self.kind(going_on)))
        if capture is None or capture.kind == "logits":
            return None
        commands = self.commands(staying)
        if commands is None or self.manager.moves:  # the engine makes the moves, and launches the step behind them
            return None
        slot = self.next_slot()
        if commands:
            self.tell(slot, commands)
        self.scheduler.clock += 1
        plan = StepPlan(0, 0, going_on, [1] * len(going_on))
        due = [Due.of(one.request, one.row) for one in staying]
        self.counts.ahead += 1
        return self.launch(self.step_of(plan, due, slot, capture))

    def commands(self, staying: Sequence[Due]) -> dict[int, tuple[int, int]] | None:
        """Row → (entry, block) where what the device knows is no longer so. None: too much has changed for that, or
        there is no memory for a token more of everybody."""
        found: dict[int, tuple[int, int]] = {}
        for one in staying:
            table = one.request.table
            assert table is not None
            copies = self.manager.grow(table, one.request.fed + 1)
            if copies is None:
                return None
            assert not copies, "a decoding request writes behind what is committed, where nothing is shared"
            known = self.layout.tables[one.row]
            if known == table.blocks:
                continue
            changed = [entry for entry, block in enumerate(table.blocks) if known[entry : entry + 1] != [block]]
            if len(changed) != 1:
                return None
            found[one.row] = changed[0], table.blocks[changed[0]]
        stay = {one.row for one in staying}
        for row, request in enumerate(self.layout.requests):
            if request is not None and row not in stay:
                found[row] = LEAVE, 0
        return found

    def tell(self, slot: StepBuffers, commands: dict[int, tuple[int, int]]) -> None:
        """Sends the commands, and takes note of what the device knows then."""
        slot.command_array[0] = NOTHING
        for row, (entry, block) in commands.items():
            slot.command_array[:2, row] = entry, block
            if entry == LEAVE:
                self.layout.requests[row] = None
            else:
                self.layout.tables[row][entry : entry + 1] = [block]
        if self.scheduler.states is not None:
            slot.command_array[2] = self.buffers.nobody
            for row, request in enumerate(self.layout.requests):
                if request is not None:
                    slot.command_array[2, row] = request.state_slot
        self.buffers.commands.copy_(slot.commands, non_blocking=True)

    def launch(self, step: InFlightStep) -> InFlightStep:
        """A replay."""
        capture, slot = step.capture, step.arrival
        assert capture is not None and isinstance(slot, StepBuffers)
        with self.taking_off(step):
            if capture.kind != "greedy":
                requests = [one.request for one in step.due]
                slot.uniform_array[[one.row for one in step.due]] = uniform_numbers(requests)
                self.buffers.uniform.copy_(slot.uniform, non_blocking=True)
            capture.replay()
        self.launched += 1
        self.counts.replays += 1
        return step

    def launch_run(self, plan: StepPlan, due: list[Due], kind: Kind, run: Callable[[], Tensor]) -> InFlightStep:
        """Any other step: its logits are chosen from on the device. run: [n, vocab]."""
        device = self.buffers.state.device
        chosen = torch.empty(len(due), dtype=torch.int64, device=device)
        arrival = Arrival(host((len(due),), torch.int64, device), device)
        step = InFlightStep(plan, due, chosen, arrival, {one.request: i for i, one in enumerate(due)})
        with self.taking_off(step):
            logits = run()
            if due:
                rows = [one.row for one in due]
                if rows != list(range(len(logits))):
                    logits = logits[on_host(rows, device).to(device, non_blocking=True)]
                requests = [one.request for one in due]
                choose(kind, chosen, logits, None if kind == "greedy" else settings_of(requests, device))
                arrival.tokens.copy_(chosen, non_blocking=True)
        return step

    @contextmanager
    def taking_off(self, step: InFlightStep) -> Iterator[None]:
        """In the list before random numbers are taken: whoever takes the step back restores the generators. Counted
        when it is launched: until then its inputs are made of what came before."""
        started, arrival = time.perf_counter(), step.arrival
        self.in_flight.append(step)
        if arrival.begin is not None:
            self.stream = torch.cuda.current_stream(self.buffers.state.device)
            arrival.begin.record(self.stream)
        yield
        if arrival.done is not None:
            arrival.done.record(self.stream)
        step.take_off()
        step.launching = time.perf_counter() - started

    def land(self, step: InFlightStep) -> None:
        self.in_flight.remove(step)
        step.land()

    def take_back(self) -> Iterator[InFlightStep]:
        """Everything that is in flight, last first."""
        while self.in_flight:
            step = self.in_flight[-1]
            self.land(step)
            yield step

    def forget(self, request: Request) -> None:
        """The request has ended: what is still on the way for it is thrown away."""
        self.wide.discard(request)
        for step in reversed(self.in_flight):
            step.drop(request)
        self.in_flight = [step for step in self.in_flight if step.fed]

    def sample_on_host(self, one: Due) -> None:
        """The request's nucleus is too wide for a capture: the host samples its tokens from here on, this one too.
        Where a recurrent state has seen what it was fed meanwhile, all of its tokens are computed again."""
        self.forget(one.request)
        one.restore()
        self.wide.add(one.request)
        if self.scheduler.states is not None:
            self.scheduler.preempt(one.request)
        self.counts.host_sampled += 1
        self.note(f"a request whose nucleus (top_p) is wider than {HEAD} tokens is sampled on the host, step by step")

    def next_slot(self) -> StepBuffers:
        slot = self.buffers.ring[self.launched % len(self.buffers.ring)]
        slot.wait()
        return slot

    def follow_stream(self) -> None:
        """Work on another stream than the last step's comes behind that step."""
        if self.stream is not None and (here := torch.cuda.current_stream(self.stream.device)) != self.stream:
            here.wait_stream(self.stream)

    def miss(self, reason: str) -> None:
        self.counts.misses += 1
        self.note(reason)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
