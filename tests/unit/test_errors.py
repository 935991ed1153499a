"""The errors' index: every class of every topic is in `graft.errors`, once."""

from __future__ import annotations

import ast
from pathlib import Path

import graft.errors


def test_the_index_names_every_error_once():
    folder = Path(graft.errors.__file__).parent
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    defined = [
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    assert sorted(defined) == sorted(graft.errors.__all__)
    for name in graft.errors.__all__:
        found = getattr(graft.errors, name)
        assert name == "near" or issubclass(found, graft.errors.GraftError)
