"""Patterns over rows, their packages, and faults that are planted in what is generated from them."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from graft.base.plugins import STATE, put_back
from graft.workbench.scaffold import row_texts
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
    {"x": "a 4 b 8", "y": "a 1 b 8", "z": "a 1 b 8"},
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
PATTERNS = (ADD_NORM, ROTATED, GATED, RANGED, SOFTCAPPED)


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


@dataclass(frozen=True)
class RowFault:
    """The generator writes `new` where it should write `old`."""

    pattern: RowPattern
    template: str
    old: str
    new: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        real = row_texts.fill

        def faulty(name: str, values: dict[str, str]) -> str:
            text = real(name, values)
            if name != self.template:
                return text
            assert self.old in text, text
            return text.replace(self.old, self.new, 1)

        patch.setattr(row_texts, "fill", faulty)


NATIVE, TRITON, LOWERING = "native_rows_header", "triton_rows", "native_rows"
FAULTS = (
    RowFault(ADD_NORM, NATIVE, " / static_cast<float>(n_c)", ""),
    RowFault(ADD_NORM, NATIVE, "1e-06f", "1e-05f"),
    RowFault(ADD_NORM, NATIVE, "row_sum(0, n_c", "row_sum(0, n_c - 1"),
    RowFault(ADD_NORM, NATIVE, "t2 * t2", "t2 * t1"),
    RowFault(ADD_NORM, NATIVE, "r_out1[i] = ", "r_out1[i] = 1.001f * "),
    RowFault(ADD_NORM, NATIVE, "1.0f / std::sqrt", "std::sqrt"),
    RowFault(ROTATED, NATIVE, "r_x[i+4]", "r_x[i+3]"),
    RowFault(ROTATED, NATIVE, "(-t", "(t"),
    RowFault(ROTATED, NATIVE, "int64_t i = 4", "int64_t i = 5"),
    RowFault(ROTATED, NATIVE, "a.x.heads == 1 ? 0 : head", "0"),
    RowFault(GATED, NATIVE, "r_x[i+20]", "r_x[i]"),
    RowFault(GATED, NATIVE, "relu(", "std::fabs("),
    RowFault(RANGED, NATIVE, "row_max", "row_min"),
    RowFault(RANGED, NATIVE, "a.weight[i]", "a.weight[0]"),
    RowFault(ADD_NORM, TRITON, "s0 / n_c", "s0 / (n_c + 1)"),
    RowFault(ADD_NORM, TRITON, "mask = i < n_c", "mask = i < n_c - 1"),
    RowFault(ADD_NORM, TRITON, "tl.rsqrt", "tl.sqrt"),
    RowFault(ADD_NORM, TRITON, "i1 * x_s1", "i1 * x_s2"),
    RowFault(ROTATED, TRITON, "r_x + i+4", "r_x + i+3"),
    RowFault(ROTATED, TRITON, "= -t", "= t"),
    RowFault(ROTATED, TRITON, "i1 * y_s1", "row * y_s1 + i1"),
    RowFault(GATED, TRITON, "r_x + i+20", "r_x + i"),
    RowFault(RANGED, TRITON, "row_max(tl.where", "row_min(tl.where"),
    RowFault(RANGED, TRITON, 'float("-inf")', "0.0"),
    # what is read: another input, another row, a neighbour, too little
    RowFault(ADD_NORM, NATIVE, "r_y[i]", "r_x[i]"),
    RowFault(ADD_NORM, NATIVE, "a.weight[i]", "a.weight[i / 2]"),
    RowFault(ROTATED, NATIVE, "r_y[i]", "1.0f"),
    RowFault(ROTATED, NATIVE, "r_z[i]", "r_y[i]"),
    RowFault(GATED, NATIVE, "i < 20", "i < 19"),
    RowFault(RANGED, NATIVE, "row_min(0, n_c", "row_min(1, n_c"),
    RowFault(SOFTCAPPED, NATIVE, "(t0 - s0)", "(t0 + s0)"),
    RowFault(SOFTCAPPED, NATIVE, "row_sum(0, n_c", "row_sum(1, n_c"),
    RowFault(ADD_NORM, TRITON, "r_y + i", "r_x + i"),
    RowFault(ADD_NORM, TRITON, "weight_ptr + i", "weight_ptr + i // 2"),
    RowFault(ROTATED, TRITON, "r_z + i", "r_y + i"),
    RowFault(GATED, TRITON, "mask = i < 20", "mask = i < 16"),
    RowFault(SOFTCAPPED, TRITON, "i1 * y_s1", "i1 * y_s2"),
    # what is computed: another function, sign, number or order
    RowFault(ADD_NORM, NATIVE, "row_sum", "row_max"),
    RowFault(GATED, NATIVE, "(t1 * t1)", "(t1 + t1)"),
    RowFault(RANGED, NATIVE, "0.5f", "0.25f"),
    RowFault(RANGED, NATIVE, " / ", " * "),
    RowFault(SOFTCAPPED, NATIVE, "4.0f", "4.5f"),
    RowFault(SOFTCAPPED, NATIVE, "0.125f", "0.12f"),
    RowFault(SOFTCAPPED, NATIVE, "std::tanh", "std::sin"),
    RowFault(ADD_NORM, TRITON, "1e-06", "1e-05"),
    RowFault(GATED, TRITON, "* t", "+ t"),
    RowFault(RANGED, TRITON, "0.5", "0.25"),
    RowFault(SOFTCAPPED, TRITON, "4.0", "4.5"),
    RowFault(SOFTCAPPED, TRITON, "tl.sum(tl.where", "row_max(tl.where"),
    # what is written
    RowFault(ADD_NORM, NATIVE, "r_out0[i] = ", "r_out0[i] = 0.999f * "),
    RowFault(ADD_NORM, TRITON, "tl.store(r_out1 + i, ", "tl.store(r_out1 + i, 1.001 * "),
    RowFault(ROTATED, TRITON, "tl.store(r_out + i, ", "tl.store(r_out + i, 0.999 * "),
    RowFault(SOFTCAPPED, TRITON, "out_ptr + row * n_c", "out_ptr + (row // 2) * n_c"),
)
