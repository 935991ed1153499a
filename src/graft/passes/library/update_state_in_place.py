"""update_state_in_place: a state tensor that is updated in a copy and copied back is updated in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graft.ir.checks import check_between
from graft.ir.edit import Editor
from graft.ir.effects import alias_sources, is_maybe_view, mutated_args, nodes_in, with_views, written_value
from graft.ir.nodes import is_op, same_shape, same_sizes, tensor_val, where
from graft.ir.patterns.match import Match, NearMiss, Refused
from graft.memory.hazards import Access, accesses
from graft.passes.base import Context
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun

aten = torch.ops.aten

# the same call, in place
IN_PLACE: dict[Any, Any] = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_reduce.default: aten.index_reduce_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.reduce: aten.scatter_.reduce,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
# a copy into a view: `f(x, src, …)` writes `src` to `view(x, …)`
THROUGH_VIEW: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


@TransformRegistry.register("update_state_in_place")
class UpdateStateInPlace(Rewriter):
    """A state tensor that is updated in a copy, which is then copied back, is updated in place.

    before:  %n = aten.index_copy(%cache, 2, %pos, %k);  … %n is read …;  aten.copy_(%cache, %n)
    after:   %n = aten.index_copy_(%cache, 2, %pos, %k);  … %n is read …

    before:  %n = aten.slice_scatter(%cache, %k, 2, 4, 5);  … %n is read …;  aten.copy_(%cache, %n)
    after:   %v = aten.slice(%cache, 2, 4, 5);  aten.copy_(%v, %k);  … %cache is read …

    Also for select_scatter, diagonal_scatter, index_put, index_add, index_fill, index_reduce, scatter, scatter_add,
    scatter_reduce, masked_fill, masked_scatter, and for chains of them. Two passes over the whole tensor go. A graph
    without the copy back stays as it is: its caller's tensors are not written.

    Left alone, with the reason: the old value is read after the update, something else writes in between, a value is
    checked in between (the write would come before the check), the new value comes from the same memory, or it is
    returned: the caller would hold the state itself, and the next step would change what it holds. (`self.c = new;
    return self.c` returns the state in eager mode too, but once captured it cannot be told from a value that is not
    to change.)

    Numerics: bitwise; the same call writes the same values.

    A walk: what decides is who else sees the memory and when, not how a site is spelled.
    """

    uncheckable = "the calls and their operands stay the same; who sees the memory, and when, is checked by its order"

    lacking = "the graph copies no updated state back"

    def start(self, gm: GraphModule, context: Context) -> StateRun:
        return StateRun(gm, context, Editor(gm, self.name))

    def candidates(self, run: StateRun) -> Iterator[UpdateStep]:
        copies = [node for node in run.gm.graph.nodes if is_op(node, aten.copy_.default)]
        for copy in copies:  # each as the ones before it left the graph
            update = read_update(copy)
            if update is not None:
                yield from (UpdateStep(update, step) for step in update.steps)

    def find(self, run: StateRun, candidate: UpdateStep) -> StepMatch | None:
        """One step; the first decides for all of them."""
        update, step = candidate.update, candidate.step
        if step is update.steps[0]:
            run.memory.check(update)
            run.safe.add(update.copy)
        last = step is update.steps[-1]
        nodes = (step, update.copy) if last else (step,)
        return StepMatch("", {}, {}, nodes, (step,), update) if update.copy in run.safe else None

    def check(self, run: StateRun, match: StepMatch) -> None:
        """Everybody who sees the state was looked at."""

    def write(self, run: StateRun, match: StepMatch) -> list[Node]:
        """The last step also stands in for the copy."""
        step, update, editor = match.anchor, match.update, run.editor
        base = step.args[0]
        if step.target in IN_PLACE:
            made = [editor.call(IN_PLACE[step.target], step.args, dict(step.kwargs), before=step, like=step)]
            new = made[0]
        else:
            view = THROUGH_VIEW[step.target]
            made = [editor.call(view, (base, *step.args[2:]), dict(step.kwargs), before=step, like=step)]
            made.append(editor.call(aten.copy_.default, (made[0], step.args[1]), before=step, like=step))
            new = base
        if update.copy in match.nodes:
            run.memory.changed(update)
            editor.replace(update.copy, new)
        editor.replace(step, new)
        return made

    def near_miss(self, run: StateRun, candidate: UpdateStep, refused: Refused) -> NearMiss:
        size = len(candidate.update.steps) + 1
        return replace(super().near_miss(run, candidate, refused), matched=size, size=size)


@dataclass(frozen=True)
class Update:
    """`steps`, each an update of the one before, start at `state`; `copy` puts the last of them back."""

    state: Node
    steps: tuple[Node, ...]
    copy: Node


@dataclass(frozen=True)
class UpdateStep:
    """One step of an update, told at the copy back."""

    update: Update
    step: Node

    @property
    def anchor(self) -> Node:
        return self.update.copy


@dataclass(frozen=True)
class StepMatch(Match):
    update: Update


@dataclass
class StateRun(RewriteRun):
    safe: set[Node] = field(default_factory=set)  # the copies back whose steps may be done in place

    @cached_property
    def memory(self) -> StateMemory:
        return StateMemory(self.gm.graph)


def read_update(copy: Node) -> Update | None:
    state, value = copy.args[:2]
    steps: list[Node] = []
    while is_op(value, *IN_PLACE, *THROUGH_VIEW):
        steps.insert(0, value)
        value = value.args[0]
        if same_place(value, state):
            return Update(state, tuple(steps), copy)
    return None


def same_place(left: object, right: object) -> bool:
    """The two are one tensor, or the same view of one."""
    if not isinstance(left, Node) or not isinstance(right, Node):
        return left == right
    left, right = written_value(left), written_value(right)
    if left is right:
        return True
    if left.op == right.op == "get_attr":
        return left.target == right.target
    if left.op != "call_function" or left.target is not right.target or is_maybe_view(left):
        return False
    if not alias_sources(left) or left.args[1:] != right.args[1:] or left.kwargs != right.kwargs:
        return False
    return same_place(left.args[0], right.args[0])


@dataclass
class StateMemory:
    """Who touches the written memory of a graph. Read again when an update has changed that."""

    graph: Graph
    groups: dict[int, list[Access]] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)

    def read(self) -> None:
        self.groups, self.stale = {}, set()
        for access in accesses(self.graph):
            self.groups.setdefault(access.group, []).append(access)

    def changed(self, update: Update) -> None:
        """Other updates of the same memory must be looked at anew."""
        self.stale.add(self.group_of(update.copy))

    def group_of(self, copy: Node) -> int:
        return next(group for group, found in self.groups.items() if any(a.node is copy and a.writes for a in found))

    def check(self, update: Update) -> None:
        """Refused where the steps may not be done in place."""
        if not self.groups or self.group_of(update.copy) in self.stale:
            self.read()
        touched = self.groups[self.group_of(update.copy)]
        check_kinds(update)
        check_interval(update, touched)
        check_sources(update, touched)
        check_late_readers(update, touched)


def check_interval(update: Update, touched: list[Access]) -> None:
    """From the first step to the copy nobody else may see or change the state."""
    state, first, last = update.state.name, update.steps[0], update.copy
    if (check := check_between(first, last)) is not None:
        raise Refused(last, f"{where(check)} checks a value between {where(first)} and the copy back")
    for access in touched:
        node = access.node
        if node not in (*update.steps, last) and first < node < last:
            if access.writes:
                raise Refused(last, f"{where(node)} writes %{state} between {where(first)} and the copy back")
            raise Refused(last, f"the old value of %{state} is read by {where(node)} after the update")


def check_late_readers(update: Update, touched: list[Access]) -> None:
    """Each new value lives until the next write of the state, and in the graph alone."""
    state = update.state.name
    later = [access.node for access in touched if access.writes and update.copy < access.node]
    for step, following in zip(update.steps, (*update.steps[1:], None), strict=True):
        end = following or min(later, default=None)
        for alias in with_views([step]):
            for user in alias.users:
                if user.op == "output":
                    raise Refused(update.copy, f"%{alias.name} is returned, and the next step would change it")
                elif alias in mutated_args(user):
                    raise Refused(update.copy, f"{where(user)} writes to the updated value %{alias.name}")
                elif is_op(user, aten.as_strided.default):
                    raise Refused(update.copy, f"{where(user)} reads %{alias.name} by its address")
                elif end is not None and user is not following and not user < end:
                    raise Refused(
                        update.copy, f"%{alias.name} is read by {where(user)} after %{state} is written again"
                    )


def check_kinds(update: Update) -> None:
    state = tensor_val(update.state)
    for step in update.steps:
        value = tensor_val(step)
        if state is None or value is None or not same_shape(state, value) or state.dtype != value.dtype:
            raise Refused(update.copy, f"%{step.name} has another shape or dtype than %{update.state.name}")
        if state.device != value.device:
            raise Refused(update.copy, f"%{step.name} is on {value.device}, %{update.state.name} on {state.device}")
        if not same_sizes(state.stride(), value.stride()):
            raise Refused(update.copy, f"%{step.name} lies in memory in another way than %{update.state.name}")


def check_sources(update: Update, touched: list[Access]) -> None:
    """What a step reads beside the state may not lie in memory that it would write."""
    inside = set(with_views(update.steps)) | set(with_views({access.owner for access in touched}))
    for step in update.steps:
        for source in nodes_in([*step.args[1:], *step.kwargs.values()]):
            if source in inside:
                raise Refused(
                    update.copy, f"{where(step)} reads %{source.name}, which shares memory with %{update.state.name}"
                )
