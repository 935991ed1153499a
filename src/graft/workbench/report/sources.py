"""The model's own Python beside its nodes: the functions that hold the lines from which nodes were made."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import Graph

from graft.ir.nodes import FRAME, TORCH


@dataclass
class SourceLines:
    """Lines of files that nodes come from, by path, each with its text as it was when the graph was captured."""

    files: dict[str, dict[int, str]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def read(self, graph: Graph) -> None:
        for trace in {node.meta.get("stack_trace") or "" for node in graph.nodes} - self.seen:
            self.seen.add(trace)
            outside = [frame for frame in FRAME.findall(trace) if not frame[0].startswith(TORCH)]
            if outside:  # the line that `source_line` names
                path, line, text = outside[-1]
                self.files.setdefault(path, {})[int(line)] = text.strip()

    def pack(self) -> list[dict[str, Any]]:
        """Each file with its blocks: [number of the first line, text]. Files that share a name are told apart by
        nobody, so neither is shown."""
        names = [Path(path).name for path in self.files]
        shown = {path: lines for path, lines in self.files.items() if names.count(Path(path).name) == 1}
        packed = [pack_file(path, lines) for path, lines in sorted(shown.items(), key=lambda one: -len(one[1]))]
        return [one for one in packed if any(text for _, text in one["blocks"])]


def pack_file(path: str, lines: dict[int, str]) -> dict[str, Any]:
    """`note`: why only single lines are there, as the trace holds them, and not the file."""
    packed = {"file": Path(path).name, "path": short_path(path), "lines": sorted(lines), "note": ""}
    try:
        text = Path(path).read_text()
        blocks = enclosing(text, lines)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return {**packed, "blocks": single(lines), "note": "the file is not here; these are its lines as captured"}
    real = text.splitlines()
    if any(number > len(real) or (told and not same_line(real[number - 1], told)) for number, told in lines.items()):
        return {**packed, "blocks": single(lines), "note": "the file has changed; these are its lines as captured"}
    return {**packed, "blocks": blocks}


def same_line(line: str, told: str) -> bool:
    """A trace may hold the first of several lines, or all of an expression."""
    line, told = "".join(line.split()), "".join(told.split())
    return line.startswith(told) or told.startswith(line) or line in told


def single(lines: dict[int, str]) -> list[list[Any]]:
    return [[number, text] for number, text in sorted(lines.items())]


def enclosing(text: str, lines: Iterable[int]) -> list[list[Any]]:
    """The innermost function around each line, whole; a line outside any function by itself."""
    whole = text.splitlines()
    functions = [
        (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    spans = set()
    for number in lines:
        around = [span for span in functions if span[0] <= number <= span[1]]
        spans.add(max(around) if around else (number, number))
    return [[first, "\n".join(whole[first - 1 : last])] for first, last in sorted(spans)]


def short_path(path: str) -> str:
    """From the package on: `transformers/models/llama/modeling_llama.py`; of other files their name."""
    _, found, inside = path.replace("\\", "/").rpartition("/site-packages/")
    return inside if found else Path(path).name
