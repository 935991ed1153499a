"""What a transform has in writing: its name in three places, its entry in the configuration, its documentation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.passes.config import DEFAULTS, PipelineConfig, read_yaml
from graft.passes.registry import TransformRegistry, origin_of
from graft.workbench.check.line import CheckLine

FUSIONS = "docs/fusions.md"


@dataclass(frozen=True)
class Home:
    """Where a transform lives. root: the checkout of graft, or the plugin's folder; tests, docs: if there are any."""

    file: Path
    root: Path
    library: bool
    tests: Path | None
    docs: Path | None


def home_of(name: str, tests: Path | None = None) -> Home:
    """tests: where they are, if it is not the `tests` of the checkout, of the plugin's folder or of its project."""
    file = Path(inspect.getfile(TransformRegistry.get(name))).resolve()
    package = DEFAULTS.parent.parent.resolve()
    library = package in file.parents
    root = package.parent.parent if library else file.parent
    checkout = (root / "pyproject.toml").is_file()
    beside = root / "tests"
    if not library and not beside.is_dir():  # a package may have them at the top of its project
        project = next((parent for parent in file.parents if (parent / "pyproject.toml").is_file()), root)
        beside = project / "tests"
    usual = beside if library or beside.is_dir() else root
    found = tests or (usual if usual.is_dir() and (checkout or not library) else None)
    docs = root / FUSIONS
    return Home(file, root, library, found, docs if library and checkout and docs.is_file() else None)


def written_lines(name: str, config: PipelineConfig, home: Home) -> list[CheckLine]:
    return [registered(name, config, home), listed(name, config, home), *documented(name, home)]


def shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if root in path.parents else str(path)


def registered(name: str, config: PipelineConfig, home: Home) -> CheckLine:
    """Registry key, file name and YAML key are one name; how a plugin names its files is its own affair."""
    if home.library and home.file.stem != name:
        return CheckLine(
            "registered", "fail", f"registered as {name}, but its file is {home.file.name}; rename one of them"
        )
    if name not in config.transforms:
        return CheckLine(
            "registered", "fail", f"no key transforms.{name} in the configuration; add it with its stage"
        )
    where = shown(home.file, home.root) if home.library else f"{home.file.name} of {origin_of(name)}"
    return CheckLine("registered", "pass", f"{name}: registry, YAML key and {where}")


def listed(name: str, config: PipelineConfig, home: Home) -> CheckLine:
    """In default.yaml, on or off; a plugin's transform in the file that was given."""
    defaults: Mapping[str, Any] = read_yaml(DEFAULTS)["transforms"]
    if name in defaults:
        state = "on" if defaults[name].get("enabled", True) else "off"
        return CheckLine("listed", "pass", f"default.yaml, stage {defaults[name]['stage']}, {state}")
    origin = config.origins.get(f"transforms.{name}.stage")
    if home.library or origin is None:
        return CheckLine("listed", "fail", f"default.yaml does not list it; add {name}: {{stage: …, enabled: false}}")
    state = "on" if config.transforms[name].enabled else "off"
    return CheckLine("listed", "pass", f"{origin}, stage {config.transforms[name].stage.value}, {state} (a plugin)")


def documented(name: str, home: Home) -> list[CheckLine]:
    doc = TransformRegistry.get(name).__doc__ or ""
    parts = {"before:": "the graph before", "after:": "the graph after", "Numerics:": "the numerics it keeps"}
    missing = [what for key, what in parts.items() if key not in doc]
    if missing:
        advice = "write them as `before: …`, `after: …` and `Numerics: …`"
        docstring = CheckLine("docstring", "fail", f"its docstring does not show {', '.join(missing)}; {advice}")
    else:
        docstring = CheckLine("docstring", "pass", "graph before and after, and the numerics it keeps")
    return [docstring, in_docs(name, home)]


def in_docs(name: str, home: Home) -> CheckLine:
    if home.docs is None:
        why = (
            "a plugin's documentation is its own" if not home.library else f"there is no {FUSIONS} beside this graft"
        )
        return CheckLine("documented", "skip", why)
    for number, text in enumerate(home.docs.read_text().splitlines(), 1):
        if re.search(rf"\b{name}\b", text):
            return CheckLine("documented", "pass", f"{FUSIONS}:{number}")
    return CheckLine(
        "documented", "fail", f"{FUSIONS} does not mention {name}; say what it finds and what it refuses"
    )
