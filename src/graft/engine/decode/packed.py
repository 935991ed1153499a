"""Steps with prompts in them on fixed memory, captured for numbers of tokens, so that the host need not launch them.

Up to LARGEST tokens the device is done before the host has launched the next kernel: 900 tokens of an 8B model take
20 ms on an H200, launching them 40 to 60. A step is padded to the next number of tokens by sequences of their own,
none longer than a block table, whose blocks are all the padding block; rows without a request have no tokens.

Where recurrent layers have states, every step with prompts is launched: how their tokens are cut into chunks is the
host's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graft.engine.batch import host_batch
from graft.engine.decode.buckets import PROMPT_PAYS, BatchSizes
from graft.engine.decode.buffers import Buffers
from graft.engine.decode.in_flight import Feed
from graft.engine.kv.states import StateCache
from graft.engine.scheduler import Scheduler, StepPlan
from graft.ops.layout import Batch, HostBatch, on_host, views

LARGEST = 2048  # tokens; beyond, the device is busy for longer than the host needs to launch
SMALLEST = 16
SHARES = 4  # sizes to each doubling: a fifth of the tokens is padding at most


def token_sizes(most: int) -> tuple[int, ...]:
    """16, 20, 24, 28, 32, 40, … `most`; smallest first."""
    sizes = []
    power = SMALLEST
    while power <= most:
        sizes += [size for size in range(power, 2 * power, power // SHARES) if size <= most]
        power *= 2
    return tuple(sizes)


def largest_step(scheduler: Scheduler) -> int:
    """Tokens of the largest that is captured. With a bound on the prompts beside sequences that decode that is a full
    step of both, which the device would wait for: launching 1,024 that decode and 2,400 tokens of prompts takes the
    host 97 ms (8B in fp8, H200)."""
    beside = scheduler.max_mixed_prefill_tokens
    full = 0 if beside is None else scheduler.max_num_seqs + beside
    return min(max(LARGEST, min(full, 2 * LARGEST)), scheduler.max_num_batched_tokens)


@dataclass(frozen=True)
class PackedStep:
    """One number of tokens. `sent`: the memory of its inputs, one behind the other; `replay` runs it."""

    size: int
    batch: Batch
    sent: Tensor
    replay: Callable[[], object]


class PackedSteps:
    """`record(what, step)` captures a function on fixed memory and gives what replays it, or None where it cannot."""

    def __init__(
        self,
        graph: Callable[..., Any],
        tensors: Sequence[Tensor],
        buffers: Buffers,
        most: int,  # tokens of the largest that is captured
        record: Callable[[str, Callable[[], None]], Callable[[], object] | None],
        states: StateCache | None = None,  # of recurrent layers
    ) -> None:
        self.graph, self.tensors, self.record, self.states = graph, tensors, record, states
        self.block_size, self.padding = buffers.block_size, buffers.padding
        requests, self.width = buffers.block_tables.shape
        self.device = buffers.block_tables.device
        self.sizes = BatchSizes(token_sizes(most), PROMPT_PAYS)
        largest = max(self.sizes.every, default=1)
        self.requests = min(requests, largest)  # each has a token at least; 100,000 tables would be gigabytes
        self.span = self.width * self.block_size  # tokens that a row of the tables has blocks for
        self.spare = -(-largest // self.span)  # rows for the padding
        # odd, as no size is: kernels take as many tokens as rows for a step that decodes
        self.rows = (self.requests + self.spare) | 1
        self.block_tables = torch.full((self.rows, self.width), self.padding, device=self.device)
        self.out: Tensor | None = None  # [rows, vocab]
        self.made: dict[int, PackedStep] = {}

    def must_capture(self, plan: StepPlan) -> bool:
        """Whether the step would be captured now, which nothing may be in flight for."""
        size = self.sizes.peek(sum(plan.counts)) if self.states is None else None
        return size is not None and size not in self.made

    def logits(self, plan: StepPlan, feed: Feed | None = None) -> Tensor | None:
        """[n, vocab] of a step, in memory that the next one overwrites; None: it has to be launched.
        feed: what only the device knows of its tokens."""
        size = self.sizes.take(sum(plan.counts)) if self.states is None else None
        if size is None or len(plan.counts) > self.requests:
            return None
        found = host_batch(plan, self.block_size)
        tables, longest = found.padded_tables()
        step = self.get(size) if longest <= self.width else None
        if step is None:
            return None
        padded = self.padded(found, size)
        step.sent.copy_(on_host(padded.flat()[0], self.device), non_blocking=True)
        blocks = on_host(tables, self.device).to(self.device, non_blocking=True).view(-1, longest)
        self.block_tables[: len(blocks), :longest] = blocks
        if self.device.type == "cpu":  # references take sizes from the host, kernels from the device
            step.batch.lens_cpu.copy_(padded.host_lens())
        if feed is not None:
            feed.into(step.batch.input_ids[0])
        step.replay()
        assert self.out is not None
        return self.out[: len(plan.counts)]

    def get(self, size: int) -> PackedStep | None:
        """Captured when first needed. None: it cannot be."""
        if size not in self.made:
            batch, sent = self.empty(size)
            play = self.record(f"a step of {size} tokens", lambda: self.run(batch))
            if play is None:
                return None
            self.made[size] = PackedStep(size, batch, sent, play)
        return self.made[size]

    def empty(self, size: int) -> tuple[Batch, Tensor]:
        """A step of so many tokens on memory of its own, all of them padding, and that memory."""
        empty = self.padded(HostBatch(), size)
        flat, at = empty.flat()
        sent = on_host(flat, self.device).to(self.device)
        return views(sent, at, self.block_tables, empty.host_lens()), sent

    def first_runs(self) -> dict[str, Callable[[], Any]]:
        """The smallest and the largest that are captured, launched: between them they have all kernels that count
        the sequences which decode on the device."""
        sizes = {*self.sizes.every[:1], *self.sizes.every[-1:]} if self.states is None else set()
        inputs = {size: (*self.empty(size)[0].inputs(), *self.tensors) for size in sizes}
        return {f"a captured step of {size} tokens": partial(self.graph, *inputs[size]) for size in sizes}

    def run(self, batch: Batch) -> None:
        (logits,) = self.graph(*batch.inputs(), *self.tensors)  # [1, rows, vocab]
        if self.out is None:  # in the first run, before anything is captured
            self.out = torch.empty_like(logits[0])
        self.out.copy_(logits[0])

    def padding_step(self, tokens: int, decoding: int, room: int, context: int = 1) -> Callable[[], Any]:
        """A step of so many tokens, all of them padding, that is launched and not captured: so many sequences that
        decode, as far as there are rows for them, and prompts behind them. room: tokens that a row of its tables has
        blocks for. context: tokens of those that decode."""
        ones, width = min(self.requests, decoding, tokens - 1), max(room // self.block_size, 1)
        whole, rest = divmod(tokens - ones, width * self.block_size)
        parts = [1] * ones + [width * self.block_size] * whole + [rest] * (rest > 0)
        host = HostBatch().padded(tokens, len(parts), parts, self.padding, self.block_size)
        host.seq_lens[:ones], host.lens_cpu[:ones] = [context] * ones, [(1, context)] * ones
        flat, at = host.flat()
        tables = torch.full((len(parts), width), self.padding, device=self.device)
        batch = views(on_host(flat, self.device).to(self.device), at, tables, host.host_lens())
        states = () if self.states is None else self.states.inputs([self.states.nobody] * len(parts))
        return lambda: self.graph(*batch.inputs(), *self.tensors, *states)

    def padded(self, found: HostBatch, size: int) -> HostBatch:
        """The step as the batch of this size lies in memory."""
        return found.padded(size, self.rows, self.parts(size - len(found.input_ids)), self.padding, self.block_size)

    def parts(self, padding: int) -> list[int]:
        """[spare]: the padding's tokens in each of its rows."""
        return [min(self.span, max(0, padding - row * self.span)) for row in range(self.spare)]

    @property
    def notes(self) -> list[str]:
        if not self.made:
            return []
        sizes = ", ".join(map(str, sorted(self.made)))
        graphs = "CUDA graphs" if self.device.type == "cuda" else "captured steps, which are direct calls on a CPU,"
        return [f"prompts: {len(self.made)} {graphs} for steps of {sizes} tokens, made when first needed"]
