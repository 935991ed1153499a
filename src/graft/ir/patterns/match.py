"""The matcher: finds a pattern in a graph in time linear in the graph, and says why it did not match.

Values inside a match may not be read from outside unless the pattern returns them, or they are casts of its inputs,
which stay for their other readers. For each anchor that fails, the deepest point reached and what stopped it are kept
as a near miss; of the variants of a pattern, the one that came furthest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.base.errors import PatternError
from graft.ir.effects import is_mutating, mutated_args, mutated_roots, storage_root
from graft.ir.nodes import is_op, module_path, static_int, tensor_val, where
from graft.ir.patterns.arguments import TensorSpec, arguments
from graft.ir.patterns.attempt import Attempt, Refused, try_at
from graft.ir.patterns.needs import Need, calls_and_reads, is_met, need_text, ops_of
from graft.ir.patterns.outlines import guessed_pattern, has_flags, outlines
from graft.ir.patterns.pattern import Pattern, exact_pattern, leads_to, loose_pattern
from graft.ir.trace import current_level

aten = torch.ops.aten
Try = tuple[Node, tuple[Attempt, bool]]


@dataclass(frozen=True)
class Match:
    """One site where a pattern fits: what its arguments are, the nodes inside, and the nodes it returns.

    literals: numbers, flags and names; what is None here; and the choices of the pattern's words. unread: which of
    the pattern's results its variant leaves out; `outputs` are the others. path: how the words were decided.
    """

    pattern: str
    tensors: dict[str, Node]
    literals: dict[str, Any]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    unread: tuple[int, ...] = field(default=(), kw_only=True)
    path: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def anchor(self) -> Node:
        return self.outputs[0]

    def traced(self, function: Callable[..., Any], written: bool = False) -> Pattern:
        """The pattern, or its replacement (`written`), for the very inputs of this match."""
        specs = {name: spec_of(node) for name, node in self.tensors.items()}
        return exact_pattern(function, specs, self.literals, written, () if written else self.path)

    def calls_of(self, body: Pattern) -> list[Node]:
        """The calls of a replacement that are needed: from the others come only results that the graph has not."""
        calls = [node for node in body.graph.nodes if node.op == "call_function"]
        if not self.unread:
            return calls
        kept = self.present(body.outputs)
        return [node for node in calls if is_mutating(node) or leads_to(node, kept)]

    def present(self, results: tuple[Any, ...]) -> list[Any]:
        """Of the results of the pattern or its replacement, those that the graph has."""
        return [result for index, result in enumerate(results) if index not in self.unread]


@dataclass(frozen=True)
class NearMiss:
    """An anchor at which the pattern almost fitted: in words (`anchor`, `node`), and as names of nodes and module."""

    pattern: str
    anchor: str
    node: str
    reason: str
    matched: int
    size: int
    name: str = field(kw_only=True)  # of the anchor
    module: str = field(kw_only=True)  # that the anchor is in
    stopped_at: str = field(kw_only=True)  # the node that did not fit

    @staticmethod
    def at(pattern: str, anchor: Node, stopped_at: Node, reason: str, matched: int, size: int) -> NearMiss:
        return NearMiss(
            pattern, where(anchor), f"%{stopped_at.name}", reason, matched, size,
            name=anchor.name, module=module_path(anchor), stopped_at=stopped_at.name,
        )  # fmt: skip


@dataclass(frozen=True)
class Finder:
    """Looks for one pattern function in a graph."""

    function: Callable[..., Any]
    shapes: dict[str, str]
    allow_readers: bool = False
    needs: tuple[Need, ...] = ()
    near: int = 3  # calls that must fit, and half of the pattern, for a near miss

    def find(self, graph: Graph) -> tuple[list[Match], list[NearMiss]]:
        """All matches, none overlapping another, and the near misses outside them, in graph order."""
        shapes = tuple(self.shapes.items())
        rough = outlines(self.function, shapes)
        self.check_needs(rough)
        search = Search(graph)
        left: list[list[Try]] = []
        for index, pattern in enumerate(rough):
            tries = [(node, try_at(pattern, node)) for node in search.anchors(pattern)]
            whole = [node for node, (tried, fitted) in tries if fitted and tried.find_results(pattern)]
            for node in whole:
                if node not in search.ends and not self.add_guessed(search, index, node):
                    pattern = loose_pattern(self.function, shapes, index)
                    self.sort_out(search, index, pattern, node, try_at(pattern, node))
            left.append([(node, tried) for node, tried in tries if node not in whole])
        for index, (pattern, tries) in enumerate(zip(rough, left, strict=True)):
            for node, tried in tries:
                if node not in search.taken and is_near(pattern, *tried, self.near):
                    if tried[1] or has_flags(self.function):  # what is open in the outline may be what is wrong
                        pattern = loose_pattern(self.function, shapes, index)
                        tried = try_at(pattern, node)
                    self.sort_out(search, index, pattern, node, tried)
        return search.results()

    def check_needs(self, variants: list[Pattern]) -> None:
        """What is declared as needed must be in the pattern, or sites that fit would never be looked at."""
        for pattern in variants:
            present, keeps = calls_and_reads(pattern.graph.nodes), current_level().keeps
            wrong = [need for need in self.needs if not is_met(need, present) and all(map(keeps, ops_of(need)))]
            if wrong:
                raise PatternError(
                    f"pattern {pattern.name} is said to need {need_text(wrong[0])}, which it does not call"
                )

    def add_guessed(self, search: Search, index: int, node: Node) -> bool:
        """Adds the match that the guessed captures lead to; False where they lead to none, right or not."""
        pattern = guessed_pattern(self.function, tuple(self.shapes.items()), index)
        attempt, fitted = try_at(pattern, node)
        try:
            self.add(search, self.confirm(pattern, attempt, node, search.taken, fitted))
        except (Refused, PatternError):
            return False
        return True

    def add(self, search: Search, match: Match) -> None:
        check_writes(match, search.mutated)
        search.add(match, match.outputs if self.allow_readers else match.nodes)

    def sort_out(self, search: Search, index: int, pattern: Pattern, node: Node, tried: tuple[Attempt, bool]) -> None:
        """Confirms what fitted, and keeps what nearly did: of two variants, the last that stopped within a call, or
        else the first."""
        attempt, fitted = tried
        try:
            self.add(search, self.confirm(pattern, attempt, node, search.taken, fitted))
        except Refused as refused:
            if is_near(pattern, attempt, fitted, self.near):
                whole = fitted and not attempt.refuted
                reached = pattern.size if whole else min(attempt.deepest, pattern.size - 1)
                miss = NearMiss.at(pattern.name, node, refused.node, refused.reason, reached, pattern.size)
                search.miss(node, miss, index if attempt.in_call else -1 - index)

    def confirm(self, loose: Pattern, attempt: Attempt, node: Node, taken: set[Node], fitted: bool) -> Match:
        """The exact pattern at the same anchor, then the readers of every inner value. Refused where it is none."""
        if not fitted:
            raise attempt.refusal(node)
        if not attempt.find_results(loose):
            attempt.refuted, attempt.deepest = True, attempt.matched()
            raise Refused(node, incomplete(loose))
        tensors, literals = self.bindings(loose, attempt)
        specs = {name: spec_of(found) for name, found in tensors.items()}
        try:
            exact = exact_pattern(self.function, specs, literals, path=loose.path)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # it refuses these shapes or dtypes
            reason = f"the pattern does not run on these inputs: {str(error).splitlines()[0]}"
            raise Refused(node, reason) from error
        second = Attempt(exact=True)
        if not second.unify(exact.anchor, node):
            attempt.refuted, attempt.deepest = True, second.deepest
            raise second.refusal(node)
        if not second.find_results(exact):
            attempt.refuted, attempt.deepest = True, second.matched()
            raise Refused(node, incomplete(exact))
        nodes = tuple(found for p, found in second.bound.items() if p.op == "call_function")
        overlap = next((n for n in nodes if n in taken), None)
        if overlap is not None:
            raise Refused(overlap, f"{where(overlap)} is part of an earlier match")
        again = {p.meta["pattern_input"]: second.bound[p] for p in exact.inputs if p in second.bound}
        unread = tuple(index for index, output in enumerate(exact.outputs) if output is None)
        outputs = tuple(second.bound[o] for o in exact.outputs if o is not None)
        match = Match(
            loose.name, again, literals | dict(loose.chosen), nodes, outputs, unread=unread, path=loose.path
        )
        check_inputs(match)
        if not self.allow_readers:
            check_readers(match)
        return match

    def bindings(self, loose: Pattern, attempt: Attempt) -> tuple[dict[str, Node], dict[str, Any]]:
        """The tensors that were found, and the literals with what is None or has its default."""
        bound = {p.meta["pattern_input"]: attempt.bound[p] for p in loose.inputs if p in attempt.bound}
        literals = {**attempt.literals, **{name: None for name, found in bound.items() if found is None}}
        unused = [a for a in arguments(self.function) if a.kind != "tensors" and a.name not in {**bound, **literals}]
        missing = [a.name for a in unused if not a.has_default]
        if missing:
            raise PatternError(f"pattern {loose.name} never uses its arguments {missing}")
        literals |= {a.name: a.default for a in unused}
        return {name: found for name, found in bound.items() if found is not None}, literals


def incomplete(pattern: Pattern) -> str:
    return f"it fits, and the {len(pattern.results)} results of the pattern are not all there"


class Search:
    """What was found of one pattern in one graph so far."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.mutated = mutated_roots(graph)
        self.matches: list[Match] = []
        self.taken: set[Node] = set()
        self.ends: set[Node] = set()  # the anchors of matches
        self.misses: dict[Node, tuple[NearMiss, int]] = {}

    def anchors(self, pattern: Pattern) -> list[Node]:
        return [node for node in self.order if is_anchor(pattern, node)]

    def add(self, match: Match, taken: Collection[Node]) -> None:
        """taken: what no other match may have; values that others may read, they may take too."""
        self.matches.append(match)
        self.ends.add(match.anchor)
        self.taken |= set(taken)

    def miss(self, node: Node, miss: NearMiss, precedence: int) -> None:
        """Kept where no variant came further; of two that came as far, the one of the higher precedence."""
        kept = self.misses.setdefault(node, (miss, precedence))
        self.misses[node] = max(kept, (miss, precedence), key=lambda one: (one[0].matched / one[0].size, one[1]))

    def results(self) -> tuple[list[Match], list[NearMiss]]:
        matches = sorted(self.matches, key=lambda match: self.order[match.anchor])
        misses = sorted((node for node in self.misses if node not in self.taken), key=self.order.__getitem__)
        return matches, [self.misses[node][0] for node in misses]


