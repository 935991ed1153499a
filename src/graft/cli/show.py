"""What people see: progress on standard error, tables on standard output; rich respects NO_COLOR and pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from graft.cli.waiting import end_waiting

if TYPE_CHECKING:
    from graft.passes.report import Report, TransformRecord

# Read when transformers and tqdm are imported, which commands do after this module.
for name, value in (("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("TQDM_DISABLE", "1")):
    os.environ.setdefault(name, value)

out = Console(highlight=False, emoji=False)  # `model.py:100:` is a line, and no emoji
err = Console(stderr=True, highlight=False, emoji=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error that follows `report(what, done, total)`; plain silence when that is not a terminal."""
    quiet_libraries()
    end_waiting()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A sign on standard error while something without steps goes on."""
    end_waiting()
    with err.status(what):
        yield


def tell_notes(notes: Iterable[str]) -> None:
    """What a run does otherwise than the model's files ask for, on standard error."""
    end_waiting()
    for note in notes:
        err.print(f"graft: note: {note}", markup=False, soft_wrap=True)


def quiet_libraries() -> None:
    """transformers and its friends draw bars and print advice of their own; graft's is enough. It is told when it is
    imported, if at all: a compiled engine starts without it."""
    if "transformers" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return
    import transformers.utils.logging as hf_logging

    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()


def print_pipeline(report: Report) -> None:
    """The table, then for each transform how its matches were checked numerically, or why
    there are none, a line each; then notes."""
    out.print(pipeline_table(report))
    for record in report.transforms.values():
        for text in (check_text(record), record.reason):
            if text:
                out.print(f"{record.name}: {text}", markup=False, soft_wrap=True)
    for note in report.notes:
        out.print(note, markup=False, soft_wrap=True)


def pipeline_table(report: Report) -> Table:
    table = headed_table(
        "stage", "transform", "status", "matches >", "nodes >", "seconds >", title=f"Pipeline of {report.model}"
    )
    for record in report.transforms.values():
        nodes = f"{record.nodes_before} → {record.nodes_after}" if record.nodes_before else ""
        seconds = f"{record.seconds:.3f}" if record.nodes_before else ""
        matches = str(len(record.matches)) if record.nodes_before else ""
        table.add_row(record.stage, record.name, record.status, matches, nodes, seconds)
    return table


def headed_table(*heads: str, title: str | None = None) -> Table:
    """Columns with white between them, so that 80 characters hold a row; in a narrower terminal cells fold, and no
    head is cut. `>` behind a head: numbers, on the right."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        name = head.removesuffix(" >")
        table.add_column(name, justify="right" if name != head else "left", overflow="fold", min_width=len(name))
    return table


def check_text(record: TransformRecord) -> str:
    """`5 checked numerically, worst 2.6e-07 of 1.3e-06 allowed (random inputs)`."""
    from graft.passes.report import checks_text

    told = checks_text(record.matches)
    return told or (f"not checked numerically: {record.unchecked}" if record.unchecked else "")
