"""The matcher: finds a pattern in a graph in time linear in the graph, and says why it did not match.

Commutative operands match in either order, a cast of the pattern that would change nothing in the graph may be
missing there, literals are captured. Values inside a match may not be read from outside unless the pattern returns
them, or they are casts of its inputs, which stay for their other readers. For each anchor that fails, the deepest
point reached and what stopped it are kept as a near miss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from graft.errors import PatternError
from graft.graph.memory import is_mutating, mutated_roots, storage_root
from graft.graph.nodes import is_op, static_int, tensor_val, val, where
from graft.graph.pattern import (
    WORKING_DTYPE,
    Capture,
    Open,
    Pattern,
    TensorSpec,
    exact_pattern,
    literal_names,
    loose_pattern,
    outline,
    tensor_names,
)
from graft.graph.text import op_text, target_text, value_text
from graft.graph.trace import current_dialect

aten = torch.ops.aten
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


@dataclass(frozen=True)
class Match:
    """One place where a pattern fits: what its arguments are, the nodes inside, and the nodes it returns."""

    pattern: str
    tensors: dict[str, Node]
    literals: dict[str, Any]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @property
    def anchor(self) -> Node:
        return self.outputs[0]


@dataclass(frozen=True)
class NearMiss:
    """An anchor at which the pattern almost fitted."""

    pattern: str
    anchor: str
    node: str
    reason: str
    matched: int
    size: int


class Refused(Exception):
    """A place that stays as it is: the node that stops it, and why. The driver (Rewriter) tells it as a near miss."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass
class Attempt:
    """One try to lay a pattern over a graph."""

    exact: bool
    bound: dict[Node, Any] = field(default_factory=dict)
    literals: dict[str, Any] = field(default_factory=dict)
    deepest: int = 0
    stopped: tuple[Node | None, str] = (None, "")
    refuted: bool = False  # it fitted loosely, and not with the sizes, dtypes and literals that were found

    def matched(self) -> int:
        return sum(1 for p in self.bound if p.op == "call_function")

    def stop(self, node: Any, reason: str) -> bool:
        further = self.matched() - self.deepest
        if further > 0 or (further == 0 and not is_op(self.stopped[0], aten.dropout.default)):
            self.deepest, self.stopped = self.matched(), (node if isinstance(node, Node) else None, reason)
        return False

    def refusal(self, anchor: Node) -> Refused:
        return Refused(self.stopped[0] or anchor, self.stopped[1])

    def unify(self, wanted: Any, found: Any) -> bool:
        if isinstance(wanted, Node):
            return self.unify_node(wanted, found)
        if isinstance(wanted, Capture):
            return self.capture(wanted, found)
        if isinstance(wanted, Open):
            return not isinstance(found, Node) or self.stop(found, no_number(found))
        if isinstance(wanted, (list, tuple)):
            if not isinstance(found, (list, tuple)) or len(wanted) != len(found):
                return self.stop(found, f"expected {len(wanted)} items, found {value_text(found)}")
            return all(self.unify(w, f) for w, f in zip(wanted, found, strict=True))
        if wanted is WORKING_DTYPE and not self.exact and isinstance(found, torch.dtype):
            return found.is_floating_point or self.stop(None, f"{found} is no floating dtype")
        if isinstance(found, Node) or wanted != found or isinstance(wanted, bool) != isinstance(found, bool):
            return self.stop(found, f"expected the value {value_text(wanted)}, found {value_text(found)}")
        return True

    def capture(self, wanted: Capture, found: Any) -> bool:
        if isinstance(found, Node):
            return self.stop(found, no_number(found))
        if not isinstance(found, (int, float)):
            return self.stop(found, f"{wanted.name} is {value_text(found)}, not a number")
        if self.literals.setdefault(wanted.name, found) != found:
            return self.stop(None, f"{wanted.name} is both {self.literals[wanted.name]} and {found}")
        return True

    def unify_node(self, wanted: Node, found: Any) -> bool:
        if wanted in self.bound:
            return self.bound[wanted] is found or self.stop(
                found, f"expected {value_text(self.bound[wanted])} again, found {value_text(found)}"
            )
        if not isinstance(found, Node):
            return self.stop(None, f"expected a tensor, found the literal {value_text(found)}")
        if wanted.op == "placeholder":
            return self.bind_input(wanted, found)
        if not self.exact and is_op(wanted, aten.to.dtype):
            return self.unify_cast(wanted, found)
        if found.op != "call_function" or found.target is not wanted.target:
            return self.stop(found, f"{where(found)} is {op_text(found)}, expected {target_text(wanted.target)}")
        return self.unify_call(wanted, found)

    def bind_input(self, wanted: Node, found: Node) -> bool:
        if tensor_val(found) is None:
            return self.stop(found, f"{where(found)} is not one tensor")
        self.bound[wanted] = found
        return True

    def unify_cast(self, wanted: Node, found: Node) -> bool:
        """A cast matches a cast, or nothing at all where it would change nothing."""
        source, dtype = wanted.args
        present = is_op(found, aten.to.dtype) and (dtype is WORKING_DTYPE or found.args[1] is dtype)
        if present and self.attempt(lambda: self.unify_call_args(wanted, found, [(source, found.args[0])])):
            return True
        actual = tensor_val(found)
        absent = actual is not None and (dtype is WORKING_DTYPE or actual.dtype is dtype)
        if not absent:
            return self.stop(found, f"{where(found)} is not cast to {dtype}")
        return self.unify(source, found)

    def unify_call(self, wanted: Node, found: Node) -> bool:
        if len(wanted.args) != len(found.args) or set(wanted.kwargs) != set(found.kwargs):
            return self.stop(
                found, f"{where(found)} has other arguments than {target_text(wanted.target)} in the pattern"
            )
        pairs = list(zip(wanted.args, found.args, strict=True)) + [
            (v, found.kwargs[k]) for k, v in wanted.kwargs.items()
        ]
        if self.attempt(lambda: self.unify_call_args(wanted, found, pairs)):
            return True
        if wanted.target not in COMMUTATIVE or len(wanted.args) != 2:
            return False
        swapped = list(zip(wanted.args, reversed(found.args), strict=True))
        return self.attempt(lambda: self.unify_call_args(wanted, found, swapped))

    def unify_call_args(self, wanted: Node, found: Node, pairs: list[tuple[Any, Any]]) -> bool:
        self.bound[wanted] = found
        # calls before inputs: what has structure decides which operand is which
        return all(self.unify(w, f) for w, f in sorted(pairs, key=lambda pair: is_input(pair[0])))

    def unify_readers(self, wanted: Node) -> bool:
        """A result that the anchor does not come from, looked for among what reads values that are bound."""
        sources = [self.bound[n] for n in wanted.all_input_nodes if n in self.bound]
        readers = [reader for source in sources for reader in source.users]
        return any(self.attempt(lambda reader=reader: self.unify(wanted, reader)) for reader in readers)

    def attempt(self, step: Callable[[], bool]) -> bool:
        bound, literals = dict(self.bound), dict(self.literals)
        if step():
            return True
        self.bound, self.literals = bound, literals
        return False


