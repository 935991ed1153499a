"""NVTX ranges around the calls of a graph, for nsys: layer, in it the transform, in it the op.

    layer 0
      fuse_rms_norm
        graft.rms_norm %rms_norm (model.layers.0.input_layernorm)

`GRAFT_NVTX=1`, or `--nvtx`. A range is pushed and popped by the thread that launches, and costs some 0.2 µs; a CUDA
graph has those of its capture alone, not of its replays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.base.errors import UsageError
from graft.ir.io.text import target_text
from graft.ir.nodes import module_path, where

SWITCH = "GRAFT_NVTX"
OUTSIDE = "outside the layers"
CAPTURED = "as captured"
NOTE = "nvtx: ranges by layer, transform and op around every call; a CUDA graph has those of its capture alone"

NONE = "nvtx: code of Inductor's has no ranges, though GRAFT_NVTX asks for them; backend='eager' has them"


def ranges_on() -> bool:
    return os.environ.get(SWITCH, "") not in ("", "0")


def switch_on() -> None:
    """For this process and those that it starts. A torch without CUDA has no NVTX."""
    push("graft")
    pop()
    os.environ[SWITCH] = "1"


def push(text: str) -> None:
    try:
        torch.cuda.nvtx.range_push(text)
    except RuntimeError as error:
        raise UsageError(f"NVTX ranges need a torch that was built with CUDA: {error}") from error


def pop() -> None:
    torch.cuda.nvtx.range_pop()


def add_ranges(graph: Graph, original: Mapping[str, Node]) -> None:
    """Puts ranges around the calls of a bound graph. `original`: its nodes by name before kernels were bound."""
    opened: list[str] = []
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for node in calls:
        wanted = labels(original.get(node.name, node))
        kept = next((i for i, (a, b) in enumerate(zip(opened, wanted, strict=False)) if a != b), len(opened))
        with graph.inserting_before(node):
            for _ in opened[kept:]:
                graph.call_function(pop)
            for text in wanted[kept:]:
                graph.call_function(push, (text,))
        node.target = ranged(node.target, op_text(original.get(node.name, node)), len(wanted))
        opened = list(wanted)
    if calls:
        end = next(node for node in reversed(graph.nodes) if node.op == "output")
        with graph.inserting_before(end):
            for _ in opened:
                graph.call_function(pop)


def ranged(target: Callable[..., Any], text: str, outside: int) -> Callable[..., Any]:
    """`target` in a range. What it raises closes the `outside` ranges around it as well: nothing else of the graph
    runs then."""

    def in_range(*args: Any, **kwargs: Any) -> Any:
        push(text)
        try:
            result = target(*args, **kwargs)
        except BaseException:
            for _ in range(outside + 1):
                pop()
            raise
        pop()
        return result

    return in_range


def labels(node: Node) -> tuple[str, str]:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module_path(node))
    return f"layer {found[1]}" if found else OUTSIDE, str(node.meta.get("made_by") or CAPTURED)


def op_text(node: Node) -> str:
    return f"{target_text(node.target)} {where(node)}"
