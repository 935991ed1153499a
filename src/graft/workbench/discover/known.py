"""Comparing by value: does a known kernel give what a piece gives, for some order of its inputs?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graft.graph.nodes import placeholders, tensor_val
from graft.workbench.discover.lookup import Existing, Where
from graft.workbench.discover.subgraph import literals_of, made_up_inputs, run_in_float64

EQUAL = 1e-9  # of the largest value: both sides run in float64
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


def look_by_value(gm: GraphModule, known: Sequence[Known]) -> list[Existing]:
    """Those of `known` that give what the piece gives, in float64, for some order of its inputs."""
    given = [node for node in placeholders(gm.graph) if tensor_val(node) is not None]
    values = made_up_inputs(gm) if len(given) == len(placeholders(gm.graph)) <= MOST_TENSORS else None
    if values is None:
        return []
    fitting = [k for k in known if k.tensors == len(values)]
    if not fitting:
        return []
    results = run_in_float64(gm, values)
    numbers = literals_of(gm)[:MOST_NUMBERS]
    found = [k for k in fitting if len(results) == 1 and gives(k, values, numbers, results[0])]
    return [Existing(k.where, k.symbol, k.file, note=k.note) for k in {(k.symbol, k.file): k for k in found}.values()]


def gives(known: Known, values: Sequence[Any], numbers: Sequence[float], wanted: Tensor) -> bool:
    orders = itertools.permutations(values)
    return any(
        same(known, order, chosen, wanted)
        for order in orders
        for chosen in itertools.product(numbers, repeat=known.numbers)
    )


def same(known: Known, tensors: Sequence[Any], numbers: Sequence[float], wanted: Tensor) -> bool:
    if not known.heads or any(tensor.dim() < 4 for tensor in tensors[:3]):
        return equal(known, tensors, numbers, wanted)
    query, key, *rest = tensors
    keys, results = (key, key.transpose(-2, -1)), (wanted, wanted.transpose(-3, -2))
    return any(equal(known, (query, k, *rest), numbers, result) for k in keys for result in results)


def equal(known: Known, tensors: Sequence[Any], numbers: Sequence[float], wanted: Tensor) -> bool:
    try:
        with torch.no_grad():
            got = known.call(*tensors, *numbers)
    except (RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return False  # it does not take inputs of these shapes
    if not isinstance(got, Tensor) or got.shape != wanted.shape or not wanted.numel():
        return False
    return bool((got.double() - wanted).abs().max().item() <= EQUAL * wanted.abs().max().item())
