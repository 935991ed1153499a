"""The folder that a session works in: what it names must lie inside, and all that is written goes there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from graft.base.caches import KINDS
from graft.base.errors import UsageError
from graft.base.files import write_whole

OWN = ".graft"  # caches, temporary files and whole results


class Workspace:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise UsageError(f"--workspace {root} is not a folder")
        for folder in (
            self.root / OWN,
            self.root / OWN / "cache",
            self.root / OWN / "tmp",
            self.root / OWN / "results",
        ):
            if folder.is_symlink():
                raise UsageError(f"--workspace {root}: {folder} is a link; what is written must lie in the workspace")

    def inside(self, name: str, what: str) -> str:
        """A path inside, from the workspace on; what leads out, by links too, is refused."""
        plain(name, what)
        path = (self.root / name).resolve()
        if path != self.root and self.root not in path.parents:
            raise UsageError(f"{what} {name!r} is outside of the workspace; name a path inside it")
        return str(path.relative_to(self.root))

    def source(self, name: str, what: str) -> str:
        """A model's name, or a path inside: what looks like a path must be one."""
        plain(name, what)
        looks_like_path = os.sep in name or name.startswith((".", "~")) or (self.root / name).exists()
        return self.inside(name, what) if looks_like_path else name

    def environment(self) -> dict[str, str]:
        """Caches and temporary files in the workspace."""
        own = self.root / OWN
        folders = {
            "GRAFT_CACHE_DIR": own / "cache",
            "XDG_CACHE_HOME": own / "cache",
            "TRITON_CACHE_DIR": own / "cache" / "triton",
            "TORCHINDUCTOR_CACHE_DIR": own / "cache" / "inductor",
            "TMPDIR": own / "tmp",
        }
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        left_out = {kind.variable for kind in KINDS}
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        extra = {"NO_COLOR": "1", "COLUMNS": "160", "PYTHONDONTWRITEBYTECODE": "1"}
        return kept | {name: str(folder) for name, folder in folders.items()} | extra

    def keep(self, text: str) -> str:
        """A whole result; its id."""
        name = secrets.token_hex(8)
        write_whole(self.root / OWN / "results" / f"{name}.json", text)
        return name

    def kept(self, name: str) -> str:
        if not name.isalnum():
            raise UsageError(f"{name!r} is no result's id")
        path = self.root / OWN / "results" / f"{name}.json"
        if not path.is_file():
            raise UsageError(f"there is no result {name!r}; ids are those of answers with next_offset")
        return path.read_text()


def plain(text: str, what: str) -> str:
    """Text that stands for itself: an empty one, or one that a command would take for an option, is refused."""
    if not text or text.startswith("-") or "\0" in text:
        raise UsageError(f"{what} {text!r} is no name or path")
    return text
