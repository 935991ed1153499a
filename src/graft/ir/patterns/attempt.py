"""Lays a pattern over a graph at one node: what is bound to what, how far it came, and what stopped it.

Commutative operands match in either order, a cast of the pattern that would change nothing in the graph may be
missing there, literals are captured, arguments that may be None are None where the call leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from graft.ir.canonical.rules import op_argument_names, op_defaults
from graft.ir.io.text import op_text, target_text, value_text
from graft.ir.nodes import is_op, is_weight, tensor_val, val, where
from graft.ir.patterns.arguments import WORKING_DTYPE
from graft.ir.patterns.pattern import Capture, Open, Pattern, with_defaults

aten = torch.ops.aten
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


class Refused(Exception):
    """A site that stays as it is: the node that stops it, and why. The driver (Rewriter) tells it as a near miss."""

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
    in_call: bool = False  # the op is the pattern's, its arguments are others
    refuted: bool = False  # it fitted loosely, and not with the sizes, dtypes and literals that were found

    def matched(self) -> int:
        return sum(1 for p in self.bound if p.op == "call_function")

    def stop(self, node: Any, reason: str, in_call: bool = False) -> bool:
        further = self.matched() - self.deepest
        if further > 0 or (further == 0 and not is_op(self.stopped[0], aten.dropout.default)):
            self.deepest, self.stopped = self.matched(), (node if isinstance(node, Node) else None, reason)
            self.in_call = in_call
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
        problem = None if found is None and wanted.may_be_none else literal_problem(wanted, found)
        if problem is not None:
            return self.stop(found, f"{wanted.name} is {value_text(found)}, {problem}")
        if self.literals.setdefault(wanted.name, found) != found:
            return self.stop(None, f"{wanted.name} is both {self.literals[wanted.name]} and {found}")
        return True

    def unify_node(self, wanted: Node, found: Any) -> bool:
        if wanted in self.bound:
            return self.bound[wanted] is found or self.stop(
                found, f"expected {value_text(self.bound[wanted])} again, found {value_text(found)}"
            )
        if found is None and wanted.meta.get("may_be_none"):
            self.bound[wanted] = None
            return True
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
        if wanted.meta.get("constant") and not is_weight(found):
            name = wanted.meta["pattern_input"]
            return self.stop(found, f"the {name} {where(found)} is computed in the graph, it is not a parameter")
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
        given = aligned(wanted, found)
        if len(wanted.args) != len(given) or set(wanted.kwargs) != set(found.kwargs):
            return self.stop(found, other_arguments(wanted, found), in_call=True)
        pairs = list(zip(wanted.args, given, strict=True)) + [(v, found.kwargs[k]) for k, v in wanted.kwargs.items()]
        if self.attempt(lambda: self.unify_call_args(wanted, found, pairs)):
            return True
        if wanted.target not in COMMUTATIVE or len(wanted.args) != 2:
            return False
        swapped = list(zip(wanted.args, reversed(given), strict=True))
        return self.attempt(lambda: self.unify_call_args(wanted, found, swapped))

    def unify_call_args(self, wanted: Node, found: Node, pairs: list[tuple[Any, Any]]) -> bool:
        self.bound[wanted] = found
        # calls before inputs: what has structure decides which operand is which
        return all(self.unify(w, f) for w, f in sorted(pairs, key=lambda pair: is_input(pair[0])))

    def find_results(self, pattern: Pattern) -> bool:
        """Whether all results are there, and all writes, besides the anchor and what leads to it.

        Of a loose pattern only those that bring in further inputs: a cast may be missing until dtypes are known.
        """
        wanted = (result for result in pattern.results if result not in self.bound)
        return all(self.unify_readers(result) for result in wanted if self.exact or self.brings_inputs(result))

    def brings_inputs(self, node: Node) -> bool:
        if node.op == "placeholder" or node in self.bound:
            return node not in self.bound
        return any(self.brings_inputs(source) for source in node.all_input_nodes)

    def unify_readers(self, wanted: Node) -> bool:
        """A result that the anchor does not come from, looked for among what reads values that are bound."""
        sources = [self.bound[n] for n in wanted.all_input_nodes if self.bound.get(n) is not None]
        taken = set(self.bound.values())
        readers = [reader for source in sources for reader in source.users if reader not in taken]
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


def literal_problem(wanted: Capture, found: Any) -> str | None:
    """Why a value cannot be this argument of the pattern, or None."""
    if wanted.kind == "bool":
        return None if isinstance(found, bool) else "not a flag"
    if wanted.kind == "name":
        return None if found in wanted.names else f"not one of {', '.join(wanted.names)}"
    return None if isinstance(found, (int, float)) else "not a number"


def aligned(wanted: Node, found: Node) -> tuple[Any, ...]:
    """The arguments of a call, as many as the pattern's has, where those too many or too few are defaults."""
    count = len(wanted.args)
    if len(found.args) > count:
        return found.args if beyond(wanted, found) else found.args[:count]
    return with_defaults(found, count) if all(map(is_free, wanted.args[len(found.args) :])) else found.args


def is_free(item: Any) -> bool:
    """An argument of the pattern's call that a default may be."""
    if isinstance(item, Node):
        return bool(item.meta.get("may_be_none"))
    return item is None or isinstance(item, (Capture, Open))


def beyond(wanted: Node, found: Node) -> list[str]:
    """The names of arguments that the call has and the pattern's call has not, and that are no defaults."""
    names, defaults, count = op_argument_names(found.target), op_defaults(found.target), len(wanted.args)
    rest = zip(names[count:], defaults[count:], found.args[count:], strict=False)
    return [name for name, default, value in rest if isinstance(value, Node) or value != default]


def other_arguments(wanted: Node, found: Node) -> str:
    more = [*beyond(wanted, found), *(name for name in found.kwargs if name not in wanted.kwargs)]
    text = f"{where(found)} has other arguments than {target_text(wanted.target)} in the pattern"
    return f"{text}: {', '.join(more)}" if more else text


def is_input(value: Any) -> bool:
    return isinstance(value, Node) and value.op == "placeholder"
