"""What a kernel is tried with by itself: sizes, magnitudes, layouts, dtypes and numbers that a model may never show,
and where an eps, a mask, a tail or a stride that is wrong does show."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graft.base.device_memory import free_memory
from graft.ir.patterns.arguments import size_of

BATCHES = ((1, 13), (3, 5), (1, 1))  # sequences and tokens: one decode step, a prompt, several of them
WIDTHS = (16, 77, 1536)  # of a row whose width is open: whole lanes, a tail, a real one
FEW, TILES = 5, 70  # tokens: each thread makes their rows for itself; more than a tile of a GEMM has, with a tail
GEMM_WIDTHS = (16, 77, 320)  # where a GEMM takes and gives such rows: several tiles are enough
MORE = 3  # columns, by which the result of a GEMM is wider than its rows
SCALES = (1.0, 1e-3, 30.0)
# beyond what stands for an infinity in kernels that have none: -1,000, the largest numbers of 16 bits, -1e9, -1e29
EXTREMES = (2e3, 1e9, 1e30)
ODD = (math.nan, math.inf, -math.inf)
HALVES = (torch.bfloat16, torch.float16)
FAR = 2**30  # elements from one sequence to the next: three of them are beyond 32 bits
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.12 on


class NotOneShape(Exception):
    """Why a kernel is not run by itself."""


@dataclass(frozen=True)
class KernelCase:
    """name: in words. odd: it has numbers that are not finite, where kernel and reference must agree which. far: its
    memory is not to be copied. extreme: compared only where float32 holds what the reference computes."""

    name: str
    tensors: tuple[Tensor, ...]
    odd: bool = False
    far: bool = False
    extreme: bool = False


def dims(shape: str) -> list[str]:
    return shape.partition(":")[0].split()


def declared(shape: str) -> str:
    return shape.partition(":")[2].strip()


def matrices(shapes: Mapping[str, str]) -> set[str]:
    """The weights of GEMMs: they have two dims where rows have more."""
    most = max(len(dims(shape)) for shape in shapes.values())
    return {name for name, shape in shapes.items() if len(dims(shape)) == 2 < most}


def widths_of(shapes: Mapping[str, str]) -> tuple[int, ...]:
    return GEMM_WIDTHS if matrices(shapes) else WIDTHS


def open_width(shapes: Mapping[str, str]) -> bool:
    last = [dim for name, shape in shapes.items() for dim in dims(shape)[-1 - (name in matrices(shapes)) :]]
    return any(map(str.isalpha, last))


def leading(shapes: Mapping[str, str]) -> list[str]:
    """The letters before the last dim of the widest tensor: sequences and tokens, most often."""
    widest = max((dims(shape) for shape in shapes.values()), key=len)
    return list(dict.fromkeys(dim for dim in widest[:-1] if dim.isalpha()))


def sizes(shapes: Mapping[str, str], width: int, batch: tuple[int, int] = (1, 13)) -> dict[str, int]:
    """Sequences, then tokens; the last dim is the width. A GEMM gives another width than it takes, where it may."""
    outer = leading(shapes)
    if len(outer) > 2:
        raise NotOneShape(f"its rows are {' '.join(outer)}, not a batch of tokens")
    named = dict(zip(outer[::-1], batch[::-1], strict=False))
    others = {dim for shape in shapes.values() for dim in dims(shape) if dim.isalpha()} - set(named)
    given = {dims(shape)[-1] for name, shape in shapes.items() if name in matrices(shapes)}
    made = {dims(shape)[0] for name, shape in shapes.items() if name in matrices(shapes)} - given
    return named | {dim: width + MORE if dim in made else width for dim in others}


def inputs(
    shapes: Mapping[str, str],
    width: int,
    scale: float,
    batch: tuple[int, int] = (1, 13),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Weights are around 1 whatever the scale, those of GEMMs so small that sums are; a tensor whose dtype is
    declared has that one."""
    return made_of(shapes, sizes(shapes, width, batch), scale, dtype)


