"""Tables of token embeddings that share their packed rows with the output head."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case, randn
from graft.weights.native_tiles import pack
from graft.weights.tiles import in_graph


def make(
    kind: str,
    rows: int,
    columns: int,
    ids: tuple[int, ...],
    device: str,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Any, ...]:
    weight, scale = in_graph(pack(randn((rows, columns), "cpu", torch.float32, generator), kind))
    chosen = torch.randint(rows, ids, generator=generator)
    chosen.view(-1)[0] = rows - 1
    return weight.to(device), scale.to(device), chosen.to(device), columns, dtype


CASES = [
    Case("smollm2-135m, q8, decode", partial(make, "q8", 320, 576, (1, 1)), 1),
    Case("q4, 5 tokens", partial(make, "q4", 64, 576, (1, 5)), 2),
    Case("q8, rows and columns of no whole tile", partial(make, "q8", 41, 72, (1, 7)), 1),
    Case("q4, rows and columns of no whole tile", partial(make, "q4", 41, 40, (1, 7)), 2),
]
