"""From a folder of dumps to a file in the format that was asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graft.base.errors import ExportRefused
from graft.base.files import write_together
from graft.passes.dumps import WEIGHTS
from graft.passes.library.streams.schedule import ScheduledCall
from graft.workbench.discover.candidates import counted
from graft.workbench.discover.savings import Machine
from graft.workbench.discover.values import restore_values
from graft.workbench.export.explorer import collection
from graft.workbench.export.perfetto import predicted_slots, timed_slots, trace_document
from graft.workbench.export.pt2 import program_of, save_program
from graft.workbench.runs import StoredRun, StoredStep, open_run


@dataclass(frozen=True)
class Exported:
    """What was written. notes: what the file does not carry, or how to open it."""

    file: Path
    step: str
    what: str
    notes: tuple[str, ...] = ()


def export_run(
    folder: str | Path,
    form: str,
    output: Path,
    *,
    step: str = "",
    tokens: int = 1,
    timed: bool = False,
    device: str = "cpu",
) -> Exported:
    """form: perfetto, model-explorer or pt2."""
    run = open_run(folder)
    chosen = step_named(run, step)
    if (form == "pt2" or timed) and not (run.folder / WEIGHTS).is_file():
        raise ExportRefused(
            f"{run.folder} holds no weights, and a graph without them cannot run; dump the model again with --weights"
        )
    if form == "perfetto":
        return export_trace(run, chosen, output, tokens, timed, device)
    if form == "model-explorer":
        return export_explorer(run, chosen, output)
    program, notes = program_of(run, chosen)
    save_program(program, output)
    return Exported(output, chosen.transform, f"the graph after {chosen.transform}, for torch.export.load", notes)


def step_named(run: StoredRun, name: str) -> StoredStep:
    return run.steps[-1] if not name else run.steps[0] if name == "captured" else run.after(name)


def export_trace(run: StoredRun, step: StoredStep, output: Path, tokens: int, timed: bool, device: str) -> Exported:
    shapes, machine = step.graph(), Machine()
    restore_values(shapes)
    title = f"{step.transform}: {counted(tokens)}, predicted from bytes and launches"
    rows: list[tuple[str, Sequence[ScheduledCall]]] = [(title, predicted_slots(shapes, tokens, machine))]
    if timed:
        calls = timed_slots(step.graph(run.state()), shapes, device)
        rows.append((f"{step.transform}: timed on {device} with made-up inputs", calls))
    write_together({output: json.dumps(trace_document(run.report, rows))})
    notes = (
        f"predicted with {machine.bandwidth_gb_s:.0f} GB/s and {machine.launch_us} µs a launch, {machine.source}",
        "open it at ui.perfetto.dev",
    )
    ran = sum(record.status != "disabled" for record in run.report.transforms.values())
    what = "; ".join([f"{ran} transforms", *(f"{len(slots)} calls of {name}" for name, slots in rows)])
    return Exported(output, step.transform, what, notes)


def export_explorer(run: StoredRun, step: StoredStep, output: Path) -> Exported:
    """The captured graph beside the chosen one, to be looked at side by side."""
    steps = list(dict.fromkeys((run.steps[0], step)))
    graphs = [(f"{one.number:03d} {one.transform}", one.graph()) for one in steps]
    write_together({output: json.dumps(collection(run.report.model or run.folder.name, graphs))})
    sizes = " and ".join(f"{len(gm.graph.nodes)} nodes ({title})" for title, gm in graphs)
    return Exported(output, step.transform, sizes, ("open it in Model Explorer",))
