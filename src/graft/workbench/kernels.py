"""Which kernels an op has, where each applies, and which one runs: asked of the op's own cases."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graft.errors import UnknownOp
from graft.ops import OPS, choose
from graft.ops.cases import Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelRow:
    """One kernel of one op for one dtype: in how many of the op's cases it applies and is chosen, and why not."""

    op: str
    kernel: str
    kind: str
    dtype: str
    cases: int
    applies: int
    chosen: int
    reasons: tuple[str, ...]


def kernel_rows(names: Sequence[str] = (), device: str = "cpu") -> list[KernelRow]:
    unknown = next((name for name in names if name not in OPS), None)
    if unknown is not None:
        raise UnknownOp(unknown, OPS)
    return [row for name in names or OPS for dtype in DTYPES for row in op_rows(name, dtype, device)]


def op_rows(name: str, dtype: torch.dtype, device: str) -> list[KernelRow]:
    spec = OPS[name]
    cases: list[Case] = importlib.import_module(f"graft.ops.{name}.cases").CASES
    calls = [case.make(device, dtype, torch.Generator().manual_seed(0)) for case in cases]
    chosen = [choose(spec, *call).name for call in calls]
    rows = []
    for kernel in spec.all_kernels:
        problems = [kernel.supports(*call) for call in calls]
        reasons = tuple(dict.fromkeys(problem for problem in problems if problem))
        applies, taken = problems.count(None), chosen.count(kernel.name)
        text = str(dtype).removeprefix("torch.")
        rows.append(KernelRow(name, kernel.name, kernel.kind, text, len(calls), applies, taken, reasons))
    return rows
