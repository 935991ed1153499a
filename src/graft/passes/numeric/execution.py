"""How a piece runs: as it is, in another dtype, and in float64 as the yardstick."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from graft.base.errors import GraftError
from graft.ir.nodes import OpOverload
from graft.ops import OPS
from graft.ops.cases import UNIT
from graft.passes.numeric.inputs import widened

RUN_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, GraftError)
CONTRACTING = ("linear", "mm", "attention", "matvec", "expert", "moe", "einsum")  # in the names of ops


class Execution:
    """Runs a piece and notes what its tolerance depends on, the longest reduction and the coarsest dtype, and how
    many multiplications and elements it took. `retype` is laid over the dtypes that calls name."""

    def __init__(self, retype: Mapping[torch.dtype, torch.dtype] | None = None) -> None:
        self.retype = retype or {}
        self.longest = 1
        self.coarsest = torch.float64
        self.work = 0

    def call(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = self.run(target, args, kwargs)
        given = [t for t in tensors([*args, *kwargs.values()]) if t.dim()]
        contracts = is_contracting(target)
        for made in tensors(result):
            shrunk = max((t.numel() // max(made.numel(), 1) for t in given), default=1)
            last = max((t.shape[-1] for t in given), default=1)
            self.longest = max(self.longest, shrunk, last)
            self.work += made.numel() * (last if contracts else 1)
            if made.dtype in UNIT and UNIT[made.dtype] > UNIT[self.coarsest]:
                self.coarsest = made.dtype
        return result

    def other_dtype(self, value: Any) -> Any:
        return self.retype.get(value, value) if isinstance(value, torch.dtype) else value

    def run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The same, and nothing is noted."""
        if self.retype:
            args, kwargs = map_aggregate(args, self.other_dtype), map_aggregate(kwargs, self.other_dtype)
        return on_cpu(target, args, kwargs)


@cache
def is_contracting(target: Any) -> bool:
    return any(part in str(target) for part in CONTRACTING)


def on_cpu(target: Any, args: Any, kwargs: Any) -> Any:
    """Calls an op; what was recorded for the meta device is made on the CPU.

    A graph captured for another device may call what the CPU lacks for whole numbers (histc): floats stand in.
    """
    args, kwargs = map_aggregate(args, off_meta), map_aggregate(kwargs, off_meta)
    try:
        return target(*args, **kwargs)
    except NotImplementedError:
        whole = next((t.dtype for t in tensors(list(args)) if not t.is_floating_point()), None)
        if whole is None:
            raise
        return target(*map_aggregate(args, as_float64), **kwargs).to(whole)


def as_float64(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else value


def off_meta(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def in_float64(target: Any, args: Any, kwargs: Any) -> Any:
    """Calls an op with every floating dtype as float64; graft's ops run as their references."""
    if isinstance(target, OpOverload) and target.namespace == "graft":
        target = OPS[target._schema.name.removeprefix("graft::")].reference
    try:
        with Float64():
            return on_cpu(target, map_aggregate(args, wide), map_aggregate(kwargs, wide))
    except RuntimeError:  # no float64 kernel (_grouped_mm): float32 is as exact as it gets
        return map_aggregate(on_cpu(target, map_aggregate(args, single), kwargs), widened)


def single(value: Any) -> Any:
    wide_tensor = isinstance(value, torch.Tensor) and value.dtype is torch.float64
    return value.to(torch.float32) if wide_tensor else value


class Float64(TorchFunctionMode):
    """Whatever floating dtype torch is asked for, it gives float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NARROWING:
            return args[0].double()
        return func(*map_aggregate(tuple(args), wide), **map_aggregate(dict(kwargs or {}), wide))


NARROWING = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def wide(value: Any) -> Any:
    narrow = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if narrow else value


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
