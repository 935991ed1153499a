"""Which kernel runs a product, by its shape and the number of tokens: measured, kept in a table, looked up.

The table that comes with graft was measured on one device (its name is in the file). `graft tune` measures on the
device at hand and keeps its table in the cache folder, which goes first. A shape that no table has takes what was
best for the nearest one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from graft.files import cache_dir


@dataclass(frozen=True)
class Matvec:
    """`rows` of the weight a program. The first `ahead` programs fetch the rows of the next `waves` times as many into
    the cache while they wait."""

    rows: int = 1
    warps: int = 4
    ahead: int = 0
    waves: int = 1


@dataclass(frozen=True)
class Gemm:
    """A block of rows, tokens and depth a program; `splits` programs share the depth of one. `early` blocks of the
    weight are fetched before the wait; `norm_inside`: or in a kernel of its own, before."""

    rows: int = 64
    tokens: int = 16
    depth: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    early: int = 0
    norm_inside: bool = False


SHIPPED = Path(__file__).with_name("tuned.json")
KINDS: dict[str, type] = {"matvec": Matvec, "gemm": Gemm}
FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.int16: "int4"}
How = Matvec | Gemm | None  # None: torch's own product


@dataclass(frozen=True)
class Shape:
    """What a choice depends on beside the tokens. n: rows of the result."""

    n: int
    k: int
    format: str  # plain, int8, fp8, int4
    gated: bool
    norm: bool

    def key(self) -> str:
        return f"{self.format} {self.n}x{self.k}{' gated' * self.gated}{' norm' * self.norm}"

    @staticmethod
    def parse(key: str) -> Shape:
        format, size, *options = key.split()
        n, k = map(int, size.split("x"))
        return Shape(n, k, format, "gated" in options, "norm" in options)

    def distance(self, other: Shape) -> float:
        """How unlike two shapes are: factors between sizes, and much for what is not the same kind."""
        apart = abs(math.log2(self.n / other.n)) + abs(math.log2(self.k / other.k))
        return (
            apart + 100 * (self.format != other.format) + 10 * (self.gated != other.gated) + (self.norm != other.norm)
        )


@dataclass(frozen=True)
class Choice:
    how: How
    source: str  # where it was measured: "NVIDIA H200, this shape", "…, nearest 4096x4096"


@cache
def choose_kernel(shape: Shape, tokens: int, device: str) -> Choice:
    """device: its name, as torch gives it."""
    entries = table(device)
    fitting = [one for one in map(Shape.parse, entries) if one.format == shape.format]
    if not fitting:
        return Choice(None, f"no table has {shape.format} weights")
    nearest = min(fitting, key=shape.distance)
    measured = entries[nearest.key()]
    count = next((c for c in sorted(map(int, measured["tokens"])) if c >= tokens), None)
    if count is None:
        return Choice(None, f"more tokens than were measured for {nearest.key()}")
    how = read_how(measured["tokens"][str(count)])
    where = "this shape" if nearest == shape else f"nearest shape {nearest.key()}"
    return Choice(how, f"measured on {measured['device']}, {where}, {count} tokens")


@cache
def table(device: str) -> dict[str, Any]:
    """Shapes and what was best for them: the shipped table under the one measured here."""
    entries = json.loads(SHIPPED.read_text())
    own = tuned_file(device)
    return {**entries, **(json.loads(own.read_text()) if own.is_file() else {})}


def tuned_file(device: str) -> Path:
    """Where `graft tune` keeps its measurements of a device."""
    return cache_dir() / "tuned" / f"{device.replace(' ', '_').replace('/', '_')}.json"


def read_how(entry: Mapping[str, Any]) -> How:
    options = {key: value for key, value in entry.items() if key not in ("kind", "us")}
    return None if entry["kind"] == "library" else KINDS[entry["kind"]](**options)


def how_text(how: How) -> str:
    if how is None:
        return "library"
    kind = next(name for name, cls in KINDS.items() if isinstance(how, cls))
    return f"{kind}({', '.join(f'{key}={value}' for key, value in asdict(how).items())})"
