"""Comparing by value: does a known kernel give what a piece gives, for some order of its inputs?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graft.ir.nodes import output_node, placeholders, tensor_val
from graft.workbench.discover.lookup import Existing, Where
from graft.workbench.discover.subgraph import LARGEST, literals_of, made_up_inputs, run_in_float64

EQUAL = 1e-9  # of the largest value: both sides run in float64
EQUAL_FLOAT32 = 1e-5  # where another's kernel takes nothing wider
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError, NotImplementedError, AssertionError)
MOST_TENSORS, MOST_NUMBERS = 5, 6


@dataclass(frozen=True)
class Known:
    """`call` takes `tensors` tensors, then `numbers` numbers. heads: of attention, whose second tensor and whose
    result may be the transposed ones in a piece."""

    where: Where
    symbol: str
    file: str
    call: Callable[..., Any]
    tensors: int
    numbers: int = 0
    note: str = ""
    heads: bool = False


@dataclass(frozen=True)
class Uncompared:
    """Why nothing could be compared, and the dump or the test that would tell; both '' where it could."""

    reason: str = ""
    next_step: str = ""


COMPARED = Uncompared()
SIZED = "its `reference` (--json) in a file, sizes as numbers, and graft search FILE.py:function"
WIDE = f"its `reference` (--json) in parts of {MOST_TENSORS} inputs in a file, and graft search FILE.py:function"
LARGE = "graft discover on a dump of a smaller model of its family (graft models names a tiny one; graft dump)"


def look_by_value(gm: GraphModule, known: Sequence[Known]) -> tuple[list[Existing], Uncompared]:
    """Those of `known` that give what the piece gives, in float64, for some order of its inputs; and why nothing
    could be compared, if so."""
    given = placeholders(gm.graph)
    if any(tensor_val(node) is None for node in given):
        return [], Uncompared("it takes sizes as inputs", SIZED)
    if len(given) > MOST_TENSORS:
        return [], Uncompared(f"it has {len(given)} inputs, more than {MOST_TENSORS}", WIDE)
    if isinstance(output_node(gm.graph).args[0], (list, tuple)):
        return [], COMPARED  # kernels that are known here give one result
    fitting = [k for k in known if k.tensors == len(given)]
    values = made_up_inputs(gm) if fitting else []
    if values is None:
        return [], Uncompared(f"an input has more than {LARGEST:,} elements", LARGE)
    (wanted,) = run_in_float64(gm, values) if fitting else (None,)
    numbers = literals_of(gm)[:MOST_NUMBERS]
    found = [k for k in fitting if wanted is not None and gives(k, values, numbers, wanted)]
    by_name = {(k.symbol, k.file): k for k in found}
    return [Existing(k.where, k.symbol, k.file, note=k.note) for k in by_name.values()], COMPARED


def gives(known: Known, values: Sequence[Any], numbers: Sequence[float], wanted: Tensor) -> bool:
    return any(same(known, tensors, chosen, wanted) for _, tensors, chosen in ways(known, values, numbers))


def filling(
    known: Known, values: Sequence[Any], numbers: Sequence[float], wanted: Tensor
) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
    """Which inputs it takes in what order, and with what numbers, to give `wanted` as it stands."""
    for order, tensors, chosen in ways(known, values, numbers[:MOST_NUMBERS]):
        if equal(known, tensors, chosen, wanted):
            return order, chosen
    return None


def ways(
    known: Known, values: Sequence[Any], numbers: Sequence[float]
) -> Iterator[tuple[tuple[int, ...], list[Any], tuple[float, ...]]]:
    """Every order of the inputs with every choice of numbers."""
    for order in itertools.permutations(range(len(values))):
        for chosen in itertools.product(numbers, repeat=known.numbers):
            yield order, [values[index] for index in order], chosen


def same(known: Known, tensors: Sequence[Any], numbers: Sequence[float], wanted: Tensor) -> bool:
    if not known.heads or any(tensor.dim() < 4 for tensor in tensors[:3]):
        return equal(known, tensors, numbers, wanted)
    query, key, *rest = tensors
    keys, results = (key, key.transpose(-2, -1)), (wanted, wanted.transpose(-3, -2))
    return any(equal(known, (query, k, *rest), numbers, result) for k in keys for result in results)


def equal(known: Known, tensors: Sequence[Any], numbers: Sequence[float], wanted: Tensor) -> bool:
    got, allowed = given_by(known, tensors, numbers), EQUAL
    if got is None and known.where == "installed":
        narrow = [t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]
        got, allowed = given_by(known, narrow, numbers), EQUAL_FLOAT32
    if not isinstance(got, Tensor) or got.shape != wanted.shape or not wanted.numel():
        return False
    return bool((got.double() - wanted).abs().max().item() <= allowed * wanted.abs().max().item())


def given_by(known: Known, tensors: Sequence[Any], numbers: Sequence[float]) -> Any:
    """None where it does not take inputs of these shapes or this dtype. Another's op gets copies."""
    if known.where == "installed":
        tensors = [t.clone() if isinstance(t, Tensor) else t for t in tensors]
    try:
        with torch.no_grad():
            return known.call(*tensors, *numbers)
    except REFUSALS:
        return None
