"""Engines that a start keeps for the next one: compiled engines in graft's cache, each under its key.

    <cache directory>/engines/<key>/      as `graft compile` writes it; those of GPUs are not kept

One that is damaged is taken away and built anew. Together they take no more than GRAFT_ENGINE_CACHE_SIZE (8GiB; 0:
none is kept); those that were not used for longest go first. GRAFT_NO_ENGINE_CACHE=1 or --no-cache turns it off,
GRAFT_ENGINE_CACHE_DIR names another folder.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graft.base.caches import ENGINES
from graft.base.device_memory import parse_size, size_text
from graft.base.files import Progress, drop_folder, folder_bytes
from graft.base.half_written import remove_leftovers
from graft.engine.artifact.key import NoKey, config_part, engine_key, key_parts, model_part
from graft.engine.artifact.request import EngineRequest
from graft.engine.setup.parts import EngineParts

FOLDER, SIZE = ENGINES.variable, "GRAFT_ENGINE_CACHE_SIZE"
LIMIT = "8GiB"


@dataclass(frozen=True)
class KeptEngine:
    """Where the engine of a request is kept, or would be. problem: why there is no such place."""

    path: Path | None
    parts: dict[str, str]
    problem: str = ""

    @property
    def is_there(self) -> bool:
        return self.path is not None and self.path.is_dir()

    @property
    def short(self) -> str:
        return self.path.name[:12] if self.path else ""


def kept_engine(request: EngineRequest) -> KeptEngine:
    try:
        if not size_limit():
            raise NoKey(f"{SIZE} is 0")
        parts = key_parts(request)
    except NoKey as error:
        return KeptEngine(None, {}, f"engine cache: not used, because {error}")
    return KeptEngine(ENGINES.folder() / engine_key(parts), parts)


def drop(kept: KeptEngine) -> None:
    if kept.path is not None:
        with suppress(OSError):
            drop_folder(kept.path)


def files_changed(kept: KeptEngine, request: EngineRequest) -> bool:
    """Whether what the engine was built of is no longer what its key was made of."""
    try:
        now = {"model": model_part(Path(request.model)), "config": config_part(request)}
    except NoKey:
        return True
    return any(kept.parts[name] != value for name, value in now.items())


def keep_engine(kept: KeptEngine, parts: EngineParts, progress: Progress | None = None) -> str:
    """A line for the report; nothing that goes wrong here keeps the engine from running."""
    from graft.engine.artifact.save import refuse_unsavable, save_engine, stored_bytes

    if kept.path is None:
        return kept.problem
    if parts.settings is not None and parts.settings.verify != "structure":
        return "engine cache: not kept, because its checks are to be made each time"
    try:
        refuse_unsavable(parts, kept.path)
        size, limit = stored_bytes(parts), size_limit()
        if size > limit:
            return f"engine cache: not kept, because it takes {size_text(size)} ({SIZE}={size_text(limit)})"
        kept.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(kept.path.parent).free
        if size > free // 4:
            return f"engine cache: not kept, because it takes {size_text(size)} of {size_text(free)} that are free"
        if progress:
            progress("keeping the engine for the next start", 0, 1)
        save_engine(
            parts,
            kept.path,
            overwrite=True,
            made_by=(),
            kept_for=kept.parts,
            with_weights=True,
        )
        evict(kept.path.parent, limit, kept.path)
    except Exception as error:  # noqa: BLE001 (told, and the engine runs)
        return f"engine cache: not kept, because {error}"
    return f"engine cache: kept for the next start ({kept.short}, {size_text(size)})"


def size_limit() -> int:
    given = os.environ.get(SIZE, "") or LIMIT
    return 0 if given == "0" else parse_size(given, SIZE)


def evict(folder: Path, limit: int, newest: Path) -> list[Path]:
    """Takes away what was not used for longest, until the rest fits; gives what went."""
    remove_leftovers(folder)
    aged = []
    for path in folder.iterdir():
        with suppress(OSError):  # another process took it
            if path.is_dir() and not path.name.startswith("."):
                aged.append((path == newest, path.stat().st_mtime_ns, folder_bytes(path), path))
    gone, total = [], sum(size for _, _, size, _ in aged)
    for is_newest, _, size, path in sorted(aged):
        if total <= limit or is_newest:
            break
        with suppress(FileNotFoundError):  # another process took it
            drop_folder(path)
            gone.append(path)
        total -= size
    return gone
