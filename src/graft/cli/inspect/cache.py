"""`graft cache`: what graft keeps on disk, how large it is, and carrying or removing it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.guard import guarded
from graft.cli.options import Json

if TYPE_CHECKING:
    from graft.base.caches import CacheEntry, CacheKind

Kind = Annotated[
    list[str] | None,
    typer.Option(
        "--kind", help="Of this kind alone: engines, graphs, native, checks, models, gguf, tuned. Repeatable."
    ),
]
SECONDS = {"h": 3600, "d": 86_400, "w": 604_800}


def ls(kind: Kind = None, as_json: Json = False) -> None:
    """List the entries: kind, size, when each was last used, and what it is for."""
    from graft.base.caches import all_entries
    from graft.base.device_memory import size_text
    from graft.cli.show import headed_table, out

    found = all_entries(chosen_kinds(kind))
    if as_json:
        print_json("cache-ls", [one.to_data() for one in found])
        return
    table = headed_table("kind", "entry", "size >", "last used", "for")
    for one in found:
        day = time.strftime("%Y-%m-%d", time.localtime(one.used))
        table.add_row(one.kind.name, one.name[:16], size_text(one.bytes), day, one.about)
    out.print(table if found else "graft's caches are empty")


def stats(as_json: Json = False) -> None:
    """How much of each kind there is, and where."""
    from graft.base.caches import KINDS, entries
    from graft.base.device_memory import size_text
    from graft.cli.show import headed_table, out

    rows = [(kind, entries(kind)) for kind in KINDS]
    if as_json:
        about = {
            kind.name: {"folder": str(kind.folder()), "entries": len(found), "bytes": sum(one.bytes for one in found),
                        "holds": kind.holds}
            for kind, found in rows
        }  # fmt: skip
        print_json("cache-stats", about)
        return
    table = headed_table("kind", "entries >", "size >", "holds", "folder")
    for kind, found in rows:
        size = size_text(sum(one.bytes for one in found))
        table.add_row(kind.name, str(len(found)), size, kind.holds, str(kind.folder()))
    out.print(table)


def export(
    file: Annotated[Path, typer.Argument(help="The bundle to write.", metavar="FILE")],
    kind: Kind = None,
    as_json: Json = False,
) -> None:
    """Write entries to one file. Without --kind: engines, graphs, native and checks."""
    from graft.base.cache_bundle import export_entries
    from graft.base.caches import CHECKS, ENGINES, GRAPHS, NATIVE, all_entries

    kinds = chosen_kinds(kind) if kind else (ENGINES, GRAPHS, NATIVE, CHECKS)
    written = export_entries(file, all_entries(kinds))
    data: dict[str, object] = {"file": str(file), "entries": [one.to_data() for one in written]}
    tell("cache-export", as_json, f"{file}: {told(written)}", data)


def import_(
    file: Annotated[Path, typer.Argument(help="A bundle that export wrote.", metavar="FILE")], as_json: Json = False
) -> None:
    """Put a bundle's entries where they belong; those that are there stay. It may hold code."""
    from graft.base.cache_bundle import import_bundle

    found = import_bundle(file)
    tell(
        "cache-import", as_json, f"{file}: {len(found.new)} entries are new, {len(found.known)} were there",
        {"new": list(found.new), "known": list(found.known)},
    )  # fmt: skip


def prune(
    older: Annotated[str, typer.Option("--older", help="Not used for so long: 30d, 12h, 2w; 0d is all.")],
    kind: Kind = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and leave it.")] = False,
    as_json: Json = False,
) -> None:
    """Remove entries that were not used for a while. Downloads and measurements go with --kind alone."""
    from graft.base.caches import KINDS
    from graft.base.caches import prune as prune_caches

    kinds = chosen_kinds(kind) if kind else tuple(one for one in KINDS if one.made_again)
    gone = prune_caches(kinds, time.time() - seconds(older), dry=dry_run)
    tell(
        "cache-prune", as_json, f"{'would remove' if dry_run else 'removed'} {told(gone)}",
        {"removed": [one.to_data() for one in gone], "dry_run": dry_run},
    )  # fmt: skip


def chosen_kinds(names: Sequence[str] | None) -> tuple[CacheKind, ...]:
    from graft.base.caches import KINDS
    from graft.base.errors import UsageError, near

    known = {kind.name: kind for kind in KINDS}
    for name in names or ():
        if name not in known:
            raise UsageError(f"--kind {name!r} is none of graft's caches{near(name, known)}")
    return tuple(known[name] for name in names) if names else KINDS


def seconds(text: str) -> float:
    from graft.base.errors import UsageError

    found = re.fullmatch(r"(\d+)([hdw])", text)
    if found is None:
        raise UsageError(f"--older takes a time like 30d, 12h or 2w, not {text!r}")
    return int(found[1]) * SECONDS[found[2]]


def told(entries: Sequence[CacheEntry]) -> str:
    from graft.base.device_memory import size_text

    return f"{len(entries)} entries, {size_text(sum(one.bytes for one in entries))}"


def tell(schema: str, as_json: bool, text: str, data: dict[str, object]) -> None:
    from graft.cli.show import out

    if as_json:
        print_json(schema, data)
    else:
        out.print(text, markup=False, soft_wrap=True)


cache = typer.Typer(no_args_is_help=True, help="graft's caches on disk: ls, stats, export, import, prune.")
for verb in (ls, stats, export, prune):
    cache.command()(guarded(verb))
cache.command("import")(guarded(import_))
