"""Where a node comes from, read off the frames of `forward` alone while a module is exported.

torch writes down every frame of the stack for each node, some hundred and fifty of them, and then keeps those of
`forward`: 4 to 8 % of an export. Here the others are passed over, and torch's own filter sees what is left.

A plain function runs inside of a `forward` of graft's, which would be all that is left of it: its own line stands
there. So does that of a branch or body, which Dynamo has made a graph of: that is traced again, line by line of its
generated code, which nobody wrote.
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch.fx import GraphModule, Node, proxy

from graft.ir.nodes import TORCH

STANDS_FOR_FUNCTION = "graft.capture.function"  # whose `forward` calls the user's function
AROUND = (str(Path(__file__).parent), TORCH)  # Dynamo sees the modes through which the calls of a branch go, too
GENERATED = "<eval_with_key>"  # how torch names the file of a graph's code
LIBRARIES = frozenset({"torch", "graft", "functools", "contextlib"})


@contextmanager
def forward_frames() -> Iterator[None]:
    """Nodes have the stack traces that they have without it."""
    made = proxy.TracerBase.create_node
    kinds: dict[int, tuple[str, CodeType]] = {}

    def create_node(self: Any, *args: Any, **kwargs: Any) -> Node:
        if not (self.record_stack_traces and self._record_forward_stack_traces_only):
            return made(self, *args, **kwargs)
        self.record_stack_traces = False
        try:
            node = made(self, *args, **kwargs)
        finally:
            self.record_stack_traces = True
        if not node.stack_trace and (found := self._filter_traceback_frames(kept_frames(sys._getframe(1), kinds))):
            node.stack_trace = "".join(found.format()).strip()
        return node

    proxy.TracerBase.create_node = create_node
    try:
        yield
    finally:
        proxy.TracerBase.create_node = made


def kept_frames(frame: FrameType | None, kinds: dict[int, tuple[str, CodeType]]) -> traceback.StackSummary:
    """Those that torch's filter keeps, the outermost first. In `kinds` is what each code is, by its id: the hundred
    frames above a program are the same for all of its nodes."""
    found = []
    function: FrameType | None = None  # the outermost frame so far that is the user's own code
    while frame is not None:
        code = frame.f_code
        known = kinds.get(id(code))
        if known is None:
            known = kinds[id(code)] = kind_of(frame), code
        kind = known[0]
        if kind == "stands for" and function is not None:
            found.append(traceback.FrameSummary(function.f_code.co_filename, function.f_lineno, code.co_name))
        elif kind in ("kept", "stands for"):
            found.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        elif kind == "generated":
            found += reversed(written_lines(frame))
        elif kind == "own":
            function = frame
        frame = frame.f_back
    return traceback.StackSummary(reversed(found))


def written_lines(frame: FrameType) -> list[traceback.FrameSummary]:
    """What the node has that the generated code computes in this line: the lines of the program, the outermost
    first."""
    file, module = frame.f_code.co_filename, frame.f_locals.get("self")
    line = linecache.getline(file, frame.f_lineno, frame.f_globals)
    named = re.match(r"\s*(\w+)", line)
    nodes = module.graph.nodes if isinstance(module, GraphModule) and named is not None else ()
    stack = next((node.stack_trace for node in nodes if named is not None and node.name == named[1]), None)
    found = re.findall(r'File "([^"]+)", line (\d+)', stack or "")
    return [
        traceback.FrameSummary(path, int(number), "forward") for path, number in found if not path.startswith(AROUND)
    ]


def kind_of(frame: FrameType) -> str:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    module = str(frame.f_globals.get("__name__"))
    if name == "forward" and module == STANDS_FOR_FUNCTION:
        return "stands for"
    if name == "forward" and file.startswith(GENERATED):
        return "generated"
    anchors = getattr(proxy, "_STACK_TRACE_ANCHORS", ())  # torch 2.11 has none
    if name == "forward" or file.endswith("torch/__init__.py") or (file, name) in anchors:
        return "kept"
    return "library" if module.partition(".")[0] in LIBRARIES else "own"
