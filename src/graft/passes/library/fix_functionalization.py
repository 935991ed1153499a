"""fix_functionalization: mutating calls are put back into Inductor's functional graph, where that is proved right."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule

from graft.ir.patterns.match import NearMiss
from graft.memory.inductor_fix.report import FunctionalizationReport, KeptCopy
from graft.passes.base import BaseTransform, Context, Outcome
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord, TransformRecord

NAME = "fix_functionalization"
NOTHING = "the graph has no call that was made functional"


@TransformRegistry.register(NAME)
class FunctionalizationFix(BaseTransform):
    """Mutating calls back into Inductor's functional graph. It runs there, after Inductor's own patterns.

    before:  %f = auto_functionalized_v2(my.write, x=%x, _all_bases=[%c]);  %n = getitem(%f, 1);  … %n is read …
    after:   my.write(%x, %c);  … %c is read …

    Also `index_put` and scatters, which Inductor would write in place although somebody needs the old value. A match
    is a call that writes in place; a near miss is a copy that is kept, with its bytes and the reason. A walk:
    whether a call may write depends on who reads the memory later, which no pattern sees.

    Numerics: bitwise; the same calls on the same values. Off, Inductor clones what the calls write, or loses values.
    """

    uncheckable = "the calls and their operands stay the same; who sees the memory, and when, is proved"
    reads_decomposed = on_inductor = True

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        """On a graph as Inductor has it when its post-grad passes run."""
        from graft.memory.inductor_fix.functionalization import fix_functionalization  # Inductor, where it is used

        return outcome_of([fix_functionalization(gm.graph)])


def outcome_of(reports: Iterable[FunctionalizationReport]) -> Outcome:
    reports = list(reports)
    matches = tuple(
        MatchRecord(call.anchor, call.module, (call.node,), (call.made,), call.op, name=call.node)
        for report in reports
        for call in report.calls
    )
    misses = tuple(
        near_miss(copy, what)
        for report in reports
        for what, copies in (("in place", report.kept), ("returned in place", report.protected))
        for copy in copies
    )
    misses += tuple(
        NearMiss("in place", f"%{name}", f"%{name}", f"left to Inductor: {why}", 0, 1, name=name, module="",
                 stopped_at=name)
        for report in reports
        for name, why in report.left
    )  # fmt: skip
    return Outcome(matches, misses, "" if matches else NOTHING)


def near_miss(copy: KeptCopy, what: str) -> NearMiss:
    reason = f"%{copy.value} is copied ({copy.size}): {copy.reason}"
    return NearMiss(
        f"{what} {copy.op}", f"%{copy.node}", f"%{copy.value}", reason, 0, 1,
        name=copy.node, module="", stopped_at=copy.value,
    )  # fmt: skip


def record_of(reports: Iterable[FunctionalizationReport], **counts: float) -> TransformRecord:
    """The record of what the pass did to one graph, or to all graphs of one program."""
    outcome = outcome_of(reports)
    status = "applied" if outcome.matches else "no_match"
    return TransformRecord(NAME, "inductor", status, outcome.matches, outcome.near_misses, outcome.reason, **counts)  # pyrefly: ignore
