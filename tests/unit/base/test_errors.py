"""The errors' index: every class of every topic is in `graft.base.errors`, once."""

from __future__ import annotations

import ast
from pathlib import Path

import graft.base.errors


def test_the_index_names_every_error_once():
    folder = Path(graft.base.errors.__file__).parent
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    defined = [
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    assert sorted(defined) == sorted(graft.base.errors.__all__)
    for name in graft.base.errors.__all__:
        found = getattr(graft.base.errors, name)
        assert name == "near" or issubclass(found, graft.base.errors.GraftError)
