"""Code that runs a node: the C++ that was generated for the last graph, and the kernels that graft's ops have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from importlib.util import find_spec
from inspect import getsourcefile
from pathlib import Path
from typing import Any

from graft.base.errors import ReportError
from graft.ops import OPS
from graft.workbench.native import NATIVE

STEP = re.compile(r"^  // (\d+): %(\w+)")  # emit.py writes it above the code of a node


def generated(folder: Path) -> dict[str, Any] | None:
    """The C++ of a run, with the lines of each node: {file, text, nodes: {name: [first, last]}}."""
    file = folder / NATIVE
    if not file.is_file():
        return None
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {file}: {error}; graft dump MODEL -o DIR --native writes it anew") from error
    return {"file": NATIVE, "text": text, "nodes": node_lines(text.splitlines())}


def node_lines(lines: list[str]) -> dict[str, list[int]]:
    """From its comment to the brace that ends its block."""
    found: dict[str, list[int]] = {}
    name = ""
    for number, line in enumerate(lines, 1):
        begins = STEP.match(line)
        if begins:
            name = begins[2]
            found[name] = [number, number]
        elif name and line == "  }":
            found[name][1] = number
            name = ""
    return found


def op_kernels(ops: Iterable[str]) -> dict[str, list[dict[str, str]]]:
    """For `graft.rms_norm` and the like: [{title, file, text}], Triton first."""
    found = {}
    for op in sorted(set(ops)):
        name = op.removeprefix("graft.").partition(".")[0]
        if op.startswith("graft.") and name in OPS and (kernels := kernel_texts(name)):
            found[op] = kernels
    return found


def kernel_texts(name: str) -> list[dict[str, str]]:
    source = getsourcefile(OPS[name].reference)
    if source is None:
        return []
    home = Path(source).parent
    files = sorted(home.glob("*.py"))
    files += [file for file in dict.fromkeys(f for own in files for f in imported(own)) if file not in files]
    texts = []
    for file in files:
        if kernels := jitted(file.read_text()):
            texts.append({"title": "Triton", "file": f"{file.parent.name}/{file.name}", "text": kernels})
    for file in sorted(home.glob("native*.h")):
        texts.append({"title": "C++", "file": f"{home.name}/{file.name}", "text": file.read_text()})
    return texts


def imported(file: Path) -> list[Path]:
    """Files of kernels that a file of an op takes from another op."""
    text = file.read_text()
    names = [n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.module]
    found = (find_spec(name) for name in names if re.fullmatch(r"graft\.ops\.\w+\.\w+", name))
    return [Path(spec.origin) for spec in found if spec is not None and spec.origin]


def jitted(text: str) -> str:
    """The functions of a file that Triton compiles."""
    if "triton.jit" not in text:
        return ""
    lines = text.splitlines()
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            first = min(d.lineno for d in node.decorator_list)
            found.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(found)
