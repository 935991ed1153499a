"""Writing a compiled engine: all of it or nothing, and the same bytes for the same engine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from graft.backends.native.stored import NativeStep, step_weights
from graft.base.errors import ArtifactError, DumpError
from graft.base.files import Progress, atomic_folder
from graft.base.manifest import MANIFEST, OWN_KEYS, OpenFolder, is_marked, write_manifest
from graft.engine.artifact.format import CONFIG, ENGINE, TOKENIZER
from graft.engine.artifact.part import config_values, run_prompts, write_part
from graft.engine.artifact.ranks import write_parts
from graft.engine.artifact.tokenizer import write_tokenizer
from graft.engine.ranks.leader import LeaderGraph
from graft.engine.setup.parts import EngineParts
from graft.ir.verify import module_state


def save_engine(
    parts: EngineParts,
    path: Path,
    *,
    overwrite: bool,
    made_by: tuple[str, ...],
    progress: Progress | None = None,
    kept_for: Mapping[str, str] | None = None,
    with_weights: bool = False,
) -> None:
    """A folder that graft did not write is never touched; an engine is replaced with `overwrite` alone. On several
    ranks each writes its part.

    kept_for: the parts of its key, for one in graft's cache. with_weights: all of them are in the folder; without it,
    on a CPU, those that lie in the model's own folder as kernels read them stay there, if they are most of them.
    """
    check_place(path, overwrite)
    made_by = made_by or parts.command
    if parts.kept_at is not None:
        return copy_engine(parts.kept_at, path, overwrite=overwrite, made_by=made_by)
    refuse_unsavable(parts, path)
    tell = progress or (lambda *_: None)
    with written(path), atomic_folder(path, lambda: check_place(path, overwrite)) as folder:
        (folder / CONFIG).write_text(json.dumps(config_values(parts), indent=1, sort_keys=True))
        fast = write_tokenizer(parts.model.tokenizer, folder / TOKENIZER)
        if parts.device.type == "cuda":
            tell("running prompts, so that their kernels are there", 0, 1)
            run_prompts(parts)
        if isinstance(parts.engine.graph, LeaderGraph):
            about = write_parts(parts.engine.graph, parts, folder, path, with_weights, progress)
        else:
            about = write_part(parts, folder, with_weights, progress)
        tell("checking what was written", 0, 1)
        about["fast_tokenizer"] = fast
        if kept_for is not None:
            about["kept_for"] = dict(kept_for)
        write_manifest(folder, {**about, "made_by": made_by}, ENGINE)


def copy_engine(source: Path, path: Path, *, overwrite: bool, made_by: tuple[str, ...]) -> None:
    """Of one in graft's cache, whose files are checked on the way."""
    opened = OpenFolder(source, ENGINE)
    try:
        opened.start_checks()
        about = {name: value for name, value in opened.manifest.items() if name not in ("kept_for", *OWN_KEYS)}
        with written(path), atomic_folder(path, lambda: check_place(path, overwrite)) as folder:
            for name in opened.manifest["files"]:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with open(os.dup(opened.take(name)), "rb") as file, (folder / name).open("wb") as target:
                    file.seek(0)
                    shutil.copyfileobj(file, target, 1 << 22)
            write_manifest(folder, {**about, "made_by": made_by}, ENGINE)
    finally:
        opened.close()


def stored_bytes(parts: EngineParts) -> int:
    """About what a folder of it takes: its weights."""
    step: NativeStep | None = parts.lowered.step
    if step is None:
        return sum({id(t): t.nbytes for t in module_state(parts.graph_module()).values()}.values())
    return sum(tensor.nbytes for tensor in step_weights(step).values())


@contextmanager
def written(path: Path) -> Iterator[None]:
    try:
        yield
    except (DumpError, OSError) as error:
        raise ArtifactError(path, f"cannot be written: {error}; nothing was left behind") from error


def check_place(path: Path, overwrite: bool) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise ArtifactError(path, "is a file; a compiled engine is a folder, so choose another path")
    present = {entry.name for entry in path.iterdir()}
    if present and (MANIFEST not in present or not is_marked(path, ENGINE)):
        raise ArtifactError(
            path, f"holds files that are no compiled engine, for example {min(present)}; choose another"
        )
    if present and not overwrite:
        raise ArtifactError(path, "holds a compiled engine already; pass overwrite=True (--overwrite) to replace it")


def refuse_unsavable(parts: EngineParts, path: Path) -> None:
    if parts.lowered is None:
        raise ArtifactError(path, "cannot be written: this engine came from an artifact; copy that folder instead")
    if parts.engine.pooling is not None:
        raise ArtifactError(path, "cannot be written: engines that embed are built at each start")
    if parts.backend not in ("native", "eager"):
        raise ArtifactError(
            path, f"cannot be written: backend {parts.backend!r} compiles at every start; use native or eager"
        )
