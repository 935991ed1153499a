"""Stage 1, graph breaks: where Dynamo stopped, why, and from where that line was called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from graft.ir.nodes import FRAME, TORCH
from graft.stages.story import GraphBreak
from graft.stages.trace import TraceCollector

HERE = f"{Path(__file__).parent}/"
PLACE = re.compile(r"Graph break in user code at (.+):(\d+)$", re.M)
ENDS = re.compile(
    r"^ *(?:Explanation|Hint|Developer debug context|For more details about|Stack variable source)", re.M
)
UNCOMPILED = "so the whole function runs uncompiled"
SKIPPED = "Failed to handle graph break gracefully"
ANOTHER = "*** While handling this graph break, another graph break occurred: ***"
TRIED = "Encountered graph break when attempting to trace"
RAISED = re.compile(r"^[\w.]+(?:Error|Unsupported|Exception|Frame)\b:? ?(.*)", re.M)


def read_breaks(trace: TraceCollector) -> tuple[GraphBreak, ...]:
    """A frame that is given up and traced again tells the same break twice, the second time with what comes of it."""
    found: list[GraphBreak] = []
    for row in trace.of("dynamo_graph_break_reason"):
        one = read_break(row.graph, row.payload)
        if all(one.line != other.line or not other.reason.startswith(one.reason) for other in found):
            found = [other for other in found if one.line != other.line or not one.reason.startswith(other.reason)]
            found.append(one)
    return tuple(found)


def read_break(graph: str, text: str) -> GraphBreak:
    told = text.partition("\nUser code traceback:")
    body = told[0].partition("Graph Break Reason:")[2] or raised(text)
    explanation = re.search(r"^ *Explanation: (.*)", body, re.M)
    hints = tuple(hint.strip() for hint in re.findall(r"^ *Hint: (.*)", body.partition(ANOTHER)[0], re.M))
    frames = user_frames(told[2].partition("\nTraceback (most recent call last)")[0] if told[1] else text)
    place = PLACE.search(text)
    line = f"{Path(place[1]).name}:{place[2]}" if place else frames[-1] if frames else ""
    callers = tuple(dict.fromkeys(one for one in frames if one != line))
    return GraphBreak(graph, line, reason_of(body), explanation[1].strip() if explanation else "", hints, callers)


def reason_of(body: str) -> str:
    """Its first paragraph; of one that says what was tried, the next, which says what went wrong."""
    first, also, second = body.partition(ANOTHER)
    parts = paragraphs(first)
    skipped = bool(parts) and parts[0].startswith(SKIPPED)
    if len(parts) > 1 and (skipped or parts[0].startswith(TRIED)):
        parts = parts[1:]
    reason = parts[0] if parts else "unknown"
    then = [f"then {told[0]}"] if also and (told := paragraphs(second)) else []
    return ", ".join([reason, *then, *([UNCOMPILED] if skipped else [])])


def paragraphs(text: str) -> list[str]:
    """Those before the explanation."""
    end = ENDS.search(text)
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text[: end.start()] if end else text)]
    return [part for part in parts if part]


def raised(text: str) -> str:
    """What the last exception of a traceback says, for a frame that is left as it is."""
    found = list(RAISED.finditer(text))
    return text[found[-1].start(1) :] if found else text


def user_frames(text: str) -> Sequence[str]:
    """`file.py:12` of each frame of the program, the outermost first: below the call that graft makes."""
    frames = [(path, line) for path, line, _ in FRAME.findall(text)]
    ours = max((index for index, (path, _) in enumerate(frames) if path.startswith(HERE)), default=-1)
    return [f"{Path(path).name}:{line}" for path, line in frames[ours + 1 :] if not path.startswith(TORCH)]
