"""The weights of a mixture's experts, one stacked tensor, packed expert by expert in the formats of linear layers.

    format               weight                    scale
    int8, fp8, int4      [e, rows, bytes]          [e, rows] or [e, rows, groups]: an expert is a weight of packing.py
    q8, q4               [e, tiles, bytes]         [e, rows, 0]: an expert is a weight of tiles.py; gate and up tiles in turn

Gate and up are halves of the rows: where they take turns in the checkpoint (gpt-oss) they are put in order first, and
an expert that lies as [in, out] is read transposed. Beside the result, memory grows by what packing one expert takes.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.weights.pack_rows import KIND, pack_checked
from graft.weights.packing import dequantize
from graft.weights.quantize import QUANTIZERS, abstract
from graft.weights.rounding import Rounding, measure
from graft.weights.tiles import in_graph


@dataclass(frozen=True)
class StackLayout:
    """How experts lie in the checkpoint: transposed, [e, in, out]; their rows being gate and up, perhaps in turns."""

    transposed: bool = False
    gated: bool = False
    interleaved: bool = False


def pack_stacked(
    weight: Tensor, format: str, layout: StackLayout, name: str, search: bool = True
) -> tuple[Tensor, Tensor, Rounding]:
    """weight: [e, …]; format: int8, int4 and fp8 as on a GPU, q8 and q4 in tiles. The worst expert's rounding."""
    made: tuple[Tensor, Tensor] | None = None
    relative = steps = 0.0
    for index, rows in enumerate(experts(weight, layout)):
        q, scale, rounding = pack_expert(rows, format, layout.gated, f"{name}[{index}]", search)
        if made is None:
            made = q.new_empty((len(weight), *q.shape)), scale.new_empty((len(weight), *scale.shape))
        made[0][index], made[1][index] = q, scale
        relative, steps = max(relative, rounding.relative), max(steps, rounding.steps)
    assert made is not None, f"{name} holds no expert"
    return *made, Rounding(relative, steps)


def pack_expert(rows: Tensor, format: str, gated: bool, name: str, search: bool) -> tuple[Tensor, Tensor, Rounding]:
    """One expert [rows, columns], read back and compared."""
    if format in KIND.values():
        packed, rounding = pack_checked(rows, format, gated, name)
        return *in_graph(packed), rounding
    options = {"search": search} if format == "int4" else {}
    q, scale = QUANTIZERS[format](rows, name, **options)
    return q, scale, measure(rows, q, scale, name)


def experts(weight: Tensor, layout: StackLayout) -> Iterator[Tensor]:
    """Each as [rows, columns], gate before up."""
    for index in range(len(weight)):
        rows = weight[index].t() if layout.transposed else weight[index]
        yield in_halves(rows, 0) if layout.interleaved else rows


def in_halves(values: Tensor, dim: int) -> Tensor:
    """Gate and up that take turns along a dim, gate first."""
    even = torch.arange(0, values.shape[dim], 2, device=values.device)
    return torch.cat([values.index_select(dim, even), values.index_select(dim, even + 1)], dim)


def abstract_stack(weight: Tensor, format: str, layout: StackLayout) -> tuple[Tensor, Tensor]:
    """Tensors of the right shape and dtype for a stack on the meta device; int8, int4 or fp8."""
    first = weight[0].t() if layout.transposed else weight[0]
    q, scale = abstract(first, format)
    return q.new_empty((len(weight), *q.shape)), scale.new_empty((len(weight), *scale.shape))


def unpack_expert(
    weight: Tensor, scale: Tensor, expert: int, columns: int, dtype: torch.dtype, gated: bool
) -> Tensor:
    """What one expert's weights stand for, [rows, columns]; gated: its tiles are gate and up in turn."""
    return dequantize(weight[expert], scale[expert], columns, dtype, gated)
