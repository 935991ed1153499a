"""Weights as the native kernel reads them: tiles of 16 rows, in float32, 16 bits, or 8 or 4 bits with scales.

    kind   a tile of 16 rows                                                                     bits a weight
    f32    [columns, 16] float32                                                                            32
    bf16   [columns / 2, 16, 2] bfloat16                                                                    16
    f16    [columns, 16] float16, then a scale (float32, a power of two) in 64 bytes                        16
    q8     [blocks]: 16 scales (float16), [8, 16, 4] int8                      w = scale * q               8.5
    q4     [blocks]: 16 scales, 16 minimums (float16), [4, 16, 4] bytes        w = scale * q + minimum       5

A block is 32 columns. Byte [j, r, c] of a q4 block holds column 4 j + c of row r in its low four bits and column
16 + 4 j + c in its high four: the order of GGUF's Q4_0 and Q4_1, so that their bytes only change positions. Columns
are padded with zeros to 4 (f32, bf16), 8 (f16) or 32, rows to 16. A gated weight [gate; up] has gate and up tiles in
turn.

GGUF blocks keep their numbers: Q8_0, Q4_0 (minimum = -8 scale, exact) and Q4_1 bit by bit. Q4_K has 6-bit scales and
minimums of sub-blocks under two float16 of a block of 256; the products are rounded to float16, at most 2^-11 of
each (2^-25 absolute below 6e-5). Rows are independent: permute or join raw rows before packing them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.base.errors import PackingError

TILE = 16  # rows
BLOCK = 32  # columns that share a scale
STEPS = {"f32": 4, "bf16": 4, "f16": 8}  # columns that the float kinds are padded to
HALF = BLOCK // 2
CPP = {"f32": "WeightF32", "bf16": "WeightBF16", "q8": "WeightQ8", "q4": "WeightQ4", "f16": "WeightF16"}
HALVES = "WeightHalves"  # f16, read in another way
LINE = 64  # bytes after a tile of float16
TILES_AT_ONCE = 256
GGUF_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 144}  # of a block
GGUF_KIND = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4", "Q4_K": "q4"}
SUPER = 256  # columns of a Q4_K block


@dataclass(frozen=True)
class TiledWeight:
    """A weight [rows, columns] in tiles; `data` is uint8 [bytes]."""

    kind: str
    rows: int
    columns: int
    gated: bool
    data: Tensor


def pack(weight: Tensor, kind: str, gated: bool = False) -> TiledWeight:
    """weight: [n, k], float32, bfloat16 or float16."""
    check(kind, weight.shape[0], gated)
    n, k = weight.shape
    if kind == "f16":
        data = half_tiles(weight, gated)
    elif kind in STEPS:
        data = float_tiles(weight.to(torch.float32 if kind == "f32" else torch.bfloat16), STEPS[kind], gated)
    else:
        blocks = F.pad(weight.float(), (0, -k % BLOCK)).view(n, -1, BLOCK)
        data = q8_tiles(*quantize_q8(blocks), gated) if kind == "q8" else q4_tiles(*quantize_q4(blocks), gated)
    return TiledWeight(kind, n, k, gated, data)


def pack_gguf(raw: Tensor, quant: str, gated: bool = False) -> TiledWeight:
    """raw: uint8 [n, bytes of a row], as the gguf package gives a tensor's data; quant: Q8_0, Q4_0, Q4_1 or Q4_K."""
    if quant not in GGUF_BYTES:
        raise PackingError(
            f"GGUF's {quant} has no packed form; known: {', '.join(GGUF_BYTES)}; dequantize it and pack it"
        )
    n, size = raw.shape
    if raw.dtype is not torch.uint8 or size % GGUF_BYTES[quant]:
        raise PackingError(
            f"a row of {quant} is bytes, a multiple of {GGUF_BYTES[quant]}; these are {size} {raw.dtype}"
        )
    check(GGUF_KIND[quant], n, gated)
    blocks = raw.view(n, -1, GGUF_BYTES[quant])
    if quant == "Q8_0":
        data = q8_tiles(blocks[..., 2:].view(torch.int8), halves(blocks[..., :2]), gated)
    elif quant == "Q4_K":
        data = q4_tiles(*split_q4_k(blocks), gated)
    elif quant == "Q4_1":
        data = q4_tiles(blocks[..., 4:], halves(blocks[..., :2]), halves(blocks[..., 2:4]), gated)
    else:
        scale = halves(blocks[..., :2])
        data = q4_tiles(blocks[..., 2:], scale, scale * -8, gated)
    return TiledWeight(GGUF_KIND[quant], n, blocks.shape[1] * (SUPER if quant == "Q4_K" else BLOCK), gated, data)


