"""Elementwise programs through torch.compile: one loop in C++ on a CPU."""

from __future__ import annotations

import linecache
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from graft.ops.elementwise.codegen import COMPARISONS, Kinds, Pattern
from graft.ops.elementwise.layout import Loop, loop_of
from graft.ops.elementwise.program import DTYPES, Call, Ref, parse
from graft.ops.elementwise.reference import FUNCTIONS, kinds_of, returned_dtypes, value_dtypes

# ATen on a CPU rounds the number in these to the tensor's dtype, and in no others; Inductor takes it in float32.
ROUNDED = {"add", "sub", "rsub", *COMPARISONS}


def python_source(text: str, kinds: Kinds) -> str:
    """The program as a Python function of its inputs, one line a value."""
    program, dtypes = parse(text), value_dtypes(text, kinds)
    of = {Ref("i", i): dtype for i, (dtype, _) in enumerate(kinds)}
    of |= {Ref("t", index): dtype for index, dtype in enumerate(dtypes)}
    arguments = ", ".join(f"i{index}" for index in range(program.inputs))
    lines = [f"    t{index} = {as_on_cpu(call, of)}" for index, call in enumerate(program.calls)]
    results = ", ".join(f"t{index}.contiguous()" for index in program.returns)
    return "\n".join([f"def elementwise({arguments}):", *lines, f"    return [{results}]"]) + "\n"


def as_on_cpu(call: Call, dtypes: dict[Ref, torch.dtype]) -> Call:
    """Number arguments rounded where ATen rounds them."""
    dtype = dtypes.get(call.args[0]) if isinstance(call.args[0], Ref) else None
    if call.op not in ROUNDED or dtype not in (torch.float16, torch.bfloat16):
        return call
    args = [a if isinstance(a, Ref) else torch.tensor(a, dtype=dtype).item() for a in call.args]
    return Call(call.op, tuple(args))


@lru_cache(maxsize=1024)
def compiled(program: str, kinds: Kinds, pattern: Pattern) -> Callable[..., list[Tensor]]:
    """One compilation a program, kinds of inputs and pattern of dims, for all sizes; 16-bit values are rounded as in
    eager. The function has code of its own, since torch.compile counts recompilations by code."""
    source = python_source(program, kinds)
    name = f"<graft elementwise {sha256(repr((program, kinds, pattern)).encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {**FUNCTIONS, **DTYPES, "inf": float("inf"), "nan": float("nan")}
    exec(compile(source, name, "exec"), scope)
    # Inductor tries out each instruction set in a subprocess, up to 20 s; the sets it names are trusted instead
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    return torch.compile(
        scope["elementwise"], dynamic=True, fullgraph=True, options={"emulate_precision_casts": True}
    )


@torch.no_grad()
def elementwise_inductor(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    loop = loop_of(inputs)
    if loop.shape.numel() == 0:
        return [torch.empty(loop.shape, dtype=dtype) for dtype in returned_dtypes(program, inputs)]
    function = compiled(program, kinds_of(inputs), loop.pattern)
    results = function(*(merged(t, loop, strides) for t, strides in zip(inputs, loop.strides, strict=True)))
    return [result.expand(loop.sizes).reshape(loop.shape) for result in results]


def merged(tensor: Tensor, loop: Loop, strides: Sequence[int]) -> Tensor:
    """The tensor in the merged loop, of size 1 where it is broadcast; a 0-d one stays weak in type promotion.

    `.data` is no view: torch.compile would guard on the sizes of a view's base, and compile again when they change.
    """
    if tensor.dim() == 0:
        return tensor.data
    sizes = [size if stride else 1 for size, stride in zip(loop.sizes, strides, strict=True)]
    return tensor.as_strided(sizes, strides).data


def inductor_problem(inputs: Sequence[Tensor]) -> str | None:
    other = next((t for t in inputs if t.device.type != "cpu"), None)
    if other is not None:
        return f"compiled for a CPU, but a tensor is on {other.device}"
    if VERSION < (2, 13) and any(t.dtype in (torch.float16, torch.bfloat16) for t in inputs):
        return f"Inductor of torch {torch.__version__} rounds 16-bit values elsewhere than eager"
    return None if has_compiler() else "Inductor needs a C++ compiler, and none is found"


VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


@cache
def has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
