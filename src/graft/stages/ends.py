"""Where a run ended before its end: in which stage, doing what, with which error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from graft.ir.nodes import FRAME, TORCH
from graft.stages.kernels import read_source
from graft.stages.story import StoryEnd

if TYPE_CHECKING:
    from graft.stages.watch import StageWatch

COMPILER = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx.experimental",
)  # raise errors of its own
MOST = 300  # characters of an error
FAKE = re.compile(r"with fake tensors: .*: got (\w+)\((['\"])(.*)\2\)", re.S)


def ended(watch: StageWatch, error: BaseException, index: int) -> StoryEnd:
    told = first_line(error)
    if not torch.is_grad_enabled() and "does not require grad" in told:
        told += " (a story's calls are made without gradients)"
    compiler = type(error).__module__.startswith(COMPILER)
    if compiler and isinstance(error.__cause__, Exception):
        told = first_line(error.__cause__)
    reached = watch.reached
    if reached.stage > 1:
        return StoryEnd(reached.stage, reached.doing, told)
    if compiler:
        guards = type(error).__name__ == "ConstraintViolationError"  # behind all that was compiled
        return StoryEnd(1, "making guards" if guards else "tracing", told)
    if kernels := checked_by(watch, told):
        return StoryEnd(6, f"running call {index + 1}, in {' or '.join(kernels)}", told)
    if reached.failed is not None and reached.failed[0] is error:
        return StoryEnd(6, reached.failed[1], told)
    return StoryEnd(0, f"running call {index + 1}: the program itself raised", told)


def checked_by(watch: StageWatch, told: str) -> list[str]:
    """The kernels that hold the check of an index which failed: `index out of bounds: 0 <= tmp7 < 4L`."""
    failed = re.search(r"index out of bounds: .*", told)
    code = [row.payload for row in watch.trace.of("inductor_output_code")] if failed else []
    kernels = [kernel for text in code for kernel in read_source(text)]
    return [kernel.name for kernel in kernels if failed and failed[0] in kernel.source]


def first_line(error: BaseException) -> str:
    """With the second line, which is the reason where the first says what was tried, and the program's line."""
    text, _, stack = str(error).partition("from user code")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if found := FAKE.search(text):  # the operands come first, and are long
        lines = [f"{found[1]}: {found[3]}"]
    told = f"{type(error).__name__}: {shortened(' '.join(lines[:2]))}" if lines else type(error).__name__
    frames = [frame for frame in FRAME.findall(stack) if not frame[0].startswith(TORCH)]
    return f"{told} ({Path(frames[-1][0]).name}:{frames[-1][1]})" if frames else told


def shortened(text: str) -> str:
    return text if len(text) <= MOST else f"{text[:MOST].rpartition(' ')[0] or text[:MOST]} …"
