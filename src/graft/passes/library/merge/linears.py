"""Linears that read one input become one larger linear: shared by merge_qkv, merge_gate_up and merge_gemms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.effects import storage_root, with_views, writers
from graft.ir.nodes import is_op, tensor_of, where
from graft.ir.patterns.match import Match, NearMiss, Refused
from graft.passes.library.merge.stacking import StackedPart, owner_problem, sharer, stacked
from graft.passes.rewriter import Rewriter, RewriteRun
from graft.weights.lazy import LazyWeights

aten = torch.ops.aten


class MergeTransform(Rewriter):
    """Merges the linear layers that the arguments of one call come from.

    A walk: what lies between a layer and that call varies, and the parameters move into one memory.
    """

    merged: ClassVar[str]  # the name of the new layer
    what: ClassVar[str]  # what its parts are called

    def linears(self, call: Node) -> list[Node | None]:
        """The layers that the arguments of `call` come from; None for one that comes from elsewhere."""
        raise NotImplementedError

    def find(self, run: RewriteRun, call: Node) -> Match:
        linears = self.linears(call)
        found = [node for node in linears if node is not None]
        if len(found) < len(linears):
            raise Refused(call, f"{self.what} do not all come from linear layers")
        if len(set(found)) < len(found):
            raise Refused(call, f"{self.what} come from one linear layer already")
        if len({node.args[0] for node in found}) > 1:
            raise Refused(call, f"{self.what} read different inputs")
        for node in found:
            check_member(run.gm, node, self.what)
        check_together(run.gm, found, self.what, run.context.lazy)
        return merge_match(found)

    def check(self, run: RewriteRun, match: Match) -> None:
        """Who else reads or writes a layer was asked of each."""

    def write(self, run: RewriteRun, match: Match) -> list[Node]:
        return merge_linears(run.editor, match.nodes, self.merged, run.context.lazy)

    def reason(self, run: RewriteRun) -> str:
        return run.misses[0].reason if run.misses else self.lacking

    def near_miss(self, run: RewriteRun, candidate: Node, refused: Refused) -> NearMiss:
        found = [node is not None for node in self.linears(candidate)]
        return replace(super().near_miss(run, candidate, refused), matched=sum(found), size=len(found))


def merge_match(linears: Sequence[Node]) -> Match:
    return Match("", {}, {}, tuple(linears), (min(linears),))


def check_member(gm: GraphModule, node: Node, what: str) -> None:
    """Refused where one linear cannot be merged with any other."""
    states = [state for state in (node.args[1], bias_of(node)) if state is not None]
    problem = owner_problem(gm, states, what)
    if problem is not None:
        raise Refused(node, problem)
    shared = next((state for state in states if len(state.users) > 1), None)
    if shared is not None:
        kind = "weight" if shared is node.args[1] else "bias"
        raise Refused(node, f"the {kind} {shared.target} is tied: something else reads it too")
    if tensor_of(node.args[1]).dim() != 2:
        raise Refused(node, f"the weight {node.args[1].target} is no matrix")
    views = with_views([node])
    writer = next(iter(writers(node)), None)
    if writer is not None:
        raise Refused(node, f"{where(node)} is written in place by {where(writer)}")
    if any(user.op == "output" for view in views for user in view.users):
        raise Refused(node, f"{where(node)} is returned, and would be a view of a wider tensor")
    if any(is_op(user, aten.view.default) for view in views for user in view.users):
        raise Refused(node, f"{where(node)} is read by aten.view, which takes no piece of a wider tensor")


def check_together(gm: GraphModule, linears: Sequence[Node], what: str, lazy: LazyWeights | None) -> None:
    """Refused where linears that could each be merged cannot be merged with each other."""
    weights = [node.args[1] for node in linears]
    biases = [bias for node in linears if (bias := bias_of(node)) is not None]
    if len({(tensor_of(state).dtype, tensor_of(state).device) for state in (*weights, *biases)}) > 1:
        raise Refused(linears[0], f"the weights of {what} differ in dtype or device")
    x, first, last = linears[0].args[0], min(linears), max(linears)
    writer = next((w for w in writers(storage_root(x)) if first < w < last), None)
    if writer is not None:
        reason = f"{where(x)} is written in place by {where(writer)} between {where(first)} and {where(last)}"
        raise Refused(first, reason)
    tensors = [gm.get_parameter(str(state.target)) for state in (*weights, *biases)]
    other = sharer(gm, tensors)
    if other is not None:
        raise Refused(first, f"a weight of {what} shares its memory with {other}")
    problem = lazy and lazy.joinable(tensors[: len(weights)])
    if problem:
        raise Refused(first, f"the weights of {what} cannot be joined: {problem}")


def bias_of(linear: Node) -> Node | None:
    return linear.args[2] if len(linear.args) > 2 else None


def merge_linears(editor: Editor, linears: Sequence[Node], name: str, lazy: LazyWeights | None = None) -> list[Node]:
    """One linear over the stacked weights, and a slice of its result for each of the old ones."""
    first = min(linears)
    rows = [tensor_of(node.args[1]).shape[0] for node in linears]
    weight = stack_state(editor, [n.args[1] for n in linears], rows, f"{name}.weight", first, lazy)
    args, biases = [first.args[0], weight], [bias_of(n) for n in linears]
    if any(bias is not None for bias in biases):
        args.append(stack_state(editor, biases, rows, f"{name}.bias", first))
    merged = editor.call(aten.linear.default, args, before=first, like=first)
    made, start = [weight, merged], 0
    for node in linears:
        end = start + tensor_of(node).shape[-1]
        piece = editor.call(aten.slice.Tensor, (merged, -1, start, end), before=first, like=node)
        made.append(piece)
        editor.replace(node, piece)
        start = end
    return made


def stack_state(
    editor: Editor,
    parts: Sequence[Node | None],
    rows: Sequence[int],
    name: str,
    before: Node,
    lazy: LazyWeights | None = None,
) -> Node:
    """The tensors of `parts` below each other in one new parameter; `rows` zeros where there is none."""
    tensors = [editor.gm.get_parameter(str(part.target)) if part is not None else None for part in parts]
    known = [tensor for tensor in tensors if tensor is not None]
    starts = [sum(rows[:index]) for index in range(len(rows))]
    stack = [
        StackedPart(tensor, lambda whole, a=start, n=count: whole[a : a + n])
        for tensor, start, count in zip(tensors, starts, rows, strict=True)
    ]
    whole = stacked((sum(rows), *known[0].shape[1:]), stack, lazy if lazy is not None and known[0] in lazy else None)
    # model.layers.0.self_attn.q_proj.weight → model.layers.0.self_attn.qkv_proj.weight
    first = next(part for part in parts if part is not None)
    prefix = "".join(f"{part}." for part in str(first.target).split(".")[:-2])
    return editor.parameter(f"{prefix}{name}", whole, before=before, like=before)


def producing_linear(node: object, through: frozenset[object]) -> Node | None:
    """Follows the first argument upward through `through` to an aten.linear."""
    while isinstance(node, Node) and node.op == "call_function" and node.target in through:
        node = node.args[0]
    return node if isinstance(node, Node) and is_op(node, aten.linear.default) else None
