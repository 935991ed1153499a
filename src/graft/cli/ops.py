"""`graft ops`: every op, its kernels in order, where each applies and which one runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import Device, Json

if TYPE_CHECKING:
    from graft.workbench.kernels import KernelRow


def ops(
    names: Annotated[list[str] | None, typer.Argument(help="Ops to show; all if left out.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """List the ops: kernels in the order they are tried, where each applies, which is chosen and why."""
    from graft.cli.show import out
    from graft.models.load import resolve_device
    from graft.workbench.kernels import kernel_rows

    rows = kernel_rows(names or (), str(resolve_device(device)))
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    last = ""
    for group in grouped(rows):
        first = group[0]
        if first.op != last:
            out.print(f"graft::{first.op}", style="bold")
            last = first.op
        facts = f"applies to {counts(group, 'applies')}, chosen for {counts(group, 'chosen')}"
        out.print(f"  {first.kernel:<10} {first.kind:<16} {facts}", soft_wrap=True)
        for reason in dict.fromkeys(reason for row in group for reason in row.reasons):
            out.print(f"{'':<30}not where {reason}", markup=False, soft_wrap=True)
    out.print(
        "Counted over each op's list of real shapes. --set kernels.OP=KERNEL names one, which then runs or fails."
    )


def grouped(rows: list[KernelRow]) -> list[list[KernelRow]]:
    """The rows of one kernel together, dtypes side by side."""
    groups: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.kernel), []).append(row)
    return list(groups.values())


def counts(group: list[KernelRow], field: str) -> str:
    """`all`, `none`, or `float32 6/6, bfloat16 0/6`."""
    values = [(row.dtype, getattr(row, field), row.cases) for row in group]
    if all(value == total for _, value, total in values):
        return "all"
    if not any(value for _, value, _ in values):
        return "none"
    return ", ".join(f"{dtype} {value}/{total}" for dtype, value, total in values if value)
