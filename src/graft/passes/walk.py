"""Reading a structure out of a graph call by call: what fitted so far, or where it stopped and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch.fx import Node

from graft.ir.io.text import op_text, target_text, value_text
from graft.ir.nodes import is_op, where
from graft.ir.patterns.match import Refused


@dataclass
class GraphWalk:
    """The calls that were recognised so far, in the order they were met."""

    nodes: dict[Node, None] = field(default_factory=dict)

    def call(self, value: Any, reader: Node, *targets: Any) -> Node:
        """`value`, an argument of `reader`, which must call one of `targets`."""
        return self.take(expect(value, reader, *targets))

    def reader(self, node: Node, *targets: Any) -> Node:
        """The one reader of `node` that calls one of `targets`."""
        found = [user for user in node.users if is_op(user, *targets)]
        if len(found) != 1:
            raise Refused(node, f"{where(node)} is read by {readers_text(node)}, expected one {any_of(targets)}")
        return self.take(found[0])

    def piece(self, node: Node, index: int) -> Node | None:
        """The result with that index of a call that has several, where anyone reads it."""
        found = [user for user in node.users if is_op(user, getitem) and user.args[1] == index]
        return self.take(found[0]) if found else None

    def take(self, node: Node) -> Node:
        self.nodes[node] = None
        return node


def expect(value: Any, reader: Node, *targets: Any) -> Node:
    """As `GraphWalk.call`, for a call that others may read too: it is looked at and stays."""
    if not is_op(value, *targets):
        raise Refused(*unexpected(value, reader, any_of(targets)))
    return value


def require(truth: bool, node: Node, reason: str) -> None:
    if not truth:
        raise Refused(node, reason)


def unexpected(value: Any, reader: Node, wanted: str) -> tuple[Node, str]:
    """The node to name, and `%x (module, line) is aten.add, expected aten.mul`."""
    if isinstance(value, Node):
        return value, f"{where(value)} is {op_text(value)}, expected {wanted}"
    return reader, f"{where(reader)} takes {value_text(value)}, expected {wanted}"


def readers_text(node: Node) -> str:
    return ", ".join(dict.fromkeys(op_text(user) for user in node.users)) or "nothing"


def any_of(targets: Iterable[Any]) -> str:
    return " or ".join(target_text(target) for target in targets)
