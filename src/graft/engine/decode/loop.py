"""Decoding without waiting: the device runs one step ahead of what the host knows.

    step()     launch t, launch t+1, wait for t, take stock of t
    step()     launch t+2,           wait for t+1, take stock of t+1        …

A step that is launched before the one ahead of it is known may feed a request that has ended. Its token is thrown
away. What it wrote lies behind all that was committed, so in a block that is not stored and that no other table has:
the manager gives such a block to others as a free one, and their steps run behind this one on the same stream.
Everything but going on with the same requests (an arrival, a lack of memory, parameters that need logits on the host)
waits until nothing is on the way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graft.engine.core import Request
from graft.engine.decode.buckets import BatchSizes, bucket_for
from graft.engine.decode.buffers import Buffers, StepBuffers
from graft.engine.decode.capture import CapturedStep, CapturedSteps
from graft.engine.decode.choose import Kind, host_reason, kind_of
from graft.engine.decode.packed import PackedSteps
from graft.engine.due import Due
from graft.engine.sampling.distribution import HEAD
from graft.engine.scheduler import Scheduler, StepPlan
from graft.ops.advance_rows.reference import LEAVE, NOTHING

RANK: dict[Kind, int] = {"greedy": 0, "sampled": 1, "cut": 2, "logits": 3}  # each can do what those before it can


@dataclass(eq=False)
class InFlightStep:
    """A step on its way: who is due a token from it, and where the tokens will be."""

    plan: StepPlan
    due: list[Due]
    slot: StepBuffers
    capture: CapturedStep
    launching: float = 0.0  # seconds of the host

    def tokens(self) -> list[int]:
        """[rows]; waits for the step."""
        self.slot.wait()
        return self.slot.tokens[: self.capture.rows].tolist()

    def drop(self, request: Request) -> None:
        """Its token is not wanted: the request is as if this step had never been."""
        for one in self.due:
            if one.request is request:
                one.restore()
        self.due = [one for one in self.due if one.request is not request]

    @property
    def seconds(self) -> float:
        """On the device; on a CPU the launch is the step."""
        return self.slot.seconds() or self.launching


@dataclass
class Counts:
    """Since the engine was last idle."""

    replays: int = 0  # decode steps that a capture ran
    ahead: int = 0  # of these, launched before the step ahead of them was known
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

    def captured(self, plan: StepPlan) -> CapturedStep | None:
        """The one for this plan, if it decodes a token of every request and there is one."""
        if not all(r.decoding for r in plan.requests) or any(count != 1 for count in plan.counts):
            return None
        rows = self.sizes.take(len(plan.requests))
        if rows is None:
            self.miss(f"decode batches larger than {self.sizes.every[-1]} run without a CUDA graph")
            return None
        if any(r.most_tokens > self.buffers.longest for r in plan.requests):
            self.miss(f"requests of more than {self.buffers.longest} tokens are decoded without a CUDA graph")
            return None
        kind = self.kind(plan.requests)
        key = self.captures.key(rows, max(r.computed for r in plan.requests) + 1, kind)
        before = key in self.captures.made
        found = self.captures.get(key)
        if found is None:
            self.miss(f"decode steps without a CUDA graph: {self.captures.problem}")
        elif not before:
            self.note(f"captured when first needed: a {kind} step of {rows} rows")
        return found

    def kind(self, requests: Sequence[Request], coming: int = 0) -> Kind:
        kinds: list[Kind] = ["greedy"]
        for request in requests:
            new = len(request.tokens) - len(request.prompt) + coming
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

    def start(self, plan: StepPlan, capture: CapturedStep) -> InFlightStep:
        """Launches a step with these requests in the first rows."""
        tables = [list(r.table.blocks) for r in plan.requests if r.table is not None]
        self.layout = DeviceRows([*plan.requests], tables)
        self.buffers.fill(plan.requests, capture.rows, self.launched)
        due = [Due.of(request, row) for row, request in enumerate(plan.requests)]
        return self.launch(InFlightStep(plan, due, self.next_slot(), capture))

    def go_ahead(self, step: InFlightStep) -> InFlightStep | None:
        """Launches the step after `step` with those who may go on, if that is all that the next step would do."""
        staying = [one for one in step.due if self.stays(one)]
        if not staying or len(self.scheduler.running) != len(step.due) or not self.scheduler.closed:
            return None
        rows = self.sizes.take(len(staying))
        if rows is None or rows != bucket_for(max(one.row for one in staying) + 1, self.sizes.used):
            return None  # fewer rows would do
        kind = self.kind([one.request for one in staying], 1)
        longest = max(one.request.computed for one in staying) + 2
        capture = self.captures.made.get(self.captures.key(rows, longest, kind))
        if capture is None or capture.kind == "logits":
            return None
        commands = self.commands(staying)
        if commands is None:
            return None
        slot = self.next_slot()
        if commands:
            self.tell(slot, commands)
        self.scheduler.clock += 1
        plan = StepPlan(0, [one.request for one in staying], [1] * len(staying))
        due = [Due.of(one.request, one.row, coming=1) for one in staying]
        self.counts.ahead += 1
        return self.launch(InFlightStep(plan, due, slot, capture))

    def stays(self, one: Due) -> bool:
        """Whether the request may go on after the token it is due."""
        new = len(one.request.tokens) + 1 - len(one.request.prompt)
        return new < one.request.params.max_tokens

    def commands(self, staying: Sequence[Due]) -> dict[int, tuple[int, int]] | None:
        """Row → (entry, block) where what the device knows is no longer so. None: too much has changed for that, or
        there is no memory for a token more of everybody."""
        found: dict[int, tuple[int, int]] = {}
        for one in staying:
            table = one.request.table
            assert table is not None
            copies = self.manager.grow(table, one.request.computed + 2)
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
            slot.command_array[:, row] = entry, block
            if entry == LEAVE:
                self.layout.requests[row] = None
            else:
                self.layout.tables[row][entry : entry + 1] = [block]
        self.buffers.commands.copy_(slot.commands, non_blocking=True)

    def launch(self, step: InFlightStep) -> InFlightStep:
        started = time.perf_counter()
        self.in_flight.append(step)  # before random numbers are taken: whoever takes it back restores the generators
        slot = step.slot
        if step.capture.kind != "greedy":
            for one in step.due:
                if not one.request.params.greedy:
                    sampled = torch.rand((), dtype=torch.float64, generator=one.request.generator)
                    slot.uniform_array[one.row] = sampled.item()
            self.buffers.uniform.copy_(slot.uniform, non_blocking=True)
        if slot.begin is not None and slot.done is not None:
            self.stream = torch.cuda.current_stream(self.buffers.state.device)
            slot.begin.record(self.stream)
            step.capture.replay()
            slot.done.record(self.stream)
        else:
            step.capture.replay()
        self.launched += 1
        self.counts.replays += 1
        step.launching = time.perf_counter() - started
        return step

    def forget(self, request: Request) -> None:
        """The request has ended: what is still on the way for it is thrown away."""
        self.wide.discard(request)
        for step in reversed(self.in_flight):
            step.drop(request)
        self.in_flight = [step for step in self.in_flight if step.due]

    def sample_on_host(self, one: Due) -> None:
        """The request's nucleus is too wide for a capture: the host samples its tokens from here on, this one too."""
        self.forget(one.request)
        one.restore()
        self.wide.add(one.request)
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