def check_inputs(match: Match) -> None:
    """What a match reads may not be a value that it replaces, as `y + y` for `f(x) + y`; a cast of an input stays."""
    given = set(match.tensors.values())
    inner = next((node for node in match.nodes if node in given and not is_cast_of(node, given)), None)
    if inner is not None:
        name = next(name for name, node in match.tensors.items() if node is inner)
        raise Refused(inner, f"{where(inner)} is the {name} of the match, and a part of it")


def check_readers(match: Match) -> None:
    """What is inside a match and not returned by it may not be read from outside."""
    given = set(match.tensors.values())
    inner = [node for node in match.nodes if not is_cast_of(node, given)]
    refuse_readers(inner, match.outputs, match.nodes)


def is_cast_of(node: Node, inputs: Collection[Node]) -> bool:
    """A cast of an input: it stays for its other readers, so the match need not be the only one."""
    return is_op(node, aten.to.dtype) and node.args[0] in inputs


def refuse_readers(nodes: Collection[Node], outputs: Collection[Node], whole: Collection[Node] = ()) -> None:
    """Refused at the first of `nodes` that is read from outside the `whole` and is no output."""
    inside = {*nodes, *whole}
    for node in nodes:
        reader = next((user for user in node.users if user not in inside), None)
        if reader is not None and node not in outputs:
            raise Refused(node, f"{where(node)} has a second reader {where(reader)}")


