"""Tiles of mixed_gemm.py, and how many programs have each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class TileSizes:
    """Of a tile, and how many units of words and steps of x are on their way: what fits into 227 KiB. The words of a
    warpgroup must have room for its results, so that `ahead` tiles of the weight have as many words as there are
    tokens."""

    rows: int
    tokens: int
    ahead: int
    stages: int


def sizes_for(tokens: int, kind: str) -> TileSizes:
    """With 256 tokens a weight is widened half as often as with 128, which few tokens would leave idle."""
    if tokens <= 64:
        return TileSizes(256, 64, 4, 8)
    return TileSizes(128, 128, 4, 8) if tokens <= 128 else TileSizes(128, 256, 4 if kind == "int8" else 8, 4)


@cache
def shares(tiles: int, units: int, programs: int) -> tuple[int, int]:
    """How many tiles have a program each, and how many programs share the depth of each of the others, so that all
    end soonest with `programs` at a time. In units, about 1.4 us: 3 for what a tile takes beside them, 1.5 for every
    part of one that is left in memory (H200, 448 tiles of 32 units: 189 us; 396, and 52 in halves, 174; in fifths
    193)."""

    def cost(whole: int, splits: int) -> float:
        parts = (tiles - whole) * splits
        rest = -(-parts // programs) * (units / splits + 3 + 1.5 * splits * (splits > 1))
        return -(-whole // programs) * (units + 3.0) + rest

    rounds = tiles - tiles % programs
    ways = [(tiles, 1), *((whole, splits) for whole in {0, rounds} for splits in range(2, min(8, units) + 1))]
    return min(ways, key=lambda way: (cost(*way), way))
