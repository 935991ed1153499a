"""The proof of a match: both sides are the same operations in the same order, ops of graft as their references.

A reference says what an op computes; a kernel of it may round otherwise. So a match that brings an op is proved as
far as the reference, and its record says so; the kernel that runs is checked numerically, as every match is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from graft.base.errors import GraftError
from graft.ir.edit import fake_mode
from graft.ir.equality.proof import prove_equal
from graft.ir.equality.terms import NotProved, Scope
from graft.ir.evaluate import RecordedCall, Subprogram
from graft.ir.nodes import OpOverload, leaves, output_node, placeholders, val
from graft.ir.trace import trace_function
from graft.ops import OPS
from graft.passes.numeric.execution import RUN_ERRORS, first_line

log = logging.getLogger("graft")
SAME_OPERATIONS = "the same operations in the same order"


def proof_of(old: Subprogram, new: Subprogram) -> str:
    """What was proved, for the record; '' where nothing was."""
    try:
        return proved(old, new)
    except (NotProved, RecursionError, *RUN_ERRORS) as error:  # no fault: it is checked numerically
        log.debug("graft: not proved: %s", error)
        return ""


def proved(old: Subprogram, new: Subprogram) -> str:
    """What was proved; NotProved with the reason where nothing was."""
    references = References()
    prove_equal(old, new, references.opened)
    used = ", ".join(sorted({f"graft::{name}" for name in references.used}))
    return f"{SAME_OPERATIONS}{f', with {used} by reference' if used else ''}"


class References:
    """Calls of graft's ops as graphs of their references, each traced once."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.known: dict[tuple[Scope, Node], tuple[Scope, list[Any]]] = {}

    def opened(self, scope: Scope, node: Node, call: RecordedCall) -> tuple[Scope, list[Any]] | None:
        target = call.target
        if not isinstance(target, OpOverload) or target.namespace != "graft":
            return None
        name = target._schema.name.removeprefix("graft::")
        if name not in OPS:
            raise NotProved(f"graft::{name} has no reference")
        if (scope, node) not in self.known:
            self.known[scope, node] = self.traced(scope, name, call)
        self.used.add(name)
        return self.known[scope, node]

    def traced(self, scope: Scope, name: str, call: RecordedCall) -> tuple[Scope, list[Any]]:
        """The reference on the recorded tensors. One that decides by an open size holds for some sizes alone."""
        outside = [leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Node)]
        given = list(dict.fromkeys(node for node in outside if isinstance(val(node), torch.Tensor)))

        def reference(*tensors: torch.Tensor) -> Any:
            values = dict(zip(given, tensors, strict=True))
            args, kwargs = (map_arg(a, lambda n: values.get(n, val(n))) for a in (call.args, call.kwargs))
            return OPS[name].reference(*args, **kwargs)

        try:
            with no_new_guards(given):
                gm = trace_function(reference, [val(node) for node in given])
        except (*RUN_ERRORS, GraftError) as error:
            raise NotProved(f"the reference of graft::{name} was not traced ({first_line(error)})") from error
        return reference_scope(gm, scope, given, self.opened)


def no_new_guards(nodes: list[Node]) -> AbstractContextManager[Any]:
    modes = [mode for node in nodes if (mode := fake_mode(node)) is not None]
    environment = modes[0].shape_env if modes else None
    if environment is None:
        return nullcontext()
    make: Callable[[], AbstractContextManager[Any]] | None = getattr(environment, "error_on_new_guards", None)
    return refusing_guards(environment) if make is None else make()


@contextmanager
def refusing_guards(environment: Any) -> Iterator[None]:
    """As error_on_new_guards, which torch 2.11 lacks: what it asks before it adds a guard raises."""

    def refuse(expression: Any, value: Any) -> None:
        raise RuntimeError(f"it decides by a size: {expression} == {value}")

    if not hasattr(environment, "_check_frozen"):
        raise NotProved("this version of torch does not tell when a reference decides by a size")
    environment._check_frozen = refuse
    try:
        yield
    finally:
        del environment._check_frozen


def reference_scope(gm: GraphModule, outer: Scope, given: list[Node], expand: Any) -> tuple[Scope, list[Any]]:
    inputs = dict(zip(placeholders(gm.graph), given, strict=True))
    calls = {n: RecordedCall(n.op, n.target, n.args, n.kwargs, i) for i, n in enumerate(gm.graph.nodes)}
    if any(call.op == "get_attr" for call in calls.values()):
        raise NotProved("a reference makes a constant")
    inner = Scope(
        calls.__getitem__,
        lambda _: None,
        lambda node: (outer, inputs[node]) if node in inputs else None,
        expand,
    )
    result = output_node(gm.graph).args[0]
    return inner, list(result) if isinstance(result, (list, tuple)) else [result]
