"""The shape of the code: files stay short, names agree. That imports go one way: pyproject.toml, `lint-imports`."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import yaml

import graft
from graft.passes.config import DEFAULTS
from graft.passes.registry import TransformRegistry, load_all

ROOT = Path(graft.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PRIVATE_ALLOWED = {
    *(
        "backends/inductor.py",
        "backends/inductor_caches.py",
        "backends/inductor_loops.py",
        "backends/inductor_saved.py",
    ),
    "memory/inductor_fix/functionalization.py",
    *(f"stages/{name}.py" for name in ("trace", "tell", "dynamo", "functional", "post_grad", "scheduling")),
    *(f"stages/{name}.py" for name in ("guards", "kernels", "runtime", "caches", "buckets", "recompiles", "origins")),
    *(f"stages/{name}.py" for name in ("autotune", "cudagraphs")),
    *("ir/constants.py", "ir/trace.py"),  # dispatch modes have no public names
    "dist/peer_memory.py",  # symmetric memory
    "ir/program/host_samples.py",  # Dynamo's table of numpy's functions
}


@cache
def statements(path: Path) -> tuple[list[ast.stmt], list[ast.AST]]:
    """Those of the file itself, and all that the tests look for, however deep: read once for all of them.

    What is within an expression is no statement: a walk through it takes most of the time."""
    top = ast.parse(path.read_text()).body
    found, waiting = [], [*top]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.ExceptHandler)):
            found.append(node)
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting += getattr(node, part, ())
    return top, found


def imports(path: Path) -> set[str]:
    found = set()
    for node in statements(path)[1]:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_private_torch_modules_stay_in_their_files():
    for path in FILES:
        found = {n for n in imports(path) if n.startswith("torch.") and any(p.startswith("_") for p in n.split("."))}
        assert not found or str(path.relative_to(ROOT)) in PRIVATE_ALLOWED, f"{path} imports {found}"


def test_a_class_name_means_one_thing():
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in statements(path)[0]:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_files_and_functions_stay_short():
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path} is longer than 400 lines"
        for node in statements(path)[1]:
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno <= 60, f"{path}: {node.name} is longer than a screen"


def test_a_transform_has_one_name_everywhere():
    load_all()
    listed = yaml.safe_load(DEFAULTS.read_text())["transforms"]
    files = [p.stem for p in (ROOT / "passes" / "library").rglob("*.py")]
    assert set(listed) <= set(TransformRegistry.names())
    for name in listed:
        assert files.count(name) == 1 and TransformRegistry.get(name).__module__.endswith(f".{name}")
        doc = TransformRegistry.get(name).__doc__
        assert "before:" in doc and "after:" in doc and "Numerics:" in doc, f"{name} does not show what it does"


def test_every_op_folder_is_complete():
    shared = {"__pycache__", "native"}  # native: C++ headers that the ops' own include
    for folder in sorted(p for p in (ROOT / "ops").iterdir() if p.is_dir() and p.name not in shared):
        names = {p.name for p in folder.glob("*.py")}
        assert {"op.py", "reference.py", "cases.py"} <= names, folder.name


def test_nothing_is_swallowed():
    for path in FILES:
        for node in statements(path)[1]:
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"bare except in {path.name}"
                assert not all(isinstance(s, ast.Pass) for s in node.body), f"swallowed in {path.name}"
    assert not [p for p in FILES if re.search(r"\b(TODO|FIXME|XXX)\b", p.read_text())]


def test_no_file_of_tests_is_empty():
    """pytest takes an emptied file without a word."""
    files = list(Path(__file__).parents[1].rglob("test_*.py"))
    assert len(files) > 300
    assert not [path for path in files if "def test_" not in path.read_text()]


def test_files_of_tests_have_names_of_their_own():
    """Two of one name in one run: pytest imports the first, and refuses the other. tests/gpu runs by itself."""
    tests = Path(__file__).parents[1]
    names = [path.name for path in tests.rglob("test_*.py") if path.parent.name != "gpu"]
    assert sorted(names) == sorted(set(names))
