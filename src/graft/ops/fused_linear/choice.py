"""Which kernel runs a GEMM, by its shape and the number of tokens: measured, kept in a table, looked up.

The table that comes with graft was measured on one device (its name is in the file). `graft tune` measures on the
device at hand and keeps its table in the cache folder, which goes first. A shape that no table has takes what was
best for the nearest one; a number of tokens takes the smallest measured one that is not below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from graft.base.files import cache_dir
from graft.ops.fused_linear.kinds import (
    INTEGERS,
    MIXED,
    WIDENED_FROM,
    BalancedGemm,
    Gemm,
    How,
    LinearShape,
    Matvec,
    count_text,
    how_problem,
    how_text,
    kind_of,
)
from graft.ops.fused_linear.tables import Table, TunedEntry, merge, read_table
from graft.ops.launch import device_name
from graft.ops.spec import Pick

__all__ = ["FORMATS", "Gemm", "How", "KernelChoice", "LinearShape", "Matvec", "choose_kernel", "how_text"]

SHIPPED = Path(__file__).with_name("tuned.json")
FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.int16: "int4"}
OVERRIDES: list[Table] = []  # above all files, the last on top: see overridden


@dataclass(frozen=True)
class KernelChoice:
    how: How
    source: str  # where it was measured, or why there is no measurement
    nearest: LinearShape | None = None  # the shape that was measured
    device: str | None = None  # on which


@cache
def choose_kernel(shape: LinearShape, tokens: int, device: str) -> KernelChoice:
    """device: its name, as torch gives it."""
    return look_up(current_table(device), shape, tokens, device)


@cache
def picks(
    rows: int, k: int, dtype: torch.dtype, gated: bool, norm: bool, tokens: int, device: torch.device
) -> tuple[Pick, ...]:
    """By kernels of the op, best first. Asked at every call, so by what is at hand there."""
    shape = shape_of(rows, k, dtype, gated, norm)
    return picks_of(choose_kernel(shape, tokens, device_name(device)).how, shape, tokens)


def picks_of(how: How, shape: LinearShape, tokens: int) -> tuple[Pick, ...]:
    """Behind a measured kernel, which may not fit how a call's tensors lie, come the tensor-core kernels with sizes
    that fit every call."""
    kind = kind_of(how, shape.format)
    usual = (Pick("integer_gemm"), Pick("gemm")) if shape.format in INTEGERS else (Pick("gemm"),)
    if tokens >= WIDENED_FROM.get(shape.format, tokens + 1):
        usual = (Pick("library"), *usual)
    if tokens in MIXED.get(shape.format, ()):
        usual = (Pick("mixed_gemm"), *usual)
    default = kind == "default" or (how is None and is_odd(shape))
    return usual if default else (Pick(kind, how), *usual)


def shape_of(rows: int, k: int, dtype: torch.dtype, gated: bool, norm: bool) -> LinearShape:
    """rows, k, dtype: of the weight, of which a gate takes half the rows."""
    return LinearShape(rows // 2 if gated else rows, k, FORMATS.get(dtype, "plain"), gated, norm)


def look_up(table: Table, shape: LinearShape, tokens: int, device: str) -> KernelChoice:
    fitting = [one for one, counts in table.items() if one.format == shape.format and counts]
    if not fitting:
        return KernelChoice(None, f"no table has {shape.format} weights: {without(shape)}")
    refused = passed = ""
    for near in sorted(fitting, key=lambda one: (shape.distance(one), one.key())):
        counts = table[near]
        count = min((count for count in counts if count >= tokens), default=None)
        if count is None:
            most = f"more than the {count_text(max(counts))} measured for {near.key()}"
            return KernelChoice(None, f"{refused or most}: {without(shape)}", near)
        entry = counts[count]
        how = shared_out(entry.how, near, shape)
        source = f"{measured_text(entry, device)}, {'this' if near == shape else 'nearest'} shape"
        source += f"{'' if near == shape else f' {near.key()}'}, {count_text(count)}"
        problem = how_problem(how, shape, tokens)
        if problem is None:
            return KernelChoice(how, source + passed, near, entry.device)
        refused = refused or f"{source}; but {problem}"
        passed = passed or f"; that of {near.key()} is nearer, but {problem}"
    return KernelChoice(None, f"{refused}: {without(shape)}")


def shared_out(how: How, measured: LinearShape, shape: LinearShape) -> How:
    """Of balanced_gemm as many rows a program that there are as many programs as for the shape that was measured:
    with Llama's 112 rows StarCoder's 12,288 would be shared by 110 of 132 multiprocessors."""
    if not isinstance(how, BalancedGemm) or shape.n == measured.n:
        return how
    rows = -(-how.rows * shape.n // (16 * measured.n)) * 16
    return replace(how, rows=min(max(rows, 16), 256))


def is_odd(shape: LinearShape) -> bool:
    """Whether torch's GEMM leaves its fast kernels, whose rows are multiples of 16 bytes: of Granite's 49,155 rows
    and 32 tokens it takes 276 us, and the default tensor-core kernel 57 (H200)."""
    return shape.format == "plain" and shape.n * (1 + shape.gated) % 8 != 0


def without(shape: LinearShape) -> str:
    """What runs where nothing was measured."""
    plain = shape.format == "plain" and not is_odd(shape)
    return "torch's own GEMM" if plain else "the default tensor-core kernel"


def measured_text(entry: TunedEntry, device: str) -> str:
    here = "" if entry.device == device else f" (this is {device})"
    return f"measured on {entry.device}{here} {entry.measured}"


@cache
def current_table(device: str) -> Table:
    """The shipped measurements, over them those made here, over them what is overridden for a time."""
    own = tuned_file(device)
    return merge(shipped_table(), read_table(own) if own.is_file() else {}, *OVERRIDES)


@cache
def shipped_table() -> Table:
    return read_table(SHIPPED)


def tuned_file(device: str) -> Path:
    """Where `graft tune` keeps its measurements of a device."""
    return cache_dir() / "tuned" / f"{device.replace(' ', '_').replace('/', '_')}.json"


@contextmanager
def overridden(table: Table) -> Iterator[None]:
    """These entries go before all others while the block runs. A recorded CUDA graph keeps the kernels it has."""
    OVERRIDES.append(table)
    forget()
    try:
        yield
    finally:
        OVERRIDES.pop()
        forget()


def adopt(table: Table) -> None:
    """These entries go before all others from now on: those that a compiled engine was made with."""
    OVERRIDES.append(table)
    forget()


def forget() -> None:
    """The next lookup reads the tables again."""
    choose_kernel.cache_clear()
    picks.cache_clear()
    current_table.cache_clear()


@dataclass(frozen=True)
class Range:
    """Token counts that one kernel runs. entry: its measurement; None for what lies beyond all of them."""

    first: int
    last: int | None
    entry: TunedEntry | None

    def text(self, format: str) -> str:
        how = how_text(self.entry.how if self.entry else None, format)
        if self.last is None:
            return f"more: {how}"
        return f"{self.first}{f'–{self.last}' if self.last > self.first else ''} {how}"


def ranges(counts: dict[int, TunedEntry]) -> list[Range]:
    """From one token on; neighbours with one kernel, measured the same way, are one range."""
    found: list[Range] = []
    for count in sorted(counts):
        entry, first = counts[count], found[-1].last + 1 if found and found[-1].last else 1
        if found and found[-1].entry and same(found[-1].entry, entry):
            first = found.pop().first
        found.append(Range(first, count, entry))
    return [*found, Range(max(counts, default=0) + 1, None, None)]


def same(one: TunedEntry, other: TunedEntry) -> bool:
    return (one.how, one.device, one.measured) == (other.how, other.device, other.measured)


def ranges_text(shape: LinearShape, counts: dict[int, TunedEntry]) -> str:
    """`plain 4096x4096: 1 matvec(rows=2, warps=4), 2–64 gemm(…), more: library; measured on NVIDIA H200 alone`."""
    found = ranges(counts)
    origins: dict[str, list[str]] = {}
    for one in found:
        if one.entry is not None:
            tokens = f"{one.first}" if one.first == one.last else f"{one.first}–{one.last}"
            origins.setdefault(f"{one.entry.device} {one.entry.measured}", []).append(tokens)
    alike = len(origins) == 1
    where = ", ".join(origin if alike else f"{origin} ({', '.join(counts)})" for origin, counts in origins.items())
    kernels = ", ".join(one.text(shape.format) for one in found)
    return f"{shape.key()}: {kernels}; {f'measured on {where}' if where else 'not measured'}"
