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
    from graft.workbench.kernels import choice_rows, choice_texts, kernel_rows

    where = resolve_device(device)
    rows = kernel_rows(names or (), str(where))
    if as_json:
        choices = choice_rows(where) if any(map(looks_up, rows)) else []
        print(json.dumps([{**asdict(row), **({"choices": choices} if looks_up(row) else {})} for row in rows]))
        return
    last = ""
    groups = grouped(rows)
    for group in groups:
        first = group[0]
        if first.op != last:
            out.print(f"graft::{first.op}", style="bold")
            last = first.op
        facts = f"applies to {counts(group, 'applies')}, chosen for {counts(group, 'chosen')}"
        out.print(f"  {first.kernel:<10} {first.kind:<16} {facts}", soft_wrap=True)
        for reason in dict.fromkeys(reason for row in group for reason in row.reasons):
            out.print(f"{'':<30}not where {reason}", markup=False, soft_wrap=True)
        if group is last_with_choices(groups):
            out.print("  tuned, by tokens of a call:")
            for line in choice_texts(where):
                out.print(f"    {line}", markup=False, soft_wrap=True)
    out.print(
        "Counted over each op's list of real shapes. --set kernels.OP=KERNEL names one, which then runs or fails."
    )


def looks_up(row: KernelRow) -> bool:
    """Whether this kernel is one of several, chosen by measurement."""
    return (row.op, row.kernel) == ("fused_linear", "tuned")


def last_with_choices(groups: list[list[KernelRow]]) -> list[KernelRow] | None:
    """The last kernel of the op whose choices are shown below its kernels."""
    ops = {group[0].op for group in groups if looks_up(group[0])}
    return next((group for group in reversed(groups) if group[0].op in ops), None)


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
