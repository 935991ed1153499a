"""A decode loop for an engine, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graft.base.device_memory import is_out_of_memory
from graft.base.files import Progress
from graft.engine.decode.arrival import host
from graft.engine.decode.buckets import DECODE_PAYS, BatchSizes, bucket_sizes
from graft.engine.decode.buffers import Buffers
from graft.engine.decode.capture import CapturedSteps
from graft.engine.decode.choose import choose
from graft.engine.decode.loop import DecodeLoop
from graft.engine.decode.packed import PackedSteps, largest_step
from graft.engine.options import EngineOptions
from graft.engine.scheduler import Scheduler
from graft.ops.launch import launch_failures, pdl_problem

PROMPTS = "the largest step with prompts"
SHORT_PROMPT = 2  # tokens: no kernel takes fewer otherwise
# 8 bytes to 8 MiB in powers of two, as torch keeps them: longer tables are rare. Of each size what steps on their way
# copy: two with some short copies, and one more, since torch knows a copy's end by the next one.
PINNED = {power: 16 if power < 16 else 4 for power in range(3, 24)}


def loop_problem(device: torch.device, backend: str, options: EngineOptions, ranks: int = 1) -> str | None:
    """Why decode steps are not captured, or None."""
    if options.enforce_eager:
        return "enforce_eager was asked for"
    if options.runner == "pooling":
        return "nothing is decoded"
    if device.type != "cuda":
        return f"the model is on {device}"
    if ranks > 1:
        return f"the {ranks} ranks are told each step one by one"
    if backend != "eager":
        return f"backend {backend!r} runs each step as it always does"
    return None


def make_loop(
    graph: Callable[..., Any],
    tensors: Sequence[Tensor],  # one block more than the manager has: the padding's
    scheduler: Scheduler,
    context: int,
    options: EngineOptions,
    progress: Progress | None = None,
) -> DecodeLoop:
    manager, states, device = scheduler.manager, scheduler.states, tensors[0].device
    sizes = bucket_sizes(scheduler.max_num_seqs, options.cudagraph_capture_sizes)
    width = min(manager.blocks_for(context), manager.blocks)  # no table is longer
    nobody = 0 if states is None else states.nobody
    buffers = Buffers.make(sizes[-1], width, manager.block_size, manager.blocks, device, nobody)
    captures = CapturedSteps(graph, tensors, buffers, states)
    asked = options.cudagraph_capture_sizes is not None
    steps = BatchSizes(sizes, DECODE_PAYS, sizes if asked else ())
    packed = PackedSteps(graph, tensors, buffers, largest_step(scheduler), captures.packed, states)
    most = scheduler.max_num_batched_tokens
    captures.make_all(steps.used, progress, first_runs(packed, most, tensors) if device.type == "cuda" else {})
    captures.tell_cost(min(steps.used))
    said = notes(captures, device)
    if device.type == "cuda" and (problem := reserve(packed, most, device)) is not None:
        said.append(problem)
    captures.serving = True
    return DecodeLoop(scheduler, buffers, captures, packed, steps, said)


def first_runs(packed: PackedSteps, tokens: int, caches: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """The largest step with prompts, beside sequences that decode, with as many of them and tables as wide as each of
    attention's kernels takes; a short prompt, which has kernels of its own; and steps as they are captured."""
    from graft.ops.cached_attention.triton import decoding_cases

    cases = sorted({case for cache in caches for case in decoding_cases(cache.shape[2], packed.span)})
    runs = {
        f"{PROMPTS} beside {count} that decode {longest} tokens or more, with room for {room}": packed.padding_step(
            tokens, count, room, longest
        )
        for count, room, longest in cases
    }
    runs["a short prompt"] = packed.padding_step(SHORT_PROMPT, 0, packed.block_size)
    runs |= packed.first_runs()
    return {what: partial(run_and_choose, run) for what, run in runs.items()}


def run_and_choose(run: Callable[[], Any]) -> None:
    """As a step of greedy requests does."""
    (logits,) = run()  # [1, n, vocab]
    choose("greedy", torch.empty(logits.shape[1], dtype=torch.int64, device=logits.device), logits[0], None)


@torch.inference_mode()
def reserve(packed: PackedSteps, tokens: int, device: torch.device) -> str | None:
    """Takes the memory of the largest step with prompts now, on the stream that steps run on, and pinned memory of
    all sizes: whoever asks the driver for either waits for the step in flight, and the device then for the next one
    (8B, 600 requests of 2048/128: twelve steps of 250 ms among 270 of 130). What is wrong, or None."""
    try:
        with torch.cuda.device(device):  # Triton launches on the current one
            run_and_choose(packed.padding_step(tokens, packed.requests, packed.span))
            pinned = [host((1 << power,), torch.uint8, device) for power, some in PINNED.items() for _ in range(some)]
            torch.cuda.synchronize(device)
        del pinned  # torch keeps it for those who ask next
    except launch_failures() as error:
        if not is_out_of_memory(error):
            return f"{PROMPTS} failed: {type(error).__name__}: {error}"
        torch.cuda.empty_cache()
        return f"no memory for a step of {tokens} tokens: lower max_num_batched_tokens or kv_cache_memory"
    return None


def notes(captures: CapturedSteps, device: torch.device) -> list[str]:
    """How many graphs there are, how long they took, and whether kernels overlap."""
    sizes = ", ".join(map(str, sorted({rows for rows, _, _ in captures.made})))
    graphs = "CUDA graphs" if device.type == "cuda" else "captured steps, which are direct calls on a CPU,"
    lines = [f"decode: {len(captures.made)} {graphs} for batches of {sizes or 'no size'}, {captures.seconds:.1f} s"]
    problem = pdl_problem(device)
    lines.append(f"programmatic dependent launch: {'on' if problem is None else f'off ({problem})'}")
    for what, failed in captures.failures.items():
        if isinstance(what, str):  # not a capture
            lines.append(f"{what}: failed in its first run: {type(failed).__name__}: {failed}")
    if captures.problem is not None:
        lines.append(f"decode steps without a CUDA graph: {captures.problem}")
    return lines
