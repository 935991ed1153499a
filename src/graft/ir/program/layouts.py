"""Tensors of the caller or of the module that a forward gives another shape, other strides or other memory, in place.

`x.t_()`, `transpose_`, `unsqueeze_`, `squeeze_`, `resize_`, `set_`, `x.data = …`: torch.export replays some, drops
others, and Inductor permutes the data instead of the strides. They are refused, all alike, before there is a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.base.errors import CaptureError
from graft.ir.storage import storage_id


def layout(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage_id(tensor)


@dataclass(frozen=True)
class Layouts:
    """How tensors lie in memory at one time, by the names that users have for them."""

    known: tuple[tuple[str, Tensor, tuple[Any, ...]], ...]

    @classmethod
    def of(cls, arguments: Mapping[str, Any], module: torch.nn.Module) -> Layouts:
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        given = [*named(arguments, "the argument "), *((f"self.{name}", tensor) for name, tensor in state.items())]
        return cls(tuple((name, tensor, layout(tensor)) for name, tensor in given))

    def refuse_changes(self) -> None:
        for name, tensor, before in self.known:
            # text: a symbolic size is compared without a guard
            if str(layout(tensor)) != str(before):
                raise CaptureError(
                    f"forward changes the shape, the strides or the memory of {name} in place"
                    f" (shape {list(before[0])}, then {list(tensor.shape)}), which a compiled module cannot do to the"
                    " caller's tensor. Change a view of it (x = x.view_as(x)), or write values with copy_"
                )


def named(value: Any, path: str) -> list[tuple[str, Tensor]]:
    """The tensors in nested containers, by path."""
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        first = path.endswith(" ")
        items = [(f"{path}{key}" if first else f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return []
    return [found for name, item in items for found in named(item, name)]
