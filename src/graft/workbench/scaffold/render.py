"""Templates: plain text files beside this one, with $names."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from string import Template

TEMPLATES = Path(__file__).with_name("templates")


def fill(name: str, values: Mapping[str, str]) -> str:
    """The template with every name filled in; one that is not given is an error."""
    return Template((TEMPLATES / f"{name}.txt").read_text()).substitute(values)


def with_sorted_imports(text: str, own: Collection[str]) -> str:
    """The imports of a file outside of graft, as linters sort them: Python's, libraries', its own (by top name)."""
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imports = [node for node in imports if getattr(node, "module", "") != "__future__"]
    if not imports:
        return text
    lines = text.split("\n")
    first, last = imports[0].lineno - 1, imports[-1].end_lineno or 0
    sections: dict[int, list[tuple[bool, str, str]]] = {0: [], 1: [], 2: []}
    for node in imports:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        top = module.partition(".")[0]
        section = 0 if top in sys.stdlib_module_names else 2 if top in own else 1
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        sections[section].append((isinstance(node, ast.ImportFrom), module, source))
    blocks = ["\n".join(source for *_, source in sorted(found)) for found in sections.values() if found]
    return "\n".join([*lines[:first], "\n\n".join(blocks), *lines[last:]])
