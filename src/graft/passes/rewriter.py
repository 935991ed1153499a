"""The one driver of transforms: what may fit, what fits, what is written, and the record of each.

A transform says where to look (`candidates`), what it finds there (`find`: a match, nothing, or Refused with the
reason) and what replaces it (`write`). The loop is here, for walks over the graph and for patterns alike: skipped
graphs, the order of finding and writing, what others read or write meanwhile, near misses, dead nodes, records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.effects import mutated_roots
from graft.ir.nodes import module_path, where
from graft.ir.patterns.match import Match, NearMiss, Refused, check_outside, is_cast_of
from graft.passes.base import BaseTransform, Context, Outcome
from graft.passes.report import MatchRecord


@dataclass
class RewriteRun:
    """One run of a transform over one graph, and what came of it so far.

    A transform that reads something once for all candidates has a subclass with that, and returns it from `start`.
    """

    gm: GraphModule
    context: Context
    editor: Editor
    records: list[MatchRecord] = field(default_factory=list)
    misses: list[NearMiss] = field(default_factory=list)

    @cached_property
    def mutated(self) -> set[Node]:
        """The roots of memory that the graph writes in place, read before anything is changed."""
        return mutated_roots(self.gm.graph)


class Rewriter(BaseTransform):
    """Subclass, say `candidates`, `lacking`, `find` and `write`, and register.

    A candidate is a node, or anything with the node that it is told at as its `anchor`. A match may be a subclass of
    Match with what `write` needs to know.
    """

    # False: each candidate is looked at in the graph as the ones before it left it. True: all are found in the graph
    # as it came, so that reasons name the model's own nodes; then all are written.
    find_first: ClassVar[bool] = False
    lacking: ClassVar[str]  # the reason where there is no candidate, or none that is even near
    size: ClassVar[int] = 2  # calls of a whole site, as near misses count them

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        """Why this graph is skipped, or None."""
        return None

    def start(self, gm: GraphModule, context: Context) -> Any:
        return RewriteRun(gm, context, Editor(gm, self.name))

    def candidates(self, run: Any) -> Iterable[Any]:
        """The sites at which there may be a match, in the order in which they are looked at."""
        raise NotImplementedError

    def find(self, run: Any, candidate: Any, /) -> Match | None:
        """What fits here; Refused where it nearly does, None where it is something else. The graph stays as it is."""
        raise NotImplementedError

    def check(self, run: Any, match: Any, /) -> None:
        """Refused where somebody outside would see the change. Override it where the transform knows more."""
        check_outside(match, run.mutated)

    def write(self, run: Any, match: Any, /) -> Sequence[Node]:
        """Puts the replacement in place through `run.editor`, and returns the nodes that it made."""
        raise NotImplementedError

    def finish(self, run: Any) -> None:
        """Notes and outputs for the context, when all is written."""

    def reason(self, run: Any) -> str:
        """Why there is no match."""
        return closest(run.misses) if run.misses else self.lacking

    def near_miss(self, run: Any, candidate: Any, refused: Refused, /) -> NearMiss:
        anchor = candidate if isinstance(candidate, Node) else candidate.anchor
        return NearMiss.at(self.name, anchor, refused.node, refused.reason, 1, self.size)

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        skipped = self.applies(gm, context)
        if skipped:
            return Outcome(reason=skipped, skipped=True)
        run = self.start(gm, context)
        found = self.matches(run)
        for matches in [list(found)] if self.find_first else ([match] for match in found):
            run.records += [self.rewrite(run, match) for match in matches]
            erase_dead(run.editor, [node for match in matches for node in match.nodes])
        self.finish(run)
        return Outcome(tuple(run.records), tuple(run.misses), "" if run.records else self.reason(run))

    def matches(self, run: Any) -> Iterator[Match]:
        """Found one by one, as they are asked for."""
        taken: set[Node] = set()
        for candidate in self.candidates(run):
            try:
                match = self.find(run, candidate)
                if match is not None:
                    self.check(run, match)
                    if self.find_first:
                        claim(match, taken)
            except Refused as refused:
                run.misses.append(self.near_miss(run, candidate, refused))
                continue
            if match is not None:
                yield match

    def rewrite(self, run: Any, match: Any, /) -> MatchRecord:
        name, anchor, module = match.anchor.name, where(match.anchor), module_path(match.anchor)
        nodes = [node.name for node in match.nodes]
        made = tuple(node.name for node in self.write(run, match))
        successors, erased = run.editor.take_changes()
        replaced = tuple(dict.fromkeys([*nodes, *(old for old, _ in successors), *erased]))
        return MatchRecord(anchor, module, replaced, made, match.pattern, successors=successors, name=name)


def claim(match: Match, taken: set[Node]) -> None:
    """Refused where an earlier match has a node of this one; a cast of an input stays, so that both may have it."""
    own = [node for node in match.nodes if not is_cast_of(node, match.tensors.values())]
    overlap = next((node for node in own if node in taken), None)
    if overlap is not None:
        raise Refused(overlap, f"{where(overlap)} is part of an earlier match")
    taken.update(own)


def forget_taken(run: Any) -> set[str]:
    """What a match took after all is no near miss of the sites before it; the names of all that was taken."""
    taken = {name for record in run.records for name in record.replaced}
    run.misses = [miss for miss in run.misses if miss.name not in taken]
    return taken


def closest(misses: Sequence[NearMiss]) -> str:
    nearest = max(misses, key=lambda miss: (miss.matched / max(miss.size, 1), miss.size))
    return f"{len(misses)} near misses; closest at {nearest.anchor}: {nearest.reason}"


def erase_dead(editor: Editor, nodes: Collection[Node]) -> None:
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            editor.graph.erase_node(node)
