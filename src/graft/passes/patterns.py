"""A transform that is a list of patterns, each with its replacement: both plain functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any, ClassVar

from torch.fx import GraphModule, Node, map_arg

from graft.base.errors import PatternError, VerificationError
from graft.ir.edit import Editor, check_same_kind
from graft.ir.nodes import calls, is_op, where
from graft.ir.patterns.match import Finder, Match, NearMiss, Refused
from graft.ir.patterns.needs import Need, calls_and_reads, is_met, need_text, ops_of
from graft.ir.patterns.pattern import Pattern
from graft.ir.trace import current_level
from graft.passes.base import Context
from graft.passes.rewriter import Rewriter, RewriteRun, closest, forget_taken


@dataclass(frozen=True)
class Rewrite:
    """A pattern and what replaces it, both plain functions of the same arguments.

    shapes: "b s d" for each tensor, letters shared between them. check: raises Refused where a match must stay.
    allow_readers: inner values may be read from outside; they are then computed twice. needs: calls of the canonical
    pattern without which nothing can fit, (reader, op) where one must read another, any_of(…); a graph that lacks one
    is not searched, and the pattern not even traced. exact: the replacement's reference computes the same bits; False
    where it may be a few roundings off. refuse: why this pattern is known and yet left alone; every site that fits
    becomes a near miss. near: how many calls must fit for a near miss; 1 where the last op alone says that there
    should be a match. make: tensors that the replacement takes beyond the pattern's, by name: new inputs of the
    graph, new weights. origin: an argument; a new call that reads it has the module and line of its old reader.
    """

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    shapes: dict[str, str]
    check: Callable[[Match], None] | None = None
    allow_readers: bool = False
    needs: tuple[Need, ...] = ()
    exact: bool = True
    refuse: str = ""
    near: int = 3
    make: Callable[[Any, Match], dict[str, Node]] | None = None
    origin: str = ""

    def finder(self) -> Finder:
        return Finder(self.pattern, self.shapes, self.allow_readers, self.needs, self.near)


@dataclass(frozen=True)
class PatternMatch(Match):
    rewrite: Rewrite = field(kw_only=True)


@dataclass
class PatternRun(RewriteRun):
    """lacking: what the graph does not call, of patterns that were not tried. tried: the names of the others.
    shared: tensors that the replacements of all matches may take, by name."""

    lacking: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    shared: dict[str, Node] = field(default_factory=dict)

    present: tuple[int, set[Need]] = (-1, set())  # how many matches were written, and what the graph had then

    def absent(self, needs: Sequence[Need]) -> Need | None:
        """The first of `needs` that the graph, as it is now, does not have."""
        if self.present[0] != len(self.records):
            self.present = len(self.records), calls_and_reads(calls(self.gm.graph))
        kept = (need for need in needs if all(map(current_level().keeps, ops_of(need))))
        return next((need for need in kept if not is_met(need, self.present[1])), None)


class PatternTransform(Rewriter):
    """A transform that is a list of rewrites, tried in order, each on what the ones before it left."""

    reads_decomposed = True  # patterns are taken apart in the same way
    lacking = ""  # by default, what the patterns are called and what they need
    explained: ClassVar[tuple[Any, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not callable(cls.rewrites):
            kind = type(cls.rewrites).__name__
            raise PatternError(
                f"{cls.__name__}.rewrites is a {kind}, which cannot be called; write it as a method:"
                " def rewrites(self) -> Sequence[Rewrite]"
            )

    def rewrites(self) -> Sequence[Rewrite]:
        raise NotImplementedError

    def start(self, gm: GraphModule, context: Context) -> PatternRun:
        return PatternRun(gm, context, Editor(gm, self.name))

    def candidates(self, run: PatternRun) -> Iterator[PatternMatch]:
        for rewrite in self.checked_rewrites():
            absent = run.absent(rewrite.needs)
            if absent is not None:
                run.lacking.append(need_text(absent))
                continue
            run.tried.append(rewrite.pattern.__name__)
            matches, near = rewrite.finder().find(run.gm.graph)
            run.misses += near
            for match in matches:
                yield PatternMatch(**vars(match), rewrite=rewrite)

    def checked_rewrites(self) -> list[Rewrite]:
        """Those of an author, who may have given something else."""
        found = list(self.rewrites())
        wrong = next((one for one in found if not isinstance(one, Rewrite)), None)
        if wrong is not None:
            raise PatternError(
                f"{type(self).__name__}.rewrites gives a {type(wrong).__name__} where a Rewrite is due; write"
                " Rewrite(pattern, replacement, shapes)"
            )
        return found

    def find(self, run: PatternRun, candidate: PatternMatch) -> PatternMatch:
        """What was found, reading what replaced its inputs since then."""
        tensors = {name: run.editor.current(node) for name, node in candidate.tensors.items()}
        match = replace(candidate, tensors=tensors)
        if match.rewrite.refuse:
            raise Refused(match.anchor, match.rewrite.refuse)
        if match.rewrite.check:
            match.rewrite.check(match)
        if match.rewrite.make is None:
            check_kind(match)
        return match

    def check(self, run: PatternRun, match: PatternMatch) -> None:
        """The finder has looked at readers and writers."""

    def write(self, run: PatternRun, match: PatternMatch) -> list[Node]:
        """The replacement above the earliest result, after what is made for it."""
        extra = match.rewrite.make(run, match) if match.rewrite.make else {}
        match = replace(match, tensors=match.tensors | run.shared | extra)
        body = match.traced(match.rewrite.replacement, written=True)
        bound = {p: match.tensors[p.meta["pattern_input"]] for p in body.inputs}
        made, before = [], insertion_point(match)
        origins = origins_of(match, body)
        for node in match.calls_of(body):
            args, kwargs = map_arg(node.args, bound.__getitem__), map_arg(node.kwargs, bound.__getitem__)
            like = origins.get(node, match.anchor)
            bound[node] = run.editor.call(node.target, args, kwargs, before=before, like=like)
            made.append(bound[node])
        for old, new in zip(match.outputs, match.present(body.outputs), strict=True):
            run.editor.replace(old, bound[new])
        return [*made, *extra.values()]

    def explain(self, node: Node) -> None:
        """Refused at a call that is left and yet looks as if it should not be; asked of all calls in `explained`."""

    def finish(self, run: Any) -> None:
        """What another pattern took after all is no miss of the ones before it; what is left is explained."""
        taken = forget_taken(run)
        for node in list(run.gm.graph.nodes) if self.explained else ():
            if is_op(node, *self.explained) and node.name not in taken:
                try:
                    self.explain(node)
                except Refused as refused:
                    miss = NearMiss.at(self.name, node, refused.node, refused.reason, 1, self.size)
                    run.misses = [told for told in run.misses if told.name != node.name]
                    known = {(told.stopped_at, told.reason) for told in run.misses}
                    run.misses += [] if (miss.stopped_at, miss.reason) in known else [miss]

    def reason(self, run: PatternRun) -> str:
        """The nearest miss, or what nothing looks like, and what the graph lacks for patterns that were not tried."""
        if run.misses:
            return closest(run.misses)
        if self.lacking:
            return self.lacking
        without = f"the graph has no {' and no '.join(dict.fromkeys(run.lacking))}" if run.lacking else ""
        alike = f"nothing in the graph looks like {', '.join(dict.fromkeys(run.tried)) or 'the pattern'}"
        return "; ".join(part for part in (alike if run.tried or not run.lacking else "", without) if part)

    def near_miss(self, run: PatternRun, candidate: PatternMatch, refused: Refused) -> NearMiss:
        size = len(candidate.nodes)
        return NearMiss.at(candidate.pattern, candidate.anchor, refused.node, refused.reason, size, size)


def origins_of(match: PatternMatch, body: Pattern) -> dict[Node, Node]:
    """Where new calls come from, other than the anchor: the reader of the rewrite's `origin`, the result that a call
    stands in for, or the call of the same op that is gone."""
    same = {target: iter(nodes) for target, nodes in by_target(match.nodes).items()}
    found = {new: next(same.get(new.target, iter(())), match.anchor) for new in body.graph.nodes}
    pairs = zip(match.present(body.outputs), match.outputs, strict=True)
    found |= {new: old for new, old in pairs if not is_op(new, getitem)}  # an item comes from where its call does
    origin = match.tensors.get(match.rewrite.origin)
    reader = next((node for node in match.nodes if origin in node.all_input_nodes), None) if origin else None
    if reader is not None:
        (given,) = (node for node in body.inputs if node.meta["pattern_input"] == match.rewrite.origin)
        found |= dict.fromkeys(given.users, reader)
    return found


def by_target(nodes: Sequence[Node]) -> dict[Any, list[Node]]:
    found: dict[Any, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.target, []).append(node)
    return found


def check_kind(match: PatternMatch) -> None:
    """Refused where the replacement gives another shape or dtype, cannot stand there, or refuses the inputs."""
    rewrite = match.rewrite
    try:
        wanted = match.traced(rewrite.pattern)
        offered = match.traced(rewrite.replacement, written=True)
        insertion_point(match)
        for old, new in zip(match.present(wanted.outputs), match.present(offered.outputs), strict=True):
            check_same_kind(old, new, rewrite.replacement.__name__)
    except (VerificationError, RuntimeError, TypeError) as error:
        reason = f"the replacement does not fit: {str(error).splitlines()[0]}"
        raise Refused(match.anchor, reason) from error


def insertion_point(match: Match) -> Node:
    """The earliest result: its readers come below it, and the inputs must come above it."""
    point = min(match.outputs)
    late = next((node for node in match.tensors.values() if point < node), None)
    if late is not None:
        raise VerificationError(f"{where(late)} is computed after {where(point)}, which would need it")
    return point
