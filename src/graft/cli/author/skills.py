"""`graft skills`: what coding agents follow, listed, shown and copied to where they look."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.guard import guarded
from graft.cli.options import Json


def list_skills(as_json: Json = False) -> None:
    """List the skills: name, and when to take each."""
    from graft.cli.show import headed_table, out
    from graft.workbench.skills import all_skills

    found = all_skills()
    if as_json:
        rows = [{"name": one.name, "description": one.description, "path": str(one.path)} for one in found]
        print_json("skills-list", rows)
        return
    table = headed_table("skill", "what for")
    for one in found:
        table.add_row(one.name, one.description)
    out.print(table)


def show(name: Annotated[str, typer.Argument(help="As graft skills list has it.")], as_json: Json = False) -> None:
    """Print a skill: steps, commands, guard rails, and what to do when something fails."""
    from graft.workbench.skills import find_skill

    found = find_skill(name)
    if as_json:
        print_json("skills-show", found.to_dict())
    else:
        print(found.text, end="")


def install(
    folder: Annotated[Path, typer.Argument(help="Where the agent looks for skills.", metavar="DIR")],
    force: Annotated[bool, typer.Option("--force", help="Replace files there that differ.")] = False,
    as_json: Json = False,
) -> None:
    """Copy every skill to DIR/<name>/SKILL.md. Other files in DIR stay as they are."""
    from graft.cli.show import out
    from graft.workbench.skills import install_skills

    files = install_skills(folder, force=force)
    if as_json:
        rows = [{"path": str(file.path), "status": file.status} for file in files]
        print_json("skills-install", {"folder": str(folder), "files": rows})
        return
    for file in files:
        out.print(f"  {file.status:8} {file.path.relative_to(folder)}", markup=False, soft_wrap=True)
    out.print(f"{len(files)} skills in {folder}", markup=False, soft_wrap=True)


skills = typer.Typer(no_args_is_help=True, help="Skills for coding agents: list, show, install.")
skills.command("list")(guarded(list_skills))
for verb in (show, install):
    skills.command()(guarded(verb))