def try_at(pattern: Pattern, node: Node) -> tuple[Attempt, bool]:
    attempt = Attempt(exact=False)
    return attempt, attempt.unify(pattern.anchor, node)


def no_number(found: Node) -> str:
    """Why a node cannot be a literal of the pattern."""
    if isinstance(val(found), torch.SymFloat):
        return (
            f"{where(found)} is a number that may differ from call to call, and the op takes a constant; one that a"
            " module holds and nobody changes counts as constant, an argument under dynamic=True does not"
        )
    return f"{where(found)} is computed, not a number"


def is_input(value: Any) -> bool:
    return isinstance(value, Node) and value.op == "placeholder"


@dataclass(frozen=True)
class Finder:
    """Looks for one pattern function in a graph."""

    function: Callable[..., Any]
    shapes: dict[str, str]
    allow_readers: bool = False
    needs: tuple[Any, ...] = ()

    def find(self, graph: Graph) -> tuple[list[Match], list[NearMiss]]:
        """All matches, none overlapping another, and the near misses outside them, in graph order."""
        shapes = tuple(self.shapes.items())
        rough = outline(self.function, shapes)
        self.check_needs(rough)
        tries = [(node, try_at(rough, node)) for node in graph.nodes if is_anchor(rough, node)]
        pattern = rough
        if any(fitted for _, (_, fitted) in tries):
            pattern = loose_pattern(self.function, shapes)
            tries = [(n, try_at(pattern, n) if fitted else (a, False)) for n, (a, fitted) in tries]
        return self.sort_out(graph, pattern, tries)

    def check_needs(self, pattern: Pattern) -> None:
        """What is declared as needed must be in the pattern, or places that fit would never be looked at."""
        targets = {node.target for node in pattern.graph.nodes}
        wrong = [target_text(op) for op in self.needs if op not in targets and current_dialect().keeps(op)]
        if wrong:
            raise PatternError(f"pattern {pattern.name} is said to need {wrong[0]}, which it does not call")

    def sort_out(
        self, graph: Graph, pattern: Pattern, tries: list[tuple[Node, tuple[Attempt, bool]]]
    ) -> tuple[list[Match], list[NearMiss]]:
        """Confirms what fitted, and keeps what nearly did."""
        mutated = mutated_roots(graph)
        taken: set[Node] = set()
        matches: list[Match] = []
        misses: list[tuple[Node, NearMiss]] = []
        for node, (attempt, fitted) in tries:
            try:
                match = self.confirm(pattern, attempt, node, taken, fitted)
                check_writes(match, mutated)
            except Refused as refused:
                if is_near(pattern, attempt, fitted):
                    whole = fitted and not attempt.refuted
                    reached = pattern.size if whole else min(attempt.deepest, pattern.size - 1)
                    place = f"%{refused.node.name}"
                    misses.append(
                        (node, NearMiss(pattern.name, where(node), place, refused.reason, reached, pattern.size))
                    )
            else:
                taken |= set(match.nodes)
                matches.append(match)
        return matches, [miss for node, miss in misses if node not in taken]

    def confirm(self, loose: Pattern, attempt: Attempt, node: Node, taken: set[Node], fitted: bool) -> Match:
        """The exact pattern at the same anchor, then the readers of every inner value. Refused where it is none."""
        if not fitted:
            raise attempt.refusal(node)
        tensors = {p.meta["pattern_input"]: attempt.bound[p] for p in loose.inputs if p in attempt.bound}
        missing = [n for n in tensor_names(self.function) if n not in tensors]
        missing += [n for n in literal_names(self.function) if n not in attempt.literals]
        if missing:
            raise PatternError(f"pattern {loose.name} never uses its arguments {missing}")
        specs = {name: spec_of(found) for name, found in tensors.items()}
        try:
            exact = exact_pattern(self.function, specs, attempt.literals)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # it refuses these shapes or dtypes
            reason = f"the pattern does not run on these inputs: {str(error).splitlines()[0]}"
            raise Refused(node, reason) from error
        second = Attempt(exact=True)
        if not second.unify(exact.anchor, node):
            attempt.refuted, attempt.deepest = True, second.deepest
            raise second.refusal(node)
        again = {p.meta["pattern_input"]: second.bound[p] for p in exact.inputs if p in second.bound}
        outputs = tuple(second.bound[o] for o in exact.outputs if o in second.bound or second.unify_readers(o))
        if len(outputs) != len(exact.outputs):
            attempt.refuted, attempt.deepest = True, second.matched()
            raise Refused(node, f"it fits, and the {len(exact.outputs)} results of the pattern are not all there")
        nodes = tuple(found for p, found in second.bound.items() if p.op == "call_function")
        overlap = next((n for n in nodes if n in taken), None)
        if overlap is not None:
            raise Refused(overlap, f"{where(overlap)} is part of an earlier match")
        match = Match(loose.name, again, dict(attempt.literals), nodes, outputs)
        if not self.allow_readers:
            check_readers(match)
        return match


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


