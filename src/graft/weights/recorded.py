"""Tensors without numbers that remember which tensors of files they stand for.

transformers renames, joins, stacks and transposes the tensors of a checkpoint while it loads a model. Given these
instead of real ones it makes a model whose parameters say where their numbers lie. What has no rule here is computed
with the real numbers, and the parameter that comes of it is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from graft.weights.sources import (
    CutSource,
    FileSource,
    JoinedSource,
    StackedSource,
    SwappedSource,
    WeightFile,
    WeightSource,
    whole_box,
)

aten = torch.ops.aten


class RecordedTensor(Tensor):
    """On the CPU by its device, but with no memory behind it."""

    source: WeightSource

    @staticmethod
    def __new__(cls: Any, source: WeightSource, dtype: torch.dtype) -> RecordedTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=dtype, device=torch.device("cpu"))
        made.source = source
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyrefly: ignore
        given = kwargs or {}
        rule = RULES.get(func)
        made = None if rule is None else rule(*args, **given)
        if made is not None:
            return made
        return func(*real(args), **real(given))

    def numbers(self) -> Tensor:
        made = torch.empty(self.shape, dtype=self.dtype)
        self.source.read(whole_box(tuple(self.shape)), made)
        return made

    def __repr__(self, **_: Any) -> str:
        return f"RecordedTensor({list(self.shape)}, {self.dtype})"


def real(given: Any) -> Any:
    """With their numbers, in whatever tuples, lists and keywords they lie."""
    if isinstance(given, RecordedTensor):
        return given.numbers()
    if isinstance(given, Mapping):
        return {name: real(one) for name, one in given.items()}
    return type(given)(real(one) for one in given) if isinstance(given, (tuple, list)) else given


def recorded_tensors(files: list[WeightFile]) -> dict[str, RecordedTensor]:
    """Every tensor of the files, by name."""
    return {
        name: RecordedTensor(FileSource(file, place), place.dtype)
        for file in files
        for name, place in file.tensors.items()
    }


# ── what becomes of the sources; None where the real numbers are needed ─────────────────────────────────────────


def same(x: RecordedTensor, *_: Any, **__: Any) -> RecordedTensor:
    return RecordedTensor(x.source, x.dtype)


def converted(x: RecordedTensor, *, dtype: Any = None, device: Any = None, **_: Any) -> RecordedTensor | None:
    if device is not None and torch.device(device).type != "cpu":
        return None
    return RecordedTensor(x.source, dtype or x.dtype)


def together(parts: Any) -> bool:
    return all(isinstance(part, RecordedTensor) for part in parts) and len({part.dtype for part in parts}) == 1


def joined(parts: Any, dim: int = 0) -> RecordedTensor | None:
    if not together(parts):
        return None
    source = JoinedSource(tuple(part.source for part in parts), dim % parts[0].dim())
    return RecordedTensor(source, parts[0].dtype)


def stacked(parts: Any, dim: int = 0) -> RecordedTensor | None:
    if not together(parts):
        return None
    source = StackedSource(tuple(part.source for part in parts), dim % (parts[0].dim() + 1))
    return RecordedTensor(source, parts[0].dtype)


def swapped(x: RecordedTensor, one: int, other: int) -> RecordedTensor:
    return RecordedTensor(SwappedSource(x.source, (one % x.dim(), other % x.dim())), x.dtype)


def turned(x: RecordedTensor) -> RecordedTensor | None:
    return swapped(x, 0, 1) if x.dim() == 2 else None


def cut(x: RecordedTensor, dim: int, first: int, last: int) -> RecordedTensor:
    return RecordedTensor(CutSource(x.source, dim % x.dim(), first, last), x.dtype)


def sliced(
    x: RecordedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> RecordedTensor | None:
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    return cut(x, dim, first, max(first, last)) if step == 1 else None


def split(x: RecordedTensor, size: int, dim: int = 0) -> list[RecordedTensor]:
    length = x.shape[dim]
    return [cut(x, dim, at, min(at + size, length)) for at in range(0, length, size)]


def split_sizes(x: RecordedTensor, sizes: list[int], dim: int = 0) -> list[RecordedTensor]:
    edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    return [cut(x, dim, *pair) for pair in pairwise(edges)]


RULES: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default), same),
    aten._to_copy.default: converted,
    aten.cat.default: joined,
    aten.stack.default: stacked,
    aten.transpose.int: swapped,
    aten.t.default: turned,
    aten.slice.Tensor: sliced,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_sizes,
}