def unpack(packed: TiledWeight) -> Tensor:
    """What the tiles stand for: float32 [rows, columns]."""
    count = tile_count(packed)
    tiles = packed.data.view(count, -1)
    if packed.kind == "f32":
        wide = tiles.view(torch.float32).view(count, -1, TILE).transpose(1, 2)  # [tiles, 16, columns]
    elif packed.kind == "bf16":
        pairs = tiles.view(torch.bfloat16).view(count, -1, TILE, 2)
        wide = pairs.permute(0, 2, 1, 3).reshape(count, TILE, -1).float()
    elif packed.kind == "f16":
        wide = unpack_halves(tiles)
    else:
        wide = unpack_blocks(tiles.view(count, -1, TILE * (34 if packed.kind == "q8" else 20)))
    return from_tiles(wide, packed)[:, : packed.columns].contiguous()


def unpack_blocks(tiles: Tensor) -> Tensor:
    """[tiles, blocks, bytes] of q8 or q4 → float32 [tiles, 16, columns]."""
    count, blocks, size = tiles.shape
    scale = tiles[..., :32].contiguous().view(torch.float16).float()  # [tiles, blocks, 16]
    if size == TILE * 34:
        q = tiles[..., 32:].contiguous().view(torch.int8).view(count, blocks, 8, TILE, 4).permute(0, 3, 1, 2, 4)
        least = torch.zeros_like(scale)
    else:
        least = tiles[..., 32:64].contiguous().view(torch.float16).float()
        both = tiles[..., 64:].view(count, blocks, 4, TILE, 4).permute(0, 3, 1, 2, 4)  # [tiles, 16, blocks, j, c]
        q = torch.cat([both & 15, both >> 4], dim=3)
    q = q.reshape(count, TILE, blocks, BLOCK).float()
    return (scale.transpose(1, 2)[..., None] * q + least.transpose(1, 2)[..., None]).flatten(2)


def unpack_halves(tiles: Tensor) -> Tensor:
    """[tiles, bytes] of f16 → float32 [tiles, 16, columns]."""
    halves, scale = tiles[:, :-LINE].contiguous().view(torch.float16), tiles[:, -LINE : -LINE + 4].contiguous()
    return halves.view(len(tiles), -1, TILE).transpose(1, 2) * scale.view(torch.float32)[:, :, None]


def check(kind: str, rows: int, gated: bool) -> None:
    if kind not in CPP:
        raise PackingError(f"{kind!r} is no kind of packed weight; known: {', '.join(CPP)}")
    if gated and rows % 2:
        raise PackingError(f"a gated weight has as many gate rows as up rows, but this one has {rows} rows")


def to_tiles(rows: Tensor, gated: bool) -> Tensor:
    """[n, ...] → [tiles, 16, ...]; gated: gate tile, up tile, gate tile, …"""
    parts = rows.chunk(2) if gated else (rows,)
    padding = [0, 0] * (rows.dim() - 1) + [0, -parts[0].shape[0] % TILE]
    tiles = [(F.pad(part, padding) if padding[-1] else part).unflatten(0, (-1, TILE)) for part in parts]
    return torch.stack(tiles, dim=1).flatten(0, 1)


