"""Where the files of a new transform go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Destination:
    """Where the files go. root: the checkout, or the plugin's folder."""

    root: Path
    checkout: bool

    @staticmethod
    def of(folder: Path | None) -> Destination:
        """`folder`, which may be a checkout itself; left out, the checkout around the working directory, or that."""
        start = (folder or Path.cwd()).resolve()
        for root in (start,) if folder else (start, *start.parents):
            if (root / "src/graft/passes/default.yaml").is_file():
                return Destination(root, True)
        return Destination(start, False)

    def transform(self, name: str) -> Path:
        return self.root / (f"src/graft/passes/library/{name}.py" if self.checkout else f"{name}.py")

    def test(self, name: str) -> Path:
        return self.root / (f"tests/unit/passes/library/test_{name}.py" if self.checkout else f"test_{name}.py")

    def module(self, name: str) -> str:
        return f"graft.passes.library.{name}" if self.checkout else name

    def op_folder(self, op: str) -> Path:
        return self.root / (f"src/graft/ops/{op}" if self.checkout else f"{op}_op")

    def op_module(self, op: str) -> str:
        return f"graft.ops.{op}" if self.checkout else f"{op}_op"
