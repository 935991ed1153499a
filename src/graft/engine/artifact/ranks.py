"""A compiled engine on several ranks: each writes its part under rank<r>/, and what all have alike moves up."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.base.errors import ArtifactError, GraftError
from graft.base.files import Progress
from graft.engine.artifact.format import rank_folder
from graft.engine.artifact.part import write_part
from graft.engine.ranks.leader import LeaderGraph
from graft.engine.setup.parts import EngineParts


def write_parts(
    leader: LeaderGraph,
    parts: EngineParts,
    folder: Path,
    path: Path,
    with_weights: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    """On rank 0: what the manifest says of all. folder: becomes `path` when it is whole."""
    ranks = leader.group.world
    order = json.dumps({"folder": str(folder.absolute()), "with_weights": with_weights, "ranks": ranks})
    said = [json.loads(text) for text in leader.save(order, lambda: write_own(parts, 0, order, progress))]
    for rank, one in enumerate(said):
        problem = one.get("problem") or missing(folder / rank_folder(rank), one["files"])
        if problem:
            raise ArtifactError(path, f"cannot be written: rank {rank}: {problem}; nothing was left behind")
    move_up(folder, len(said))
    abouts = [one["about"] for one in said]
    return {**abouts[0], "ranks": abouts}


def write_own(parts: EngineParts, rank: int, order: str, progress: Progress | None = None) -> str:
    """The part of this rank. An error is for rank 0 to tell: the engine can go on."""
    told = json.loads(order)
    folder = Path(told["folder"])
    if not folder.is_dir():
        problem = f"there is no {folder} here; all ranks write into one folder, which their machines must share"
        return json.dumps({"problem": problem})
    own = folder / rank_folder(rank)
    try:
        own.mkdir()
        about = write_part(parts, own, told["with_weights"], progress, told["ranks"])
    except (GraftError, OSError) as error:
        return json.dumps({"problem": str(error)})
    sizes = {path.relative_to(own).as_posix(): path.stat().st_size for path in own.rglob("*") if path.is_file()}
    return json.dumps({"about": {**about, "rank": rank}, "files": sizes})


def missing(own: Path, files: Mapping[str, int]) -> str:
    """What a rank has written and rank 0 does not see: it lies on the disk of another machine."""
    for name, size in files.items():
        if not (own / name).is_file() or (own / name).stat().st_size != size:
            return (
                f"its {name} is not seen by rank 0; all ranks write into one folder, which their machines must share"
            )
    return ""


def move_up(folder: Path, world: int) -> None:
    """What all ranks have alike lies in the folder once: one native object, say, where they compute the same."""
    first = folder / rank_folder(0)
    others = [folder / rank_folder(rank) for rank in range(1, world)]
    for file in sorted(path for path in first.rglob("*") if path.is_file()):
        name = file.relative_to(first)
        twins = [other / name for other in others]
        if not all(twin.is_file() and filecmp.cmp(file, twin, shallow=False) for twin in twins):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        file.rename(folder / name)
        for twin in twins:
            twin.unlink()
    for emptied in sorted((p for own in (first, *others) for p in own.rglob("*") if p.is_dir()), reverse=True):
        if not any(emptied.iterdir()):
            emptied.rmdir()
