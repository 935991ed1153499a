"""Tensors of its own that a program marks as requiring gradients, while it is traced without them.

    y = (x * 2).requires_grad_(); return y * 3           eager's result has gradients, a graph's has none
    with torch.enable_grad(): y.requires_grad_(); …      gradients that the program takes itself, which are traced
    y = x * 2 if x.requires_grad else x * 3              eager's answer differs by the call, a graph has one

The first and the last kind are kept in the graph's `meta`, line by line: whoever compiles says so.
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
QUESTIONS = "asked_of_tensors"
SETS: Any = vars(Tensor.__base__)["requires_grad"].__set__
MARKS = (Tensor.requires_grad_, SETS)
FLAGS: Any = {vars(Tensor.__base__)[name].__get__: name for name in ("requires_grad", "is_leaf", "grad_fn")}
ASKS = FLAGS | {getattr(Tensor, name): f"{name}()" for name in ("is_conj", "is_neg", "is_inference")}


class GradientFlags(TorchFunctionMode):
    """`lines`: where the program under trace marks a tensor, gradients being off around it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}  # in order
        self.asked: dict[str, None] = {}  # what the program asks about a tensor that is no matter of its values

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
        if func in ASKS and (frame := program_frame()) is not None and not torch.is_grad_enabled():
            self.asked[f"{ASKS[func]} ({line_of(frame)})"] = None
        return func(*args, **(kwargs or {}))


def asked(tensor: Tensor, requires_grad: bool = True) -> bool:  # noqa: ARG001
    return requires_grad


def program_frame() -> FrameType | None:
    """Who marks or asks; None: torch or graft itself, for tensors that it stands in for."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # torch's own modes
        frame = frame.f_back
    own = frame is not None and str(frame.f_globals.get("__name__")).startswith("graft.")
    return None if own or is_torch(frame) else frame


def questions_asked(gm: GraphModule) -> tuple[str, ...]:
    """What the program asked about tensors in this trace, each with its line."""
    return tuple(gm.meta.get(QUESTIONS, ()))


def gradients_asked(gm: GraphModule) -> tuple[str, ...]:
    """The lines that the trace of this graph kept."""
    return tuple(gm.meta.get(META, ()))
