"""Patterns of which kernels are generated, and their packages."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from graft.base.plugins import STATE, put_back
from graft.workbench.scaffold.body import USUAL, Body
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.plan import Written, write_transform


@dataclass(frozen=True)
class RowPattern:
    name: str
    source: str
    shapes: dict[str, str]
    wrong: str = ""


ADD_NORM = RowPattern(
    "row_add_norm",
    """def row_add_norm_by_hand(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-06)
    return weight * (total * scale), total""",
    {"x": "a b c", "y": "a b c", "weight": "c"},
    "tuple(t * 1.25 + 0.25 for t in row_add_norm_by_hand(x, y, weight))",
)
ROTATED = RowPattern(
    "row_rotated",
    """def row_rotated_by_hand(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    turned = torch.cat([torch.neg(x[..., 4:8]), x[..., 0:4]], -1)
    return x * y + turned * z""",
    {"x": "a 2 b 8", "y": "a 1 b 8", "z": "a 1 b 8"},
)
GATED = RowPattern(
    "row_gated",
    """def row_gated_by_hand(x: Tensor) -> Tensor:
    return torch.relu(x[..., 0:20]).pow(2) * x[..., 20:40]""",
    {"x": "a b 40"},
)
RANGED = RowPattern(
    "row_ranged",
    """def row_ranged_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    low = x.amin(-1, keepdim=True)
    return (x - low) / (x.amax(-1, keepdim=True) - low + 0.5) * weight""",
    {"x": "a b c", "weight": "c"},
)
SOFTCAPPED = RowPattern(
    "row_softcapped",
    """def row_softcapped_by_hand(x: Tensor, y: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    weights = torch.exp(x - top)
    share = weights / weights.sum(-1, keepdim=True)
    return torch.tanh(share * 4.0) * torch.sigmoid(y) + 0.125""",
    {"x": "a b c", "y": "a b c"},
)
# element by element, with the other templates
PRODUCT = RowPattern(
    "row_product",
    """def row_product_by_hand(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * y""",
    {"x": "a b c", "y": "a b c"},
)
# where a NaN reaches the rest of its row by the extreme alone
PEAK = RowPattern(
    "row_peak",
    """def row_peak_by_hand(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(y) * x.amax(-1, keepdim=True)""",
    {"x": "a b c", "y": "a b c"},
)
# a table in float32 beside what the model computes in 16 bits
WIDE = RowPattern(
    "row_wide",
    """def row_wide_by_hand(x: Tensor, y: Tensor) -> Tensor:
    return (y * x.mean(-1, keepdim=True)).to(y.dtype)""",
    {"x": "a b c : float32", "y": "a b c"},
)
# a GEMM with an epilogue, and with a prologue too
GEMM_GATED = RowPattern(
    "row_gemm_gated",
    """def row_gemm_gated_by_hand(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return y + torch.sigmoid(torch.nn.functional.linear(x, weight, bias)) * y""",
    {"x": "a b c", "y": "a b d", "weight": "d c", "bias": "d"},
)
GEMM_NORMED = RowPattern(
    "row_gemm_normed",
    """def row_gemm_normed_by_hand(x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    rows = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-06)).to(x.dtype) * norm
    return torch.relu(torch.nn.functional.linear(rows, weight)).pow(2)""",
    {"x": "a b c", "norm": "c", "weight": "d c"},
)
GEMM_RANGED = RowPattern(
    "row_gemm_ranged",
    """def row_gemm_ranged_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    low = x.amin(-1, keepdim=True)
    return torch.nn.functional.linear((x - low) / (x.amax(-1, keepdim=True) - low + 0.5), weight)""",
    {"x": "a b c", "weight": "d c"},
)
GEMMS = (GEMM_GATED, GEMM_NORMED, GEMM_RANGED)
PATTERNS = (ADD_NORM, ROTATED, GATED, RANGED, SOFTCAPPED, PRODUCT)


def fresh(pattern: RowPattern) -> RowPattern:
    """The same under a name that no test had: torch keeps every op that was defined."""
    new = f"{pattern.name}_{next(NUMBERS)}"
    old, by_hand = f"{pattern.name}_by_hand", f"{new}_by_hand"
    return replace(
        pattern, name=new, source=pattern.source.replace(old, by_hand), wrong=pattern.wrong.replace(old, by_hand)
    )


NUMBERS = itertools.count()


def write(pattern: RowPattern, folder: Path) -> Written:
    body = Body(pattern.source, None, USUAL, pattern.shapes, pattern.wrong)
    return write_transform(f"fuse_{pattern.name}", body, Destination.in_package(folder), "schedule")


@contextmanager
def loaded(folder: Path, pattern: RowPattern) -> Iterator[str]:
    """The op of a package that was written to `folder`, for as long as the block lasts; its module."""
    package = Destination.in_package(folder).package
    before = [dict(registry) for registry in STATE.registries]
    sys.path.insert(0, str(folder / "src"))
    try:
        importlib.import_module(f"{package}.ops.{pattern.name}.native")
        yield f"{package}.ops.{pattern.name}"
    finally:
        put_back(before)
        sys.path.remove(str(folder / "src"))
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