def made_of(
    shapes: Mapping[str, str],
    known: Mapping[str, int],
    scale: float,
    dtype: torch.dtype,
    rows: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """rows: what makes them of random numbers; one_sided where nothing is said."""
    rows = rows or one_sided
    generator = torch.Generator().manual_seed(7)
    made, of_gemms = [], matrices(shapes)
    for name, shape in shapes.items():
        size = [size_of(dim, known) for dim in dims(shape)]
        tensor = torch.randn(size, generator=generator)
        if name in of_gemms:
            tensor = tensor * max(size[-1], 1) ** -0.5
        elif len(size) > 1:
            tensor = rows(tensor) * scale
        made.append(tensor.to(getattr(torch, declared(shape)) if declared(shape) else dtype))
    return tuple(made)


def one_sided(rows: Tensor) -> Tensor:
    """Of three rows one has no positive number and one no negative: an extreme that starts at 0 shows there."""
    tokens = torch.arange(rows.shape[-2])[:, None] % 3
    return torch.where(tokens == 1, -rows.abs(), torch.where(tokens == 2, rows.abs(), rows))


def away_from_zero(rows: Tensor) -> Tensor:
    """The same, and no number is less than 1: an extreme that starts at any number shows in rows beyond it."""
    return one_sided((1 + rows.abs() / 4).copysign(rows))


def plain_cases(
    shapes: Mapping[str, str], batches: Sequence[tuple[int, int]], most: int = len(WIDTHS)
) -> Iterator[KernelCase]:
    """In float32: every count of rows, every width up to so many, every magnitude once, and numbers that are not
    finite."""
    known = widths_of(shapes)
    if matrices(shapes):
        batches = (*batches, *((batches[1][0], tokens) for tokens in (FEW, TILES)))
    widths = known[:most] if open_width(shapes) else (0,)
    for width in widths:
        for batch in batches if width in (0, known[1]) else batches[:1]:
            for scale in SCALES if batch == (1, 13) else SCALES[:1]:
                name = f"{batch[0]} × {batch[1]} rows{f' of {width}' if width else ''}, inputs around {scale:g}"
                yield KernelCase(name, inputs(shapes, width, scale, batch), extreme=scale != 1.0)
    with_tail = widths[min(1, len(widths) - 1)]
    yield from extreme_cases(shapes, with_tail)
    yield from odd_cases(shapes, with_tail)


def extreme_cases(shapes: Mapping[str, str], width: int) -> Iterator[KernelCase]:
    """A row of each kind, all below and all above what a kernel may have put for an infinity: in every input, and in
    each in turn."""
    known = sizes(shapes, width, (1, 3))
    plain = made_of(shapes, known, 1.0, torch.float32)
    wide = [index for index, name in enumerate(shapes) if plain[index].dim() > 1 and name not in matrices(shapes)]
    for scale in EXTREMES:
        away = made_of(shapes, known, scale, torch.float32, away_from_zero)
        chosen = [wide, *([index] for index in wide if len(wide) > 1)]
        for some in chosen:
            given = tuple(away[at] if at in some else plain[at] for at in range(len(plain)))
            where = "all inputs" if len(some) == len(wide) else list(shapes)[some[0]]
            yield KernelCase(f"all rows beyond {scale:g} in {where}", given, extreme=True)


def odd_cases(shapes: Mapping[str, str], width: int) -> Iterator[KernelCase]:
    """One number of a row that is not finite, or all of them, in each input in turn; other rows must not see it."""
    for index, name in enumerate(shapes):
        tensors = list(inputs(shapes, width, 1.0))
        vector = tensors[index].dim() < 2 or name in matrices(shapes)
        for number, odd in enumerate(ODD[:1] if vector else ODD):
            changed = tensors[index].clone()
            rows = changed.view(-1, changed.shape[-1]) if changed.dim() else changed.view(1, 1)
            # the last column, and one in the middle, of rows that are far from one another
            for column in (rows.shape[-1] - 1, rows.shape[-1] // 3):
                rows[(3 * number + column) % rows.shape[0], column] = odd
            given = (*tensors[:index], changed, *tensors[index + 1 :])
            yield KernelCase(f"{odd} in {name}", given, odd=True)
        if not vector:
            changed = tensors[index].clone()
            rows = changed.view(-1, changed.shape[-1])
            for number, odd in enumerate(ODD):
                rows[4 * number % rows.shape[0]] = odd
            given = (*tensors[:index], changed, *tensors[index + 1 :])
            yield KernelCase(f"rows of nothing but {', '.join(map(str, ODD))} in {name}", given, odd=True)


def layout_cases(shapes: Mapping[str, str]) -> Iterator[KernelCase]:
    """The same numbers laid out as models lay them out: tokens before sequences, every second column, expanded, and
    far apart."""
    width = widths_of(shapes)[1] if open_width(shapes) else 0
    plain = KernelCase("", inputs(shapes, width, 1.0, BATCHES[-1]))
    for name, change in (("tokens before sequences", swapped), ("every second column", spread), ("equal", expanded)):
        yield replace(plain, name=f"{name}, in all inputs", tensors=tuple(map(change, plain.tensors)))
        for index, given in enumerate(shapes):
            tensors = [*plain.tensors[:index], change(plain.tensors[index]), *plain.tensors[index + 1 :]]
            yield replace(plain, name=f"{name}, in {given}", tensors=tuple(tensors))


def swapped(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -2).contiguous().transpose(0, -2) if tensor.dim() > 2 else tensor


def spread(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, -tensor], -1).flatten(-2)[..., ::2] if tensor.dim() else tensor


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor) if tensor.dim() > 1 else tensor


