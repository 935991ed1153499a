"""`graft note diff`: what changed from one iteration note to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.guard import guarded
from graft.cli.options import Json

note = typer.Typer(no_args_is_help=True, help="Iteration notes of graft check --note.")


@note.callback()
def notes() -> None:
    """Iteration notes of graft check --note."""


def diff(
    before: Annotated[Path, typer.Argument(help="A note.", metavar="BEFORE.md")],
    after: Annotated[Path, typer.Argument(help="A later one of the same transform and model.", metavar="AFTER.md")],
    as_json: Json = False,
) -> None:
    """Show what differs between two notes, section by section."""
    from graft.cli.show import out
    from graft.workbench.check.note_diff import diff_notes

    found = diff_notes(before, after)
    if as_json:
        print_json("note-diff", found.to_dict())
        return
    old, new = found.verdict
    verdict = old if old == new else f"{old} → {new}"
    out.print(f"{found.transform} on {found.model}: {verdict}", style="bold", markup=False, soft_wrap=True)
    for section in found.sections:
        if section.status != "same":
            out.print(f"{section.title}: {section.status}", markup=False, soft_wrap=True)
        for line in section.removed:
            out.print(f"  - {line}", style="red", markup=False, soft_wrap=True)
        for line in section.added:
            out.print(f"  + {line}", style="green", markup=False, soft_wrap=True)
    if found.same:
        out.print("the notes say the same", markup=False)


note.command("diff")(guarded(diff))