def check_outside(match: Match, mutated: Collection[Node]) -> None:
    """For matches found by a walk: nothing inside may be read from outside, or written to."""
    check_readers(match)
    check_writes(match, mutated)


def check_writes(match: Match, mutated: Collection[Node]) -> None:
    """Where the graph writes in place: nothing that the match makes, or reads meanwhile, may be written to."""
    for touched in (*match.nodes, *match.tensors.values()) if mutated else ():
        root = storage_root(touched)
        if root in mutated and (touched in match.nodes or written_inside(root, match)):
            raise Refused(touched, f"{where(touched)} is written in place between the nodes of the match")


def written_inside(root: Node, match: Match) -> bool:
    first, last = min(match.nodes), max(match.nodes)
    writers = (n for n in match.anchor.graph.nodes if is_mutating(n) and first < n < last)
    roots = {storage_root(argument) for writer in writers for argument in writer.all_input_nodes}
    # another attribute may lie in the same memory
    return root in roots or (root.op == "get_attr" and any(other.op == "get_attr" for other in roots))


def is_anchor(loose: Pattern, node: Node) -> bool:
    """A node at which the match could end: the anchor's op, or for a final cast also what it would cast."""
    if node.op != "call_function":
        return False
    anchor = loose.anchor
    if is_op(anchor, aten.to.dtype):
        return is_op(node, aten.to.dtype) or is_op(anchor.args[0], node.target)
    return node.target is anchor.target


def is_near(loose: Pattern, attempt: Attempt, fitted: bool) -> bool:
    """Worth telling: the whole loose pattern fitted, or at least half of it and more than two calls did (all of a
    pattern that has fewer), or a dropout in training mode (the normal form keeps no other) stands in the way."""
    if attempt.deepest and is_op(attempt.stopped[0], aten.dropout.default):
        return True
    return fitted or (attempt.deepest >= min(3, loose.size) and 2 * attempt.deepest >= loose.size)


def spec_of(node: Node) -> TensorSpec:
    tensor = tensor_val(node)
    assert tensor is not None
    return TensorSpec(tuple(static_int(size) for size in tensor.shape), tensor.dtype)
