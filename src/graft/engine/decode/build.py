"""A decode loop for an engine, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graft.base.files import Progress
from graft.engine.decode.buckets import DECODE_PAYS, BatchSizes, bucket_sizes
from graft.engine.decode.buffers import Buffers
from graft.engine.decode.capture import CapturedSteps
from graft.engine.decode.loop import DecodeLoop
from graft.engine.decode.packed import PackedSteps
from graft.engine.options import EngineOptions
from graft.engine.scheduler import Scheduler
from graft.ops.launch import pdl_problem

PROMPTS = "the largest step with prompts"


def loop_problem(device: torch.device, backend: str, options: EngineOptions, ranks: int = 1) -> str | None:
    """Why decode steps are not captured, or None."""
    if options.enforce_eager:
        return "enforce_eager was asked for"
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
    manager, device = scheduler.manager, tensors[0].device
    sizes = bucket_sizes(options.max_num_seqs, options.cudagraph_capture_sizes)
    width = min(manager.blocks_for(context), manager.blocks)  # no table is longer
    buffers = Buffers.make(sizes[-1], width, manager.block_size, manager.blocks, device)
    captures = CapturedSteps(graph, tensors, buffers)
    asked = options.cudagraph_capture_sizes is not None
    steps = BatchSizes(sizes, DECODE_PAYS, sizes if asked else ())
    packed = PackedSteps(graph, tensors, buffers, scheduler.max_num_batched_tokens, captures.packed)
    captures.make_all(steps.used, progress, {PROMPTS: packed.largest(scheduler.max_num_batched_tokens)})
    return DecodeLoop(scheduler, buffers, captures, packed, steps, notes(captures, device))


def notes(captures: CapturedSteps, device: torch.device) -> list[str]:
    """How many graphs there are, how long they took, and whether kernels overlap."""
    sizes = ", ".join(map(str, sorted({rows for rows, _, _ in captures.made})))
    graphs = "CUDA graphs" if device.type == "cuda" else "captured steps, which are direct calls on a CPU,"
    lines = [f"decode: {len(captures.made)} {graphs} for batches of {sizes or 'no size'}, {captures.seconds:.1f} s"]
    problem = pdl_problem(device)
    lines.append(f"programmatic dependent launch: {'on' if problem is None else f'off ({problem})'}")
    if (failed := captures.failures.get(PROMPTS)) is not None:
        lines.append(f"{PROMPTS} failed in its first run: {type(failed).__name__}: {failed}")
    if captures.problem is not None:
        lines.append(f"decode steps without a CUDA graph: {captures.problem}")
    return lines
