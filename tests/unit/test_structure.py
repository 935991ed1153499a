"""The shape of the code: imports go one way, files stay short, names agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

import graft
from graft.transforms.config import DEFAULTS
from graft.transforms.registry import TransformRegistry, load_all

ROOT = Path(graft.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# A package may import from its own level only where that is listed, and from any lower one.
LEVELS = [
    {"errors"},
    {"graph", "files", "progress", "timers"},
    {"ops", "kvcache", "state"},
    {"transforms", "backends", "artifact", "capture", "models"},
    {"runtime"},
    {"testing"},
    {"workbench", "serve"},
    {"cli"},
    {"__main__"},
]
LEVEL = {package: index for index, packages in enumerate(LEVELS) for package in packages}
PRIVATE_ALLOWED = {
    *("workbench/stages.py", "backends/inductor.py", "state/functionalization.py"),
    "graph/constants.py",  # a dispatch mode has no public name
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if package == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "graft" and len(parts) > 1 and parts[1] != package:
            assert LEVEL[parts[1]] < LEVEL[package], f"{package} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_torch_modules_stay_in_their_files(path):
    if str(path.relative_to(ROOT)) not in PRIVATE_ALLOWED:
        private = [
            n for n in imports(path) if n.startswith("torch.") and any(p.startswith("_") for p in n.split("."))
        ]
        assert private == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 60, f"{node.name} is longer than a screen"


def test_a_transform_has_one_name_everywhere():
    load_all()
    listed = yaml.safe_load(DEFAULTS.read_text())["transforms"]
    files = {p.stem for p in (ROOT / "transforms" / "library").glob("*.py")} - {"__init__"}
    assert set(listed) == files == {n for n in TransformRegistry.names() if n in files}
    for name in files:
        doc = TransformRegistry.get(name).__doc__
        assert "before:" in doc and "after:" in doc and "Numerics:" in doc, f"{name} does not show what it does"


def test_every_op_folder_is_complete():
    shared = {"__pycache__", "native"}  # native: C++ headers that the ops' own include
    for folder in sorted(p for p in (ROOT / "ops").iterdir() if p.is_dir() and p.name not in shared):
        names = {p.name for p in folder.glob("*.py")}
        assert {"op.py", "reference.py", "cases.py"} <= names, folder.name


def test_nothing_is_swallowed():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"bare except in {path.name}"
                assert not all(isinstance(s, ast.Pass) for s in node.body), f"swallowed in {path.name}"
    assert not [p for p in FILES if re.search(r"\b(TODO|FIXME|XXX)\b", p.read_text())]