def check_outside(match: Match, mutated: Set[Node]) -> None:
    """For matches found by a walk: nothing inside may be read from outside, or written to."""
    check_readers(match)
    check_writes(match, mutated)


def check_writes(match: Match, mutated: Set[Node]) -> None:
    """Where the graph writes in place: nothing that the match makes, or reads meanwhile, may be written to by others,
    and what the match writes itself, nobody may touch meanwhile: its writes move to where its results are."""
    if not mutated or (len(match.nodes) == 1 and storage_root(match.anchor) is match.anchor):
        return  # one call for another, whose result is its own: there is nothing in between
    own = {storage_root(written) for node in match.nodes for written in mutated_args(node)}
    touched = {node: storage_root(node) for node in (*match.nodes, *match.tensors.values())}
    if not own and mutated.isdisjoint(touched.values()):
        return
    between = list(between_nodes(match))
    written = {storage_root(argument) for n in between if is_mutating(n) for argument in n.all_input_nodes}
    for node, root in touched.items():
        inside = node in match.nodes and root not in own
        if root in mutated and (inside or shares_memory(root, written)):
            raise Refused(node, f"{where(node)} is written in place between the nodes of the match")
    for node in between if own else ():
        if any(shares_memory(storage_root(argument), own) for argument in node.all_input_nodes):
            raise Refused(node, f"{where(node)} in between needs what the match writes as it is then")


def between_nodes(match: Match) -> Iterator[Node]:
    """What stands between the first node of a match and its last, and is none of them."""
    inside, last = set(match.nodes), max(match.nodes)
    node = min(match.nodes)
    while node is not last:
        if node not in inside:
            yield node
        node = node.next


def shares_memory(root: Node, others: set[Node]) -> bool:
    # another attribute may lie in the same memory
    return root in others or (root.op == "get_attr" and any(other.op == "get_attr" for other in others))


def is_anchor(loose: Pattern, node: Node) -> bool:
    """A node at which the match could end: the anchor's op, or for a final cast also what it would cast."""
    if node.op != "call_function":
        return False
    anchor = loose.anchor
    if is_op(anchor, aten.to.dtype):
        return is_op(node, aten.to.dtype) or is_op(anchor.args[0], node.target)
    return node.target is anchor.target


def is_near(loose: Pattern, attempt: Attempt, fitted: bool, near: int) -> bool:
    """Worth telling: the whole loose pattern fitted, or at least `near` of its calls did (half of them, where that is
    more than two; all of a pattern that has fewer), or a dropout in training mode (the normal form keeps no other)
    stands in the way."""
    if attempt.deepest and is_op(attempt.stopped[0], aten.dropout.default):
        return True
    half = near < 3 or 2 * attempt.deepest >= loose.size
    return fitted or (attempt.deepest >= min(near, loose.size) and half)


def spec_of(node: Node) -> TensorSpec:
    tensor = tensor_val(node)
    assert tensor is not None
    return TensorSpec(tuple(static_int(size) for size in tensor.shape), tensor.dtype)
