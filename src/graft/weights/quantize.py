"""Weights rounded to 8 or 4 bits, in the formats of packing.py.

`columns` [k], float32, is multiplied into the weight first: that of a norm whose division comes after the GEMM.
Every scale is rounded to the dtype that it is stored in before the weights are divided by it, so that what a kernel
reads is what was decided here. Rows are independent and go in pieces: beside the result, memory grows by about eight
float32 copies of a piece. All runs on the weight's own device; the same weight gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.base.errors import QuantizationError
from graft.weights.packing import GROUP, MIDDLE, PACKED, RUN, SPAN, pack_bytes, pack_int4

PIECE = 1 << 20  # weights at a time: 4 MiB of float32 stay in a cache
PIECE_GPU = 1 << 24  # 64 MiB: an 8B model in 420 pieces, each long enough to hide its launches
INT8_TOP, INT4_TOP = 127, 7  # int8 leaves -128 out; int4 reaches down to -8
FP8 = torch.float8_e4m3fn
FP8_TOP = 448.0
# Of the largest magnitude of a group: what lies outside is clipped, the rest gets finer steps.
RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
WORKING = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Saving:
    """What the engine may tell of quantized weights: their format, and the bytes that a step need not read."""

    format: str
    bytes: int


def quantize_int8(
    weight: Tensor, name: str = "the weight", *, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[n, k] → int8 [n, ceil(k / 64) * 64], float32 scale [n]: the largest magnitude of a row is 127."""
    q, scale = packed_bytes(weight, torch.int8), row_scales(weight)
    for rows, piece in pieces(weight, columns):
        scale[rows] = row_scale(piece, INT8_TOP, name)
        q[rows] = pack_bytes((piece / scale[rows, None]).round_().clamp_(-INT8_TOP, INT8_TOP).to(torch.int8))
    return q, scale


