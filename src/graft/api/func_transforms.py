"""Calls inside of `torch.func` transforms: a graph runs kernels on memory, and its wrapped inputs have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from graft.base.errors import TransformRefused

NAMES = {"Vmap": "vmap", "Grad": "grad", "Jvp": "jvp", "Functionalize": "functionalize"}


def transforms_around() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def refuse_func_transforms(values: Sequence[Any], names: Sequence[str], grad: str) -> None:
    """`grad` alone is an input that requires gradients (api/gradients.py), unless they are honoured."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    kinds = [NAMES.get(str(level.key()).rpartition(".")[2], "a transform") for level in stack]
    others = kinds if grad == "honour" else [kind for kind in kinds if kind != "grad"]
    for name, value in zip(names, values, strict=False):
        if not isinstance(value, torch.Tensor):
            continue
        if others and wrapped(value):
            raise TransformRefused(f"torch.func.{others[-1]}", name)
        if forward_ad._current_level >= 0 and not stack and forward_ad.unpack_dual(value).tangent is not None:
            raise TransformRefused("forward-mode differentiation (torch.autograd.forward_ad)", name)
