"""Where the files of a new transform go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from graft.base.errors import UsageError


@dataclass(frozen=True)
class Destination:
    """Where the files go. root: the checkout, the plugin's folder, or the project of `package`."""

    root: Path
    checkout: bool
    package: str = ""

    @staticmethod
    def of(folder: Path | None) -> Destination:
        """`folder`, which may be a checkout itself; left out, the checkout around the working directory, or that."""
        start = (folder or Path.cwd()).resolve()
        for root in (start,) if folder else (start, *start.parents):
            if is_checkout(root):
                return Destination(root, True)
        return Destination(start, False)

    @staticmethod
    def in_package(folder: Path) -> Destination:
        """A project of its own: `my-fusions` holds the package `my_fusions`."""
        root = folder.resolve()
        package = re.sub(r"[-. ]+", "_", root.name.lower())
        if not re.fullmatch(r"[a-z][a-z0-9_]*", package):
            raise UsageError(f"--package {folder}: {root.name!r} cannot be a package's name; name it as my-fusions")
        if is_checkout(root):
            raise UsageError(f"--package {folder}: that is a checkout of graft; leave --package out")
        return Destination(root, False, package)

    @property
    def source(self) -> Path:
        """The folder of the package."""
        return self.root / "src" / self.package

    def transform(self, name: str) -> Path:
        if self.package:
            return self.source / f"{name}.py"
        return self.root / (f"src/graft/passes/library/{name}.py" if self.checkout else f"{name}.py")

    def test(self, name: str) -> Path:
        if self.package:
            return self.source / "tests" / f"test_{name}.py"
        return self.root / (f"tests/unit/passes/library/test_{name}.py" if self.checkout else f"test_{name}.py")

    def module(self, name: str) -> str:
        if self.package:
            return f"{self.package}.{name}"
        return f"graft.passes.library.{name}" if self.checkout else name

    def op_folder(self, op: str) -> Path:
        if self.package:
            return self.source / "ops" / op
        return self.root / (f"src/graft/ops/{op}" if self.checkout else f"{op}_op")

    def op_module(self, op: str) -> str:
        if self.package:
            return f"{self.package}.ops.{op}"
        return f"graft.ops.{op}" if self.checkout else f"{op}_op"


def is_checkout(root: Path) -> bool:
    return (root / "src/graft/passes/default.yaml").is_file()