def quantize_fp8(weight: Tensor, name: str = "the weight", *, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[n, k] → float8_e4m3fn [n, ceil(k / 64) * 64], float32 scale [n]: the largest magnitude of a row is 448."""
    check_fp8(weight.device)
    q, scale = packed_bytes(weight, FP8), row_scales(weight)
    for rows, piece in pieces(weight, columns):
        scale[rows] = row_scale(piece, FP8_TOP, name)
        q[rows] = pack_bytes((piece / scale[rows, None]).clamp_(-FP8_TOP, FP8_TOP).to(FP8))
    return q, scale


def quantize_int4(
    weight: Tensor, name: str = "the weight", *, columns: Tensor | None = None, search: bool = True
) -> tuple[Tensor, Tensor]:
    """[n, k] → words [n, ceil(k / 512) * 128], scale [n, ceil(k / 128)] in the weight's dtype.

    search: of each group, the clipping and the sign of the scale with the least squared error; else the largest
    magnitude is 7. The search starts from that, so it is never worse.
    """
    n, k = weight.shape
    groups = -(-k // GROUP)
    q = torch.empty((n, -(-k // SPAN) * GROUP), dtype=PACKED, device=weight.device)
    scale = torch.empty((n, groups), dtype=weight.dtype, device=weight.device)
    for rows, piece in pieces(weight, columns):
        padded = torch.nn.functional.pad(piece, (0, groups * GROUP - k)).view(-1, groups, GROUP)
        chosen = plain_scale(padded, weight.dtype, name)  # [rows, groups]
        if search:
            chosen = search_scale(padded, chosen, weight.dtype)
        scale[rows] = chosen
        q[rows] = pack_int4(rounded(padded, chosen).view(piece.shape[0], -1)[:, :k])
    return q, scale


def search_scale(groups: Tensor, plain: Tensor, dtype: torch.dtype) -> Tensor:
    """The best scale of each group: clipped at a ratio of its largest magnitude, that being 7 or -8.

    groups: float32 [rows, groups, 128]; plain: [rows, groups], the scale to beat.
    """
    low, high = groups.amin(-1), groups.amax(-1)
    # negative where the largest magnitude is a positive number: the range is [-8, 7], and -8 is its longer end
    from_largest = torch.where(high > -low, high, low) / -MIDDLE
    best, least = plain, squared_error(groups, plain)
    for candidate in (ratio * base for base in (plain.float(), from_largest) for ratio in RATIOS):
        scale = stored(candidate, dtype)
        error = squared_error(groups, scale)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def squared_error(groups: Tensor, scale: Tensor) -> Tensor:
    """[rows, groups]: what rounding each group with its scale loses."""
    return (rounded(groups, scale) * scale.float()[..., None]).sub_(groups).square_().sum(-1)


def rounded(groups: Tensor, scale: Tensor) -> Tensor:
    """Whole numbers in [-8, 7], as float32."""
    return (groups / scale.float()[..., None]).round_().clamp_(-MIDDLE, INT4_TOP)


def plain_scale(groups: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    return stored(largest(groups, name) / INT4_TOP, dtype)


def row_scale(piece: Tensor, top: float, name: str) -> Tensor:
    return stored(largest(piece, name) / top, torch.float32)


def largest(values: Tensor, name: str) -> Tensor:
    """The largest magnitude along the last dim; NaN and infinity have no place in a quantized format."""
    found = values.abs().amax(-1)
    if not bool(found.isfinite().all()):
        raise QuantizationError(f"{name} holds NaN or infinity, which no scale can stand for; check the checkpoint")
    return found


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale in the dtype that it is kept in; never 0, by which nothing can be divided."""
    kept, least = scale.to(dtype), least_scale(dtype)
    return torch.where(kept.abs() < least, torch.full_like(kept, least), kept)


def least_scale(dtype: torch.dtype) -> float:
    """float16 is short of exponents, so its subnormal numbers are used; GPUs take those of the others for 0."""
    return 2.0**-24 if dtype is torch.float16 else torch.finfo(dtype).tiny


def pieces(weight: Tensor, columns: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Whole rows at a time, in float32, times `columns` [k]."""
    n, k = weight.shape
    if weight.dtype not in WORKING:
        raise QuantizationError(f"weights of {weight.dtype} are not quantized; known are float32, bfloat16, float16")
    size = PIECE if weight.device.type == "cpu" else PIECE_GPU
    step = max(1, size // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        piece = weight[rows].detach().float()
        yield rows, piece if columns is None else piece * columns


def packed_bytes(weight: Tensor, dtype: torch.dtype) -> Tensor:
    n, k = weight.shape
    return torch.empty((n, -(-k // (2 * RUN)) * 2 * RUN), dtype=dtype, device=weight.device)


def row_scales(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)


def fp8_problem(device: torch.device) -> str | None:
    """Why torch cannot turn numbers into float8 on this device, or None."""
    try:
        torch.ones(1, device=device).to(FP8).float()
    except (RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} has no float8 numbers on {device} ({error})"
    return None


def check_fp8(device: torch.device) -> None:
    if problem := fp8_problem(device):
        raise QuantizationError(f"{problem}; use int8")


def rows_to_fp8(wide: Tensor) -> tuple[Tensor, Tensor]:
    """[…, d] in float32 or wider → float8 […, d] and scales […]: the largest magnitude is 448. A row with a NaN or an
    infinity is read back as NaN."""
    scales = (wide.abs().amax(-1) / FP8_TOP).clamp_min(least_scale(torch.float32))
    return (wide / scales[..., None]).clamp(-FP8_TOP, FP8_TOP).to(FP8), scales


QUANTIZERS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "int8": quantize_int8,
    "int4": quantize_int4,
    "fp8": quantize_fp8,
}


def abstract(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Tensors of the right shape and dtype for a weight on the meta device."""
    n, k = weight.shape
    if kind == "int4":
        shapes = ((n, -(-k // SPAN) * GROUP), PACKED), ((n, -(-k // GROUP)), weight.dtype)
    else:
        return packed_bytes(weight, torch.int8 if kind == "int8" else FP8), row_scales(weight)
    q, scale = (torch.empty(shape, dtype=dtype, device=weight.device) for shape, dtype in shapes)
    return q, scale
