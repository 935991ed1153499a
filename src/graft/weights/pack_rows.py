"""Float weights packed piece by piece, each read back and compared: memory grows by a few MiB beside the result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from graft.base.errors import QuantizationError
from graft.weights.native_tiles import BLOCK, TILE, TiledWeight, from_tiles, pack, unpack
from graft.weights.quantize import PIECE, WORKING
from graft.weights.rounding import HALF, Rounding
from graft.weights.tiles import BLOCK_BYTES

KIND = {"int8": "q8", "int4": "q4"}
HALF_UNIT = 2.0**-11  # what rounding to float16 moves a number by, relatively
LEAST = 2.0**-25  # and at least, where float16 has no smaller numbers
TOP = {"q8": 127, "q4": 15}


def pack_checked(weight: Tensor, kind: str, gated: bool, name: str = "the weight") -> tuple[TiledWeight, Rounding]:
    """weight: [n, k]. Raises QuantizationError for NaN and infinity, and for more than rounding."""
    n, k = weight.shape
    if weight.dtype not in WORKING:
        raise QuantizationError(f"weights of {weight.dtype} are not quantized; known are float32, bfloat16, float16")
    made, worst = [], 0.0
    lost = total = torch.zeros((), dtype=torch.float64)
    for piece in pieces(weight, gated):
        if not bool(piece.isfinite().all()):
            raise QuantizationError(
                f"{name} holds NaN or infinity, which no scale can stand for; check the checkpoint"
            )
        packed = pack(piece, kind, gated)
        difference = unpack(packed) - piece  # [rows, k]
        worst = max(worst, float((blocks(difference.abs()).amax(2) / allowed(piece, packed)).amax()))
        lost, total = lost + difference.double().square().sum(), total + piece.double().square().sum()
        made.append(packed.data)
    if not worst <= 1:
        raise QuantizationError(f"{name}: a packed weight is {worst:.3g} times as far off as rounding allows")
    relative = float((lost / total).sqrt()) if float(total) else 0.0
    return TiledWeight(kind, n, k, gated, torch.cat(made)), Rounding(relative, worst * HALF)


def pieces(weight: Tensor, gated: bool) -> Iterator[Tensor]:
    """Whole tiles of rows in float32; of a gated weight, gate rows and the up rows that go with them."""
    parts = weight.chunk(2) if gated else (weight,)
    step = max(1, PIECE // max(weight.shape[1], 1) // TILE) * TILE
    for start in range(0, parts[0].shape[0], step):
        yield torch.cat([part[start : start + step].detach().float() for part in parts])


def allowed(piece: Tensor, packed: TiledWeight) -> Tensor:
    """[rows, blocks]: half a step, and what float16 does to the scale and the minimum."""
    size = BLOCK_BYTES[packed.kind]
    tiles = packed.data.view(-1, -(-packed.columns // BLOCK), size)
    count = packed.data.numel() // (tiles.shape[1] * size)
    scales = tiles[..., : 2 * TILE].contiguous().view(torch.float16).float().view(count, -1, TILE).transpose(1, 2)
    step = from_tiles(scales.contiguous(), packed)
    largest = blocks(piece.abs()).amax(2)
    return HALF * step + 2 * HALF_UNIT * largest + TOP[packed.kind] * LEAST


def blocks(values: Tensor) -> Tensor:
    """[rows, k] → [rows, blocks, 32]."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
