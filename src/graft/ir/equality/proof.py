"""Whether two pieces of a graph give the same bits, whatever the values and the open sizes are.

Proved means: at the recorded layouts, every element of every result is made by the same operations on the same
elements of the inputs and weights, in the same order but for the two operands of a sum or a product (terms.py); the
results have the same sizes, dtype, device and strides, and lie in the same memory or in memory of their own, alike.
NaN counts as NaN. Nothing is proved of a graph that writes into memory, nor of random or complex numbers. What was
not proved may be right; it is checked numerically, and so is what was proved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from operator import getitem
from typing import Any

from torch.fx import Node

from graft.ir.effects import effects, is_mutating, nodes_in
from graft.ir.equality.indices import sizes_of
from graft.ir.equality.terms import NotProved, Scope, Terms, layout_text, named
from graft.ir.evaluate import RecordedCall, Subprogram
from graft.ir.nodes import tensor_of

Expand = Callable[[Scope, Node, RecordedCall], tuple[Scope, list[Any]] | None]


def prove_equal(old: Subprogram, new: Subprogram, expand: Expand = lambda *_: None) -> None:
    """Raises NotProved with the reason. expand: an op by what it is made of."""
    for piece in (old, new):
        if writer := next((node for node in piece.calls if is_mutating(node)), None):
            raise NotProved(f"the graph writes into memory (%{writer.name})")
    terms = Terms()
    scopes = [scope_of(piece, expand) for piece in (old, new)]
    for first, second in zip(old.outputs, new.outputs, strict=True):
        check_kinds(first, second)
        left, right = (terms.tensor(scope, node) for scope, node in zip(scopes, (first, second), strict=True))
        if left != right:
            raise NotProved(f"%{second.name} is made by other operations than %{first.name}")
    if memory_of(old) != memory_of(new):
        raise NotProved("the results share memory in another way")


def scope_of(piece: Subprogram, expand: Expand) -> Scope:
    def leaf(node: Node) -> Hashable | None:
        shared, call = piece.boundary(node), piece.calls[node]
        if shared is not None:
            return shared
        return id(piece.attributes(str(call.target))) if call.op == "get_attr" else None

    return Scope(piece.calls.__getitem__, leaf, expand=expand)


def check_kinds(first: Node, second: Node) -> None:
    was, now = tensor_of(first), tensor_of(second)
    if was.dtype is not now.dtype or was.device != now.device or sizes_of(was.shape) != sizes_of(now.shape):
        raise NotProved(f"%{second.name} has another shape, dtype or device than %{first.name}")
    if layout_text(was) != layout_text(now):
        raise NotProved(f"%{second.name} lies in memory otherwise than %{first.name}")


def memory_of(piece: Subprogram) -> list[Hashable]:
    """Of each result: whose memory it is in, and whether that is certain; fresh memory that several share by number.
    Where a result alone has fresh memory, it does not matter which copy it is."""
    fresh: dict[Node, int] = {}
    roots = [memory_root(piece, node, fresh) for node in piece.outputs]
    counts = Counter(root[:2] for root in roots)
    return [root if counts[root[:2]] > 1 or root[0] != "fresh" else "fresh" for root in roots]


def memory_root(piece: Subprogram, node: Node, fresh: dict[Node, int]) -> tuple[str, Hashable, bool]:
    certain = True
    while True:
        shared, call = piece.boundary(node), piece.calls[node]
        if shared is not None:
            return "input", shared, certain
        if call.op == "get_attr":
            return "weight", id(piece.attributes(str(call.target))), certain
        sources = sources_of(piece, node, call)
        if not sources:
            return "fresh", fresh.setdefault(node, len(fresh)), certain
        certain = certain and (not effects(call.target).maybe_view or is_input_itself(node, sources[0], call))
        node = sources[0]


def sources_of(piece: Subprogram, node: Node, call: RecordedCall) -> Sequence[Node]:
    """The arguments whose memory a result may be in."""
    if call.target is getitem:
        results = effects(piece.calls[call.args[0]].target).results
        if any(results):
            raise NotProved(f"%{node.name} is one of several views")
        return ()
    results: Any = effects(call.target).results
    found = nodes_in([position.of(call) for position in results[0]]) if len(results) == 1 else []
    if found and effects(call.target).maybe_view and tensor_of(found[0]).dtype is not tensor_of(node).dtype:
        return ()  # a cast that changes the dtype copies
    return found[:1]


def is_input_itself(node: Node, source: Node, call: RecordedCall) -> bool:
    """A call that may copy, and does not: nothing about the tensor is to change."""
    given, made = tensor_of(source), tensor_of(node)
    alike = given.dtype is made.dtype and sizes_of(given.shape) == sizes_of(made.shape)
    return alike and layout_text(given) == layout_text(made) and named(call).get("copy") is not True
