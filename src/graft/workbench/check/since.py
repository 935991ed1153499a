"""What a patch touches: transforms, their tests, and which were switched on or off."""

from __future__ import annotations

import inspect
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from graft.base.errors import UsageError
from graft.passes.registry import TransformRegistry, load_all
from graft.workbench.check.negative_tests import test_files, tests_about
from graft.workbench.check.written import home_of

LISTINGS = ("default.yaml", "graft.yaml")


@dataclass(frozen=True)
class Touched:
    """One transform of the patch. tests: files about it that the patch changes, too."""

    transform: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Toggle:
    """A transform that was switched. reason: the comment that stands with it now."""

    transform: str
    file: str
    before: bool | None
    after: bool | None
    reason: str


@dataclass(frozen=True)
class PatchReview:
    rev: str
    changed: int
    transforms: tuple[Touched, ...]
    toggles: tuple[Toggle, ...]

    @property
    def warnings(self) -> list[str]:
        found = [f"{one.transform}: the patch changes no test of it" for one in self.transforms if not one.tests]
        if len(self.transforms) > 1:
            names = ", ".join(one.transform for one in self.transforms)
            found.insert(0, f"{len(self.transforms)} transforms in one patch: {names}; review is easier one by one")
        return found + [
            f"{t.transform} was switched without a reason beside it" for t in self.toggles if not t.reason
        ]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"warnings": self.warnings}


def review_patch(rev: str, folder: Path) -> PatchReview:
    """From `rev` to the working tree, files that git does not know yet included."""
    if not rev or rev.startswith("-"):
        raise UsageError(f"--since {rev!r} is no revision")
    root = Path(git(folder, "rev-parse", "--show-toplevel").strip())
    git(root, "rev-parse", "--verify", f"{rev}^{{commit}}")
    listed = git(root, "diff", "--name-only", rev, "--") + git(root, "ls-files", "--others", "--exclude-standard")
    changed = sorted({root / line for line in listed.splitlines() if line})
    return PatchReview(rev, len(changed), tuple(touched(changed, root)), tuple(toggles(changed, root, rev)))


def git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError("--since needs git, which is not installed") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["git failed"])[0]
        raise UsageError(
            f"--since: {said.removeprefix('fatal: ')}; name a revision of the repository around this folder"
        )
    return done.stdout


def touched(changed: list[Path], root: Path) -> list[Touched]:
    load_all()
    found = []
    for name in sorted(TransformRegistry.names()):
        file = Path(inspect.getfile(TransformRegistry.get(name))).resolve()
        own = [path for path in changed if path.resolve() == file or is_op_of(name, path)]
        if own:
            home = home_of(name)
            known = set(test_files(home.tests)) if home.tests else set()
            tests = [path for path in changed if path in known and tests_about(name, path)]
            found.append(Touched(name, shown(own, root), shown(tests, root)))
    return found


def is_op_of(name: str, path: Path) -> bool:
    """`ops/soft_cap/triton.py` belongs to fuse_soft_cap."""
    return path.parent.parent.name == "ops" and path.parent.name == name.removeprefix("fuse_")


def shown(paths: list[Path], root: Path) -> tuple[str, ...]:
    return tuple(str(path.relative_to(root)) for path in paths)


def toggles(changed: list[Path], root: Path, rev: str) -> list[Toggle]:
    found = []
    for path in changed:
        if path.name in LISTINGS and path.is_file():
            relative = str(path.relative_to(root))
            tracked = git(root, "ls-tree", "--name-only", rev, "--", relative).strip()
            before = states(git(root, "show", f"{rev}:{relative}")) if tracked else {}
            text = path.read_text(errors="replace")
            after = states(text)
            for name in sorted({*before, *after}):
                if before.get(name) != after.get(name) and (name in before or after[name]):
                    found.append(Toggle(name, relative, before.get(name), after.get(name), reason(text, name)))
    return found


def states(text: str) -> dict[str, bool]:
    try:
        listed = (yaml.safe_load(text) or {}).get("transforms") or {}
    except (yaml.YAMLError, AttributeError):
        return {}
    if not isinstance(listed, dict):  # a file of that name which is not graft's
        return {}
    return {str(name): bool(entry.get("enabled", True)) for name, entry in listed.items() if isinstance(entry, dict)}


def reason(text: str, name: str) -> str:
    """The comment on its line, or those right above it."""
    lines = text.splitlines()
    at = next((index for index, line in enumerate(lines) if re.match(rf"  {re.escape(name)}:", line)), None)
    if at is None:
        return ""
    beside = lines[at].partition("#")[2].strip()
    above: list[str] = []
    while at > 0 and lines[at - 1].strip().startswith("#"):
        at -= 1
        above.insert(0, lines[at].strip("# "))
    return beside or " ".join(above)
