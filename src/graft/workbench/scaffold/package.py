"""A project around transforms: what makes a folder of them an installable package, with its tests and its CI."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from graft import __version__
from graft.base.errors import UsageError
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.render import fill

FILES = {
    "pyproject.toml": "package_pyproject",
    "README.md": "package_readme",
    ".gitignore": "package_ignored",
    ".github/workflows/tests.yml": "package_ci",
}


def check_package(destination: Destination) -> None:
    """A package is found by its name, so it must not hide another one."""
    spec = importlib.util.find_spec(destination.package)
    if spec is not None and not (spec.origin and Path(spec.origin).resolve().parent == destination.source):
        raise UsageError(
            f"{destination.package!r} is the name of another Python package ({spec.origin}); choose another folder"
        )
    project = destination.root / "pyproject.toml"
    if project.is_file() and not destination.source.is_dir():
        raise UsageError(f"{project} is of another project; name a new folder, or one that --package made")


def package_files(
    destination: Destination, name: str, entry: str, *, op: bool
) -> tuple[dict[Path, str], dict[Path, str]]:
    """New files, and files of the package that get a line more."""
    values = {
        "package": destination.package,
        "distribution": destination.package.replace("_", "-"),
        "name": name,
        "graft": ".".join(__version__.split(".")[:2]),
    }
    new = {destination.root / file: fill(template, values) for file, template in FILES.items()}
    new[destination.source / "tests" / "__init__.py"] = ""
    new[destination.source / "__init__.py"] = fill("package_init", {})
    if op:
        new[destination.source / "ops" / "__init__.py"] = ""
    new = {path: text for path, text in new.items() if not path.exists()}
    listing = destination.source / "graft.yaml"
    old = listing.read_text() if listing.is_file() else fill("package_listing", {})
    text = with_line(old, "transforms:", f"  {name}: {{{entry}}}")
    text = with_line(text, "    absent:", f"      {name}: off by default")
    return (new, {listing: text}) if listing.is_file() else ({**new, listing: text}, {})


def with_line(text: str, head: str, line: str) -> str:
    """The line after those that stand indented under `head`; a key that is there stays as it is."""
    lines = text.rstrip("\n").split("\n")
    if any(known.startswith(f"{line.partition(':')[0]}:") for known in lines):
        return text
    if head not in lines:
        raise UsageError(f"graft.yaml has no line {head.strip()!r}, under which {line.strip()!r} belongs; add it")
    at, indent = lines.index(head) + 1, len(line) - len(line.lstrip())
    while at < len(lines) and lines[at].startswith(" " * indent):
        at += 1
    lines.insert(at, line)
    return "\n".join(lines) + "\n"
