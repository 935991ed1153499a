"""Wrong variants of one call, as a mistaken rewrite would have it; what a check must find.

Faults of results (sign, factor, shift, a row, a head, a cast, NaN) and of arguments (swapped, in another order, left
out, another literal), for all inputs, or for one token, above 64, at 37, one dtype, strided inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graft.ir.evaluate import RecordedCall

# ── faults of a result: `(result, first tensor argument) → result` ──────────────────────────────────────────────────


def rows(value: Tensor) -> int:
    return value.numel() // max(value.shape[-1], 1) if value.dim() else 1


def when(condition: Callable[[Tensor, Tensor], bool], factor: float = 1.03) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda made, given: made * factor if condition(made, given) else made


def last_row(made: Tensor, _: Tensor) -> Tensor:
    wrong = made.clone()
    wrong.view(-1, wrong.shape[-1])[-1] *= 1.03
    return wrong


RESULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sign": lambda made, _: -made,
    "a thousandth more": lambda made, _: made * 1.001,
    "an offset": lambda made, _: made + 0.01,
    "shifted by one": lambda made, _: made.roll(1, -1),
    "the last row": last_row,
    "clamped at 4": lambda made, _: made.clamp(-4, 4),
    "cast to bfloat16 and back": lambda made, _: made.bfloat16().to(made.dtype),
    "NaN swallowed": lambda made, _: torch.where(made.isnan(), 0, made),
    "one token": when(lambda made, _: rows(made) == 1),
    "above 64 tokens": when(lambda made, _: max(made.shape[:-1], default=1) > 64),
    "at 37 tokens": when(lambda made, _: 37 in made.shape[:-1]),
    "in bfloat16": when(lambda made, _: made.dtype is torch.bfloat16),
    "in float16": when(lambda made, _: made.dtype is torch.float16),
    "strided": when(lambda _, given: not given.is_contiguous()),
    "offset in memory": when(lambda _, given: given.storage_offset() == 3),
    "above 5": lambda made, _: torch.where(made > 5, made * 1.05, made),
    "another head": lambda made, _: in_another_order(made) if made.dim() > 1 else -made,
}


class Stale:
    """Gives the first result of each shape and dtype again."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def __call__(self, made: Tensor, _: Tensor) -> Tensor:
        return self.kept.setdefault((made.shape, made.dtype), made.clone())


def faulty_result(call: RecordedCall, fault: Callable[[Tensor, Tensor], Tensor]) -> RecordedCall:
    def target(*args: Any, **kwargs: Any) -> Any:
        given = next((a for a in args if isinstance(a, Tensor)), torch.zeros(1))
        result = call.target(*args, **kwargs)
        first, more = (result, None) if isinstance(result, Tensor) else (result[0], result[1:])
        wrong = fault(first, given)
        return wrong if more is None else (wrong, *more)

    return replace(call, target=target)


# ── faults of arguments ─────────────────────────────────────────────────────────────────────────────────────────────


def faulty_arguments(call: RecordedCall) -> Iterator[tuple[str, RecordedCall]]:
    args = list(call.args)
    for index in range(len(args) - 1):
        both = args[index], args[index + 1]
        nodes = all(isinstance(a, Node) for a in both) and both[0] is not both[1] and alike(*both)
        if nodes and str(call.target) not in ("aten.mul.Tensor", "aten.add.Tensor"):
            yield f"arguments {index} and {index + 1} swapped", replace(call, args=swapped(args, index))
    for index, value in enumerate(args):
        for what, other in other_literals(value):
            yield f"argument {index} {what}", replace(call, args=(*args[:index], other, *args[index + 1 :]))
    for key, value in call.kwargs.items():
        for what, other in other_literals(value):
            yield f"{key} {what}", replace(call, kwargs={**call.kwargs, key: other})


def faulty_tensors(call: RecordedCall) -> Iterator[tuple[str, RecordedCall]]:
    """One tensor argument in another order (of weights, of heads), or left out where it may be (a mask, a bias)."""
    schema = getattr(call.target, "_schema", None)
    kinds = [str(argument.type) for argument in schema.arguments] if schema else []
    for index, value in enumerate(call.args):
        given = value.meta.get("val") if isinstance(value, Node) else None
        if not isinstance(given, Tensor) or not given.is_floating_point() or not given.dim():
            continue
        yield f"argument {index} in another order", replace(call, target=changed(call, index, in_another_order))
        if index < len(kinds) and kinds[index].startswith("Optional"):
            yield f"argument {index} left out", replace(call, target=changed(call, index, lambda _: None))


def in_another_order(value: Tensor) -> Tensor:
    """Its rows, where it has several: of a weight the outputs, of attention the heads."""
    dim = 1 if value.dim() == 4 else -2 if value.dim() > 1 else 0
    return value.roll(1, dim)


def changed(call: RecordedCall, index: int, change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def target(*args: Any, **kwargs: Any) -> Any:
        return call.target(*args[:index], change(args[index]), *args[index + 1 :], **kwargs)

    return target


def faults_of(call: RecordedCall, value: Any) -> Iterator[tuple[str, RecordedCall]]:
    """Every wrong variant of one call whose recorded result is `value`."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(first, Tensor) and first.is_floating_point() and not str(call.target).startswith("<built-in"):
        yield from ((name, faulty_result(call, fault)) for name, fault in RESULTS.items())
        yield "stale", faulty_result(call, Stale())
    yield from faulty_arguments(call)
    yield from faulty_tensors(call)


def alike(one: Any, other: Any) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    return isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape


def swapped(args: list[Any], index: int) -> tuple[Any, ...]:
    return (*args[:index], args[index + 1], args[index], *args[index + 2 :])


def other_literals(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, float):
        yield "doubled", 2 * value + 1e-9
        yield "a percent more", 1.01 * value + 1e-9
    elif isinstance(value, int):
        yield "one more", value + 1
        yield "one less", value - 1
    elif value in ("silu", "gelu", "gelu_tanh"):
        yield "another function", "gelu" if value == "silu" else "silu"
