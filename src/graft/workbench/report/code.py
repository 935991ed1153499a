"""Code that runs a node: what was generated for the last graph, C++ or Triton, and the kernels of graft's ops."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from inspect import getsourcefile
from pathlib import Path
from typing import Any

from graft.base.errors import ReportError
from graft.ops import OPS
from graft.workbench.native import NATIVE

INDUCTOR = "inductor.py"  # in a folder of dumps: what Inductor wrote for its last graph
STEP = re.compile(r"^  // (\d+): %(\w+)")  # emit.py writes it above the code of a node
SOURCE_NODES = re.compile(
    r"^\s*# Topologically Sorted Source Nodes: \[([^\]]*)\]"
)  # Inductor above a kernel or its call


def generated(folder: Path, given: Path | None = None) -> list[dict[str, Any]]:
    """Code that was generated for the last graph, with the lines of each node: [{title, file, text, nodes: {name:
    [[first, last], …]}}]. The C++ of the native backend and Inductor's output code, where the folder has them."""
    found = []
    for file, title in ((folder / NATIVE, "C++"), (given or folder / INDUCTOR, "Triton")):
        if file.is_file() or file == given:
            text = read_code(file)
            lines = text.splitlines()
            nodes = {n: [span] for n, span in node_lines(lines).items()} if title == "C++" else source_nodes(lines)
            found.append({"title": title, "file": file.name, "text": text, "nodes": nodes})
    return found


def read_code(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(
            f"cannot read {file}: {error}; graft dump MODEL -o DIR --native writes C++, and TORCH_LOGS=output_code"
            " tells where Inductor keeps its code"
        ) from error


def source_nodes(lines: list[str]) -> dict[str, list[list[int]]]:
    """From the comment that names them to the end of the kernel, or of the call, below it."""
    found: dict[str, list[list[int]]] = {}
    for number, line in enumerate(lines, 1):
        named = SOURCE_NODES.match(line)
        if named is None:
            continue
        last = next(
            (n for n in range(number + 1, len(lines) + 1) if not lines[n - 1].lstrip().startswith("#")), number
        )
        if lines[last - 1].count("'''") == 1:  # the source of a kernel is one string
            last = next((n for n in range(last + 1, len(lines) + 1) if "'''" in lines[n - 1]), last)
        for name in filter(None, named[1].split(", ")):
            found.setdefault(name, []).append([number, last])
    return found


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
    """Those in the op's folder; of a kind that it has none of, those of the ops that it calls."""
    source = getsourcefile(OPS[name].reference)
    if source is None:
        return []
    home = Path(source).parent
    others = called_ops(home)
    texts = []
    for read in (triton_texts, cpp_texts):
        texts += read(home) or [text for other in others for text in read(other)]
    return texts


def triton_texts(home: Path) -> list[dict[str, str]]:
    found = ((file, jitted(file.read_text())) for file in sorted(home.rglob("*.py")))
    return [
        {"title": "Triton", "file": f"{home.name}/{f.relative_to(home)}", "text": text} for f, text in found if text
    ]


def cpp_texts(home: Path) -> list[dict[str, str]]:
    files = sorted(home.glob("native*.h"))
    return [{"title": "C++", "file": f"{home.name}/{f.name}", "text": f.read_text()} for f in files]


def called_ops(home: Path) -> list[Path]:
    """Folders of other ops from which the files of this one import what runs."""
    names: dict[str, None] = {}
    for file in (home / "triton.py", home / "op.py"):
        for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
            found = re.match(r"graft\.ops\.(\w+)\.", f"{node.module}.") if isinstance(node, ast.ImportFrom) else None
            if found and found[1] in OPS and found[1] != home.name:
                names[found[1]] = None
    return [Path(file).parent for name in names if (file := getsourcefile(OPS[name].reference))]


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
