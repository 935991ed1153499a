"""Whether a name can be a model at all: told before anything is imported, started or converted."""

from __future__ import annotations

from pathlib import Path

from graft.base.errors import CheckpointError, UnknownModel
from graft.models.registry import entries


def check_name(name: str | Path) -> None:
    """A registry name, a folder or a .gguf file; raises UnknownModel or CheckpointError for what is none."""
    path = Path(name)
    if str(name) in entries() or path.is_dir():
        return
    if path.suffix != ".gguf":
        raise UnknownModel(str(name), entries())
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
