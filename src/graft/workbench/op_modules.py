"""Which modules have to be imported before a graph can run: graft's own ops, and those of plugins."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Node

from graft.base.plugins import home_of, owner_of
from graft.ops import OPS

OWN = "graft.ops"


@dataclass(frozen=True)
class OpModule:
    """folder: where the module lies, '' for one that is installed."""

    module: str
    folder: str = ""


def op_modules(called: Iterable[Node]) -> list[OpModule]:
    """graft's first, then plugins' by name."""
    found = {module_of(node) for node in called if getattr(node.target, "namespace", "") == "graft"}
    return sorted(found, key=lambda one: (one.module != OWN, one.module))


def module_of(node: Node) -> OpModule:
    spec = OPS.get(str(node.target._schema.name).removeprefix("graft::"))
    home = home_of(spec) if spec is not None else OWN
    if home.startswith("graft."):
        return OpModule(OWN)
    plugin = owner_of(home)
    module = plugin.module if plugin else home.rpartition(".")[0] or home
    if plugin is not None and plugin.version:
        return OpModule(module)
    file = Path(sys.modules[module.partition(".")[0]].__file__ or "").resolve()
    return OpModule(module, str(file.parents[1 if file.name == "__init__.py" else 0]))


def import_lines(called: Iterable[Node]) -> list[str]:
    """As Python."""
    lines = []
    for one in op_modules(called):
        if one.folder:
            lines.append(f"sys.path.insert(0, {one.folder!r})")
        whose = "graft's ops" if one.module == OWN else "ops of a plugin"
        lines.append(f"import {one.module}  # noqa: F401{', E402' if one.folder else ''}  (registers {whose})")
    return lines
