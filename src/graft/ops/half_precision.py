"""Whether this CPU multiplies 16-bit matrices fast.

Where it has no instructions for them, torch falls back to a loop whose cost grows with the rows: on a Neoverse-N1 a
bfloat16 GEMM takes 10 times as long as the same GEMM with both matrices widened to float32 for one row, and 160
times as long for 32. What torch tells about the CPU does not decide it (there it claims float16, which is as slow):
it is measured, once a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.base.timers import clocked

NARROW = (torch.bfloat16, torch.float16)
# CPUs that multiply 16-bit matrices take a share of the widened time, those that do not 20 times it and more for the
# rows measured: 4 is far from both, so that noise does not change the answer.
SLOW = 4.0


def widen_problem(*tensors: Tensor | None) -> str | None:
    """None where matmuls of these tensors are faster in float32, else why not."""
    given = [t for t in tensors if t is not None]
    first = given[0]
    if len({t.dtype for t in given}) > 1:
        return f"the dtypes differ: {', '.join(str(t.dtype) for t in given)}"
    if first.dtype not in NARROW:
        return f"the tensors are {first.dtype}"
    if any(t.device.type != "cpu" for t in given):
        return f"the tensors are on {next(t.device for t in given if t.device.type != 'cpu')}"
    return None if slowdown(first.dtype) > SLOW else f"this CPU multiplies {first.dtype} itself"


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """torch.matmul, summed in float32 and rounded once where that is faster."""
    if widen_problem(left, right) is not None:
        return torch.matmul(left, right)
    return torch.matmul(left.to(torch.float32), right.to(torch.float32)).to(left.dtype)


@cache
def slowdown(dtype: torch.dtype) -> float:
    """How many times as long a small GEMM takes as the same one in float32, casts included."""
    # a thread of its own: callers may run under modes (fake tensors, tracing, autocast), which are a thread's own
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure, dtype).result()


def measure(dtype: torch.dtype) -> float:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells, with a C++ stack, that it falls back: what is measured here
        x, w = torch.ones(4, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
        narrow = fastest(lambda: F.linear(x, w))
        return narrow / fastest(lambda: F.linear(x.float(), w.float()).to(dtype))


def fastest(call: Callable[[], object], repeats: int = 5) -> float:
    return min(clocked(call, repeats))
