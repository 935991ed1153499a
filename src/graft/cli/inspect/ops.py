"""`graft ops`: every op's table of kernels in order, what each takes and which one runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.documents import print_json
from graft.cli.options import Device, Json

if TYPE_CHECKING:
    from graft.workbench.kernels import KernelCoverage


def ops(
    names: Annotated[list[str] | None, typer.Argument(help="Ops to show; all if left out.")] = None,
    device: Device = "auto",
    backend: Annotated[str, typer.Option(help="Which backend asks: eager, or native.")] = "eager",
    as_json: Json = False,
) -> None:
    """List the ops: the table of kernels in the order they are tried, what each takes, which is chosen and why."""
    from graft.cli.show import out
    from graft.models.places import resolve_device
    from graft.workbench.kernels import choice_rows, choice_texts, kernel_rows

    if backend not in ("eager", "native"):
        raise typer.BadParameter(f"{backend!r} is neither eager nor native", param_hint="--backend")
    where = resolve_device(device)
    rows = kernel_rows(names or (), str(where), backend)
    if as_json:
        choices = choice_rows(where) if any(map(looks_up, rows)) else []
        print_json("ops", [with_choices(row, choices) for row in rows])
        return
    last = ""
    groups = grouped(rows)
    for index, group in enumerate(groups):
        first = group[0]
        if first.op != last:
            out.print(f"graft::{first.op}", style="bold")
            last = first.op
        facts = f"takes {counts(group, 'applies')}, chosen for {counts(group, 'chosen')}"
        if not first.cases:
            facts = "not counted: its op has no list of shapes (CASES)"
        out.print(f"  {first.kernel:<10} {first.kind:<10} {facts}", soft_wrap=True)
        for reason in dict.fromkeys(reason for row in group for reason in row.reasons):
            out.print(f"{'':<24}not where {reason}", markup=False, soft_wrap=True)
        ends = index + 1 == len(groups) or groups[index + 1][0].op != first.op
        if ends and looks_up(first):
            out.print("  before that order, on a GPU, what was measured to be fastest, by tokens of a call:")
            for line in choice_texts(where):
                out.print(f"    {line}", markup=False, soft_wrap=True)
    out.print(
        "Counted over each op's list of real shapes. --set kernels.OP=KERNEL names one, which then runs or fails."
    )


def looks_up(row: KernelCoverage) -> bool:
    """Whether kernels of this op are chosen by measurement."""
    from graft.ops import OPS

    return OPS[row.op].measured is not None


def with_choices(row: KernelCoverage, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """For programs: a kernel with the shapes and tokens that it was measured to be fastest for."""
    own = [choice for choice in choices if looks_up(row) and choice["kernel"] == row.kernel]
    return {**asdict(row), **({"choices": own} if own else {})}


def grouped(rows: list[KernelCoverage]) -> list[list[KernelCoverage]]:
    """The rows of one kernel together, dtypes side by side."""
    groups: dict[tuple[str, str], list[KernelCoverage]] = {}
    for row in rows:
        groups.setdefault((row.op, row.kernel), []).append(row)
    return list(groups.values())


def counts(group: list[KernelCoverage], field: str) -> str:
    """`all`, `none`, or `float32 6/6, bfloat16 0/6`."""
    values = [(row.dtype, getattr(row, field), row.cases) for row in group]
    if all(value == total for _, value, total in values):
        return "all"
    if not any(value for _, value, _ in values):
        return "none"
    return ", ".join(f"{dtype} {value}/{total}" for dtype, value, total in values if value)
