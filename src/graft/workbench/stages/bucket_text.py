"""What was compiled, captured and reused for each size, as lines for people."""

from __future__ import annotations

from graft.stages.bucket_story import BucketCall, BucketStory
from graft.workbench.diff_text import StyledLine
from graft.workbench.stages.text import end_lines


def bucket_lines(story: BucketStory) -> list[StyledLine]:
    words = ", ".join(story.split_at)
    lines = [StyledLine("title", f"{story.target}  in pieces, torch {story.torch}, {story.device}")]
    if story.left:
        count = f"{len(story.pieces)} piece{'s' if len(story.pieces) != 1 else ''}"
        what = f"split at {', '.join(story.left)}: {count} of {', '.join(map(str, story.pieces))} calls"
    elif story.pieces:
        what = f"no op has {words} in its name: one piece of {story.pieces[0]} calls"
    else:
        what = "nothing was traced"
    lines.append(StyledLine("plain", f"  {what}"))
    half = len({call.size for call in story.calls})
    for title, calls in (("first calls", story.calls[:half]), ("the same sizes again", story.calls[half:])):
        if calls:
            lines.append(StyledLine("head", title))
            lines += [StyledLine("plain", f"  {call_line(call)}") for call in calls]
    for one in story.recompilations:
        lines.append(StyledLine("changed", f"  Dynamo traced again: guard failed: {one.guard}"))
    reasons = dict.fromkeys(p.reason for call in story.calls for p in call.compiled if p.reason)
    lines += [StyledLine("plain", f"  no CUDA graph: {reason}") for reason in reasons]
    return lines + end_lines(story)


def call_line(call: BucketCall) -> str:
    """`8: traced, 3 pieces compiled in 12.1 s (9 kernels), 3 out of the cache, 0 reused`."""
    new = [one for one in call.compiled if one.how == "compiled"]
    cached = len(call.compiled) - len(new)
    parts = ["traced"] if call.traced else []
    if new:
        kernels = sum(one.kernels for one in new)
        seconds = sum(one.seconds for one in new)
        parts.append(f"{pieces(len(new))} compiled in {seconds:.1f} s ({kernels} kernels)")
    parts += [f"{pieces(cached)} out of the cache"] if cached else []
    captured = sum(one.captured for one in call.compiled)
    parts += [f"{pieces(captured)} captured"] if captured else []
    parts += [f"{pieces(call.reused)} reused"] if call.reused else []
    parts += [] if call.compiled or call.traced else ["nothing compiled"]
    return f"{call.size}: {', '.join(parts)}; {1e3 * call.seconds:.1f} ms"


def pieces(count: int) -> str:
    return f"{count} piece{'s' if count != 1 else ''}"
