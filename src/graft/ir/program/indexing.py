"""Writes at a position that is a 0-d tensor, as a graph can hold them.

    eager:  cache[:, :, pos] = x            pos: a 0-d integer tensor; eager reads its value, which tracing cannot
    here:   cache.index_put_([None, None, pos], x)

The same for a number that varies (`Dim.DYNAMIC` for an int), which torch would fix: it becomes a `select`.
Slice bounds that are 0-d tensors (`cache[:, :, pos : pos + 1] = x`) are read with `item()`: a size known at run time.
`masked_select(x, mask)` with a mask that is larger than `x` selects from `x` expanded: torch takes the number of
elements of `x` for the most that there can be, and a graph asserts that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graft.ir.nodes import TORCH
from graft.ir.storage import storage_id


def is_scalar_index(item: object) -> bool:
    integral = isinstance(item, Tensor) and item.dim() == 0 and not item.is_floating_point() and not item.is_complex()
    return integral and item.dtype != torch.bool


class TensorPositions(TorchFunctionMode):
    """Within it, `tensor[index] = value` takes 0-d tensors in `index` without reading them.

    It also notes in whose memory `contiguous()`, `stride()` and `storage_offset()` were asked for: the answer is a
    number in the graph, or is not in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int | None, int] = {}  # memory → number of the input
        self.values: list[Any] = []  # the inputs
        self.layouts: set[int] = set()  # inputs of which the program has asked whether they are contiguous
        self.strides: set[int] = set()  # those of whose strides it asked more
        self.offsets: set[int] = set()  # those of which it asked where they start in their storage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LAYOUT and self.inputs and asked_by_program():
            self.note(func, args, kwargs or {})
        if func is Tensor.__setitem__:
            target, index, value = args
            items = list(index) if isinstance(index, tuple) else [index]
            if any(isinstance(item, slice) and bounds_in_tensors(item) for item in items):
                items = [read_bounds(item) if isinstance(item, slice) else item for item in items]
                args = (target, tuple(items), value)
            varies = any(is_scalar_index(item) or isinstance(item, torch.SymInt) for item in items)
            if varies and not mixed(items):
                return write_at(target, items, value)
        if func in MASKED:
            args, kwargs = arguments_of_masked(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        index = self.inputs.get(storage_id(args[0]))
        if index is None:
            return
        if func is Tensor.storage_offset:
            self.offsets.add(index)
            return
        self.layouts.add(index)
        plain = {torch.contiguous_format} >= {*args[1:], *kwargs.values()}
        if func is Tensor.stride or not plain or args[0] is not self.values[index]:
            self.strides.add(index)


MASKED = (torch.masked_select, Tensor.masked_select)
LAYOUT = (Tensor.contiguous, Tensor.is_contiguous, Tensor.stride, Tensor.storage_offset)
OWN = str(Path(__file__).parents[2])
MODES = ("non_strict_utils.py", "proxy_tensor.py", "overrides.py")  # what torch puts between a program and this mode


def asked_by_program() -> bool:
    """The call comes from the program and not from torch, which asks whenever it computes strides, nor from here."""
    frame = sys._getframe(2)
    while frame is not None and between(frame):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith((TORCH, OWN))


def between(frame: FrameType) -> bool:
    """It is of torch's handing on to modes, or of another mode."""
    return frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.endswith(MODES)


def arguments_of_masked(input: Tensor, mask: Tensor, **rest: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (expanded(input, mask), mask), rest


def expanded(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in the sizes that the mask has in dims where `x` has none, or one element; other sizes are left alone."""
    mine = [1] * (mask.dim() - x.dim()) + list(x.shape)
    theirs = [1] * (x.dim() - mask.dim()) + list(mask.shape)
    pairs = zip(mine, theirs, strict=True)
    sizes = [other if isinstance(size, int) and size == 1 else size for size, other in pairs]
    grows = any(new is not old for new, old in zip(sizes, mine, strict=True))
    return x.expand(sizes) if grows or len(sizes) > x.dim() else x


def bounds_in_tensors(item: slice) -> bool:
    return any(is_scalar_index(bound) for bound in (item.start, item.stop, item.step))


def read_bounds(item: slice) -> slice:
    start, stop, step = (b.item() if is_scalar_index(b) else b for b in (item.start, item.stop, item.step))
    return slice(start, stop, step)


def mixed(items: list[Any]) -> bool:
    """Beside other tensors or lists, eager takes a 0-d tensor for a number; index_put_ would broadcast it instead."""
    return any(isinstance(item, list) or (isinstance(item, Tensor) and not is_scalar_index(item)) for item in items)


def write_at(target: Tensor, items: list[Any], value: Any) -> None:
    """The numbers, slices and new dims of an index as a view of `target`, then one write at the tensors."""
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        ellipsis_at = next(i for i, item in enumerate(items) if item is Ellipsis)
        missing = target.dim() - sum(item is not None and item is not Ellipsis for item in items)
        items = [*items[:ellipsis_at], *[slice(None)] * missing, *items[ellipsis_at + 1 :]]
    view = view_at(target, items)
    # numbers are gone from the view's dims, new dims are in it
    positions: list[Tensor | None] = [
        item if isinstance(item, Tensor) else None for item in items if not isinstance(item, (int, torch.SymInt))
    ]
    given = torch.as_tensor(value, device=target.device).to(target.dtype)
    sizes = [*(s for s, p in zip(view.shape, positions, strict=False) if p is None), *view.shape[len(positions) :]]
    while given.dim() > len(sizes) and given.shape[0] == 1:  # as eager does
        given = given[0]
    if any(position is not None for position in positions):
        torch.ops.aten.index_put_(view, positions, given)
    else:
        view.copy_(given)


def view_at(target: Tensor, items: list[Any]) -> Tensor:
    """`target` at the numbers, slices and new dims of an index; whole in the dims where a tensor stands."""
    view, dim = target, 0
    for item in items:
        if isinstance(item, (int, torch.SymInt)):
            view = torch.select(view, dim, item)
            continue
        if item is None:
            view = view.unsqueeze(dim)
        elif isinstance(item, slice) and item != slice(None):
            view = view[(slice(None),) * dim + (item,)]
        dim += 1
    return view
