"""Tensors that are negated when they are read (`z.conj().imag`), which Inductor's code takes as they lie in memory.

So do stock `torch.compile` and AOTAutograd's caches (torch 2.11 to 2.13): x + 1 gives 1 - x, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from graft.base.errors import UsageError
from graft.ir.nodes import leaves


def refuse_negative(tensors: Iterable[tuple[str, Any]]) -> None:
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_neg():
            raise UsageError(
                f"{name} is negated when it is read (a lazy view, as z.conj().imag is), and Inductor's code reads it"
                " as it lies in memory; pass resolve_neg() of it, or use backend='eager'"
            )


def without_negative(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, which refuses such inputs before anything runs."""

    @functools.wraps(compiled)  # torch asks for attributes of it
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_negative((f"input {index}", value) for index, value in enumerate(leaves((args, kwargs))))
        return compiled(*args, **kwargs)

    return call