def dtype_cases(shapes: Mapping[str, str]) -> Iterator[KernelCase]:
    """16 bits, and every input in turn in another dtype than the rest."""
    width = widths_of(shapes)[-1] if open_width(shapes) else 0
    for dtype in HALVES:
        given = inputs(shapes, width, 1.0, (2, 3), dtype)
        yield KernelCase(str(dtype)[6:], given)
        yield KernelCase(f"{str(dtype)[6:]} around 300", inputs(shapes, width, 300.0, (2, 3), dtype), odd=True)
    for index, name in enumerate(shapes):
        for other, rest in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            tensors = list(inputs(shapes, width, 1.0, (2, 3), rest))
            tensors[index] = tensors[index].to(other)
            yield KernelCase(f"{name} in {str(other)[6:]}, others in {str(rest)[6:]}", tuple(tensors))


def broadcasts(shapes: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """In words, and shapes of which one input has one row, or one number a row, for several of the others. The weight
    of a GEMM is broadcast over nothing."""
    for name in [name for name in shapes if name not in matrices(shapes)]:
        shape, given = shapes[name], dims(shapes[name])
        for at in range(len(given)):
            if given[at] == "1":
                continue
            changed = " ".join("1" if at == index else dim for index, dim in enumerate(given))
            kept = f" : {declared(shape)}" if declared(shape) else ""
            yield f"{name} of {changed}", {**shapes, name: f"{changed}{kept}"}


def broadcast_cases(shapes: Mapping[str, str]) -> Iterator[KernelCase]:
    width = widths_of(shapes)[1] if open_width(shapes) else 0
    known = sizes(shapes, width, BATCHES[1])
    for name, changed in broadcasts(shapes):
        yield KernelCase(name, made_of(changed, known, 1.0, torch.float32))


def unbacked(count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Memory that is zero; on a CPU it takes none until it is written, however little the machine has."""
    if device.type != "cpu":
        enough = count * dtype.itemsize < free_memory(device) / 2
        return torch.zeros(count, dtype=dtype, device=device) if enough else None
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE} if sys.platform == "linux" else {}
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, **private), dtype=dtype)


def far_case(shapes: Mapping[str, str], index: int, device: torch.device) -> KernelCase | None:
    """Sequences so far apart that an offset of 32 bits does not reach the last: memory that is asked for, and touched
    only where it is read. There is as much below them as such an offset goes astray, so that a kernel with one reads
    wrong numbers, and not what belongs to nobody."""
    width = widths_of(shapes)[0] if open_width(shapes) else 0
    tensors = [tensor.to(device) for tensor in inputs(shapes, width, 1.0, (4, 2), torch.bfloat16)]
    tensor = tensors[index]
    if tensor.dim() < 3 or tensor.shape[0] < 4:
        return None
    astray, reach = 2 * FAR, 3 * FAR + tensor[0].numel()  # 2 * FAR elements on becomes as many back
    room = unbacked(astray + reach, tensor.dtype, device)
    if room is None:
        return None
    away = room.as_strided(tensor.shape, (FAR, *tensor.stride()[1:]), astray)
    tensors[index] = away.copy_(tensor)
    return KernelCase(f"sequences {FAR:,} elements apart", tuple(tensors), far=True)
