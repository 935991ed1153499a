"""Which kernels an op has, where each applies, and which one runs: asked of the op's own cases."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graft.base.errors import UnknownOp
from graft.ops import OPS, choose
from graft.ops.call import EAGER, Asker
from graft.ops.cases import Case
from graft.ops.fused_linear.choice import current_table, picks_of, ranges, ranges_text
from graft.ops.fused_linear.kinds import kind_of
from graft.ops.fused_linear.tables import Table, entry_json
from graft.ops.launch import device_name
from graft.ops.selection import problem_of
from graft.ops.spec import OpSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelCoverage:
    """One kernel of one op for one dtype: in how many of the op's cases it applies and is chosen, and why not."""

    op: str
    kernel: str
    kind: str
    dtype: str
    cases: int
    applies: int
    chosen: int
    reasons: tuple[str, ...]


def kernel_rows(names: Sequence[str] = (), device: str = "cpu", backend: str = "eager") -> list[KernelCoverage]:
    """backend: that asks. Of native kernels it is told what they take; where rows of a step lie, a graph tells."""
    unknown = next((name for name in names if name not in OPS), None)
    if unknown is not None:
        raise UnknownOp(unknown, OPS)
    return [row for name in names or OPS for dtype in DTYPES for row in op_rows(name, dtype, device, backend)]


def op_rows(name: str, dtype: torch.dtype, device: str, backend: str) -> list[KernelCoverage]:
    spec = OPS[name]
    made = (case.make(device, dtype, torch.Generator().manual_seed(0)) for case in cases_of(spec))
    calls = [spec.call(*args).by(Asker(backend) if backend == "native" else EAGER) for args in made]
    chosen = [choose(spec, call).kernel for call in calls]
    rows = []
    for kernel in spec.table:
        problems = [problem_of(kernel, call) for call in calls]
        reasons = tuple(dict.fromkeys(problem for problem in problems if problem))
        applies, taken = problems.count(None), chosen.count(kernel)
        text = str(dtype).removeprefix("torch.")
        rows.append(KernelCoverage(name, kernel.name, kernel.kind, text, len(calls), applies, taken, reasons))
    return rows


def cases_of(spec: OpSpec) -> list[Case]:
    """CASES of `cases.py` beside the reference, or of its own file where a plugin has one file; else none."""
    module = spec.reference.__module__
    home = module.rpartition(".")[0]
    if home and importlib.util.find_spec(f"{home}.cases") is not None:
        module = f"{home}.cases"
    return getattr(importlib.import_module(module), "CASES", [])


def choice_table(device: torch.device) -> Table:
    return current_table(device_name(device))


def choice_texts(device: torch.device) -> list[str]:
    """Of fused_linear: a line a shape, which kernel runs for which token counts, by measurement."""
    return [ranges_text(shape, counts) for shape, counts in choice_table(device).items()]


def choice_rows(device: torch.device) -> list[dict[str, Any]]:
    """The same for programs. kernel: of the op's table; last: None for all counts beyond those measured."""
    rows = []
    for shape, counts in choice_table(device).items():
        for one in ranges(counts):
            kernel = picks_of(one.entry.how if one.entry else None, shape, one.first)[0].kernel
            row = {"kernel": kernel, "shape": shape.key(), "first": one.first, "last": one.last}
            if one.entry is None:
                rows.append({**row, "kind": kind_of(None, shape.format), "device": None})
            else:
                rows.append({**row, **entry_json(one.entry, shape), "device": one.entry.device})
    return rows
