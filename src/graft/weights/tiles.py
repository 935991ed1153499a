"""Packed tiles as a graph holds them: the weight is uint8 [tiles, bytes of a tile], its scale is empty, [rows, 0].

The scales lie in the tiles (native_packing.py), so that the second tensor says one thing: how many of the padded rows
there are, which is the first size of every other scale too. Which kind it is follows from the bytes of a tile and the
columns; whether gate and up tiles take turns is known to the call, which has the activation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.base.errors import PackingError
from graft.weights.native_tiles import BLOCK, STEPS, TILE, TiledWeight, unpack, unpack_blocks

TILES = torch.uint8
BLOCK_BYTES = {"q8": TILE * (2 + BLOCK), "q4": TILE * (4 + BLOCK // 2)}
COLUMN_BYTES = {"f32": TILE * 4, "bf16": TILE * 2}


def in_graph(packed: TiledWeight) -> tuple[Tensor, Tensor]:
    """The weight and the scale of graft::fused_linear."""
    parts = 2 if packed.gated else 1
    tiles = parts * -(-(packed.rows // parts) // TILE)
    return packed.data.view(tiles, -1), packed.data.new_empty((packed.rows, 0), dtype=torch.float16)


def kind_of(tile_bytes: int, columns: int) -> str:
    blocks = {kind: -(-columns // BLOCK) * size for kind, size in BLOCK_BYTES.items()}
    floats = {kind: -(-columns // STEPS[kind]) * STEPS[kind] * size for kind, size in COLUMN_BYTES.items()}
    found = next((kind for kind, size in (blocks | floats).items() if size == tile_bytes), None)
    if found is None:
        raise PackingError(f"tiles of {tile_bytes} bytes hold no rows of {columns} columns in any kind of packing")
    return found


def tiles_problem(weight: Tensor) -> str | None:
    """Why native kernels cannot read a quantized weight as it lies, or None."""
    if weight.dtype is TILES:
        return None
    return f"the weight is {weight.dtype}, quantized for a GPU; the native backend has tiles of its own"


def from_graph(weight: Tensor, scale: Tensor, columns: int, gated: bool) -> TiledWeight:
    kind = kind_of(weight.shape[1], columns)
    return TiledWeight(kind, scale.shape[0], columns, gated, weight.flatten())


def unpack_tiles(weight: Tensor, scale: Tensor, columns: int, gated: bool) -> Tensor:
    """What the tiles stand for: float32 [rows, columns]."""
    return unpack(from_graph(weight, scale, columns, gated))


def unpack_rows(weight: Tensor, scale: Tensor, ids: Tensor, columns: int) -> Tensor:
    """Some rows of a weight that is not gated: float32 [*ids, columns]."""
    kind, flat = kind_of(weight.shape[1], columns), ids.flatten()
    tiles = weight[flat // TILE]  # [ids, bytes]
    if kind in BLOCK_BYTES:
        wide = unpack_blocks(tiles.view(len(flat), -1, BLOCK_BYTES[kind]))  # [ids, 16, columns]
        rows = wide[torch.arange(len(flat), device=ids.device), flat % TILE]
        return rows[:, :columns].view(*ids.shape, columns)
    return unpack_tiles(weight, scale, columns, False)[ids]
