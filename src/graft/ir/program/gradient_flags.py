"""Tensors of its own that a program marks as requiring gradients, while it is traced without them.

    y = (x * 2).requires_grad_(); return y * 3           eager's result has gradients, a graph's has none
    with torch.enable_grad(): y.requires_grad_(); …      gradients that the program takes itself, which are traced

The first kind is kept in the graph's `meta`, line by line: whoever compiles says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from graft.ir.program.callers import is_torch, line_of

META = "gradients_asked"
SETS: Any = vars(Tensor.__base__)["requires_grad"].__set__
MARKS = (Tensor.requires_grad_, SETS)


class GradientFlags(TorchFunctionMode):
    """`lines`: where the program under trace marks a tensor, gradients being off around it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}  # in order

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in MARKS and not torch.is_grad_enabled() and asked(*args, **(kwargs or {})):
            frame = program_frame()
            if frame is not None:
                self.lines[line_of(frame)] = None
        return func(*args, **(kwargs or {}))


def asked(tensor: Tensor, requires_grad: bool = True) -> bool:  # noqa: ARG001
    return requires_grad


def program_frame() -> FrameType | None:
    """Who marks it; None: torch itself, for parameters that it stands in for."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # torch's own modes
        frame = frame.f_back
    return None if is_torch(frame) else frame


def gradients_asked(gm: GraphModule) -> tuple[str, ...]:
    """The lines that the trace of this graph kept."""
    return tuple(gm.meta.get(META, ()))
