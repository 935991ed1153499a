"""Elementwise programs in plain torch: one call after another, as the graph they came from ran them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.errors import UsageError
from graft.ops.elementwise.program import SIGNATURES, Program, Ref, parse


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)  # an op's result is its own, also where the dtype is the same already


NAMED = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "silu": F.silu, "softplus": F.softplus, "to": to}
# The op of a program by name: ATen's own, in the spelling of torch.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {n: NAMED.get(n) or getattr(torch, n) for n in SIGNATURES}


def elementwise(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    """→ the returned values, each contiguous and of the loop shape: that of all inputs broadcast together."""
    check_count(program, len(inputs))
    results = run(parse(program), inputs)
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    return [result.expand(shape).contiguous() for result in results]


def run(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    values: list[Tensor] = []

    def resolve(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return inputs[argument.index] if argument.kind == "i" else values[argument.index]
        return argument

    for call in program.calls:
        values.append(FUNCTIONS[call.op](*(resolve(a) for a in call.args)))
    return [values[index] for index in program.returns]


def check_count(program: str, given: int) -> None:
    wanted = parse(program).inputs
    if given != wanted:
        raise UsageError(f"graft::elementwise got {given} inputs, but its program reads {wanted}: {program}")


@lru_cache(maxsize=4096)
def value_dtypes(text: str, kinds: tuple[tuple[torch.dtype, bool], ...]) -> tuple[torch.dtype, ...]:
    """The dtype of every value, by torch's own promotion. A kind is an input's dtype and whether it is 0-d, which
    makes it weaker than tensors with dims."""
    check_count(text, len(kinds))
    program = parse(text)
    whole = Program(program.calls, tuple(range(len(program.calls))))
    inputs = [torch.empty(() if flat else (1,), dtype=dtype, device="meta") for dtype, flat in kinds]
    return tuple(value.dtype for value in run(whole, inputs))


def kinds_of(inputs: Sequence[Tensor]) -> tuple[tuple[torch.dtype, bool], ...]:
    return tuple((t.dtype, t.dim() == 0) for t in inputs)


def returned_dtypes(text: str, inputs: Sequence[Tensor]) -> list[torch.dtype]:
    dtypes = value_dtypes(text, kinds_of(inputs))
    return [dtypes[index] for index in parse(text).returns]