def from_tiles(tiles: Tensor, packed: TiledWeight) -> Tensor:
    """[tiles, 16, columns] → [rows, columns]."""
    parts = 2 if packed.gated else 1
    halves = tiles.view(-1, parts, TILE, tiles.shape[-1]).transpose(0, 1).flatten(1, 2)  # [parts, padded, columns]
    return halves[:, : packed.rows // parts].flatten(0, 1)


def tile_count(packed: TiledWeight) -> int:
    parts = 2 if packed.gated else 1
    return parts * -(-(packed.rows // parts) // TILE)


def float_tiles(weight: Tensor, step: int, gated: bool) -> Tensor:
    per = 4 // weight.element_size()  # columns in 4 bytes of a row
    tiles = to_tiles(F.pad(weight, (0, -weight.shape[1] % step)), gated).unflatten(2, (-1, per))
    return tiles.transpose(1, 2).contiguous().view(torch.uint8).flatten()  # [tiles, columns / per, 16, per]


def half_tiles(weight: Tensor, gated: bool) -> Tensor:
    """The largest finite weight of a tile is brought between 1/2 and 1 by a power of two (up to 2 where that would be
    2^128); inf and NaN stay. Some hundred tiles at a time: in between they are float32."""
    tiles = to_tiles(F.pad(weight, (0, -weight.shape[1] % STEPS["f16"])), gated)  # [tiles, 16, columns]
    columns = tiles.shape[2]
    packed = weight.new_empty((len(tiles), columns * TILE * 2 + LINE), dtype=torch.uint8)
    for some, to in zip(tiles.split(TILES_AT_ONCE), packed.split(TILES_AT_ONCE), strict=True):
        wide = some.float()
        most = wide.abs().nan_to_num(0.0, 0.0).amax((1, 2)).clamp(min=2.0**-120)
        scale = torch.exp2(most.frexp().exponent.clamp(max=127).float())  # [tiles]
        halves = (wide / scale[:, None, None]).half().transpose(1, 2).flatten(1).contiguous()
        to[:, :-LINE] = halves.view(torch.uint8)
        to[:, -LINE:] = F.pad(scale[:, None], (0, LINE // 4 - 1)).view(torch.uint8)
    return packed.flatten()


def q8_tiles(q: Tensor, scale: Tensor, gated: bool) -> Tensor:
    """q: int8 [n, blocks, 32]; scale: float16 [n, blocks]."""
    tiles = to_tiles(q.unflatten(2, (8, 4)), gated).permute(0, 2, 3, 1, 4).flatten(2)  # [tiles, blocks, 8 * 16 * 4]
    return torch.cat([scale_bytes(scale, gated), tiles.view(torch.uint8)], dim=2).flatten()


def q4_tiles(q: Tensor, scale: Tensor, least: Tensor, gated: bool) -> Tensor:
    """q: uint8 [n, blocks, 16], columns i and 16 + i in byte i; scale, least: float16 [n, blocks]."""
    tiles = to_tiles(q.unflatten(2, (4, 4)), gated).permute(0, 2, 3, 1, 4).flatten(2)  # [tiles, blocks, 4 * 16 * 4]
    return torch.cat([scale_bytes(scale, gated), scale_bytes(least, gated), tiles], dim=2).flatten()


def scale_bytes(scale: Tensor, gated: bool) -> Tensor:
    """float16 [n, blocks] → uint8 [tiles, blocks, 32]."""
    return to_tiles(scale, gated).transpose(1, 2).contiguous().view(torch.uint8)


def halves(two: Tensor) -> Tensor:
    """uint8 [n, blocks, 2] → float16 [n, blocks]."""
    return two.contiguous().view(torch.float16)[..., 0]


def quantize_q8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n, blocks, 32] → int8 [n, blocks, 32] and float16 scales [n, blocks]."""
    scale = narrow_scale(blocks.abs().amax(2) / 127, blocks)
    return divide(blocks, scale).clamp(-127, 127).to(torch.int8), scale


def quantize_q4(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [n, blocks, 32] → bytes [n, blocks, 16], float16 scales and minimums [n, blocks]."""
    lowest, highest = blocks.aminmax(dim=2)
    least = narrow_scale(lowest, blocks)
    scale = narrow_scale((highest - least.float()).clamp(min=0) / 15, blocks)
    q = divide(blocks - least.float()[..., None], scale).clamp(0, 15).to(torch.uint8)
    return q[..., :HALF] | (q[..., HALF:] << 4), scale, least


def narrow_scale(scale: Tensor, blocks: Tensor) -> Tensor:
    """float16; NaN and inf in the weights stay, but no finite weight may become one."""
    narrow = scale.half()
    if bool((narrow.isinf() & blocks.isfinite().all(2)).any()):
        raise PackingError(
            f"weights up to {float(blocks.abs().max()):.3g} are too large for float16 scales; keep them float"
        )
    return narrow


def divide(blocks: Tensor, scale: Tensor) -> Tensor:
    wide = scale.float()[..., None]
    return torch.where(wide == 0, 0.0, blocks / wide).round().nan_to_num(0.0)  # a NaN is in the scale already


def split_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [n, blocks of 256, 144] → bytes [n, blocks of 32, 16], scales and minimums float16 [n, blocks of 32]."""
    n = blocks.shape[0]
    d, dmin = halves(blocks[..., :2]).float(), halves(blocks[..., 2:4]).float()
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]  # 6-bit numbers, four bytes a part
    scale = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=2)  # [n, blocks, 8]
    least = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=2)
    qs = blocks[..., 16:].unflatten(2, (4, BLOCK))  # 64 columns: 32 in the low four bits, 32 in the high four
    each = torch.stack([qs & 15, qs >> 4], dim=3).flatten(2, 3)  # [n, blocks, 8, 32]
    q = each[..., :HALF] | (each[..., HALF:] << 4)
    scales, leasts = (d[..., None] * scale).half(), (-dmin[..., None] * least).half()
    return q.reshape(n, -1, HALF), scales.reshape(n, -1), leasts.reshape(n, -1)
