"""Equal pieces are one candidate: equal up to weights, names, layers and sizes, which a kernel takes as arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from graft.ir.io.text import SHORT_DTYPES, target_text
from graft.ir.nodes import is_op, is_weight, module_path, val
from graft.workbench.discover.regions import CandidateRegion

SIZED = {torch.ops.aten.reshape.default, torch.ops.aten.expand.default}  # their numbers are sizes


def grouped(pieces: Iterable[CandidateRegion]) -> dict[str, list[CandidateRegion]]:
    """By id; within a group the piece with the most results comes first: its kernel serves the others too."""
    groups: dict[str, list[CandidateRegion]] = {}
    for piece in pieces:
        groups.setdefault(structure_id(piece), []).append(piece)
    return {key: sorted(group, key=lambda piece: -len(piece.outputs())) for key, group in groups.items()}


def structure_id(piece: CandidateRegion) -> str:
    return blake2b(structure(piece).encode(), digest_size=4).hexdigest()


def structure(piece: CandidateRegion) -> str:
    """What is called on what, with every literal; of a value its dtype, its rank and which of its dims are one."""
    names: dict[Node, str] = {node: f"t{index}" for index, node in enumerate(piece.nodes)}
    lines: list[str] = []
    for node in piece.nodes:
        for source in node.all_input_nodes:
            if source not in names:
                names[source] = f"i{len(names) - len(piece.nodes)}"
                weight = "weight " if is_weight(source) else ""
                lines.append(f"{names[source]} : {weight}{form(val(source))}")
        if node.target in SIZED:
            arguments = names[node.args[0]]  # pyrefly: ignore
        else:
            given = [literal_text(a, names) for a in node.args]
            arguments = ", ".join([*given, *(f"{k}={literal_text(v, names)}" for k, v in node.kwargs.items())])
        lines.append(f"{names[node]} = {target_text(node.target)}({arguments}) : {form(val(node))}")
    return "\n".join(lines)


def literal_text(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal_text(item, names) for item in value) + "]"
    return repr(value)


def form(value: Any) -> str:
    """`bf16[n, n, 1]`."""
    if isinstance(value, torch.Tensor):
        dims = ", ".join("1" if str(size) == "1" else "n" for size in value.shape)
        return f"{SHORT_DTYPES.get(value.dtype, str(value.dtype))}[{dims}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(form(item) for item in value) + ")"
    return "size"


def sites(pieces: Iterable[CandidateRegion]) -> tuple[str, ...]:
    """`model.layers.*.mlp × 16`, for every folded path."""
    counts: dict[str, int] = {}
    for piece in pieces:
        path = folded(piece_path(piece)) or "the root module"
        counts[path] = counts.get(path, 0) + 1
    return tuple(f"{path} × {count}" if count > 1 else path for path, count in counts.items())


def piece_path(piece: CandidateRegion) -> str:
    """The module of its last call that has one."""
    paths = [module_path(node) for node in piece.nodes if not is_op(node, getitem)]
    return next((path for path in reversed(paths) if path), "")


def folded(path: str) -> str:
    """Layer numbers as `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
