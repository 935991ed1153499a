"""fuse_attention: spelled-out attention, and torch's own, become graft::attention."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from graft.ir.canonical.rules import normalize_arguments
from graft.ir.edit import Editor
from graft.ir.effects import storage_root, with_views
from graft.ir.nodes import calls, is_op, same_sizes, tensor_of, where
from graft.ir.patterns.match import Match, Refused
from graft.ir.sizes.follow import SizeEvaluator
from graft.passes.base import Context
from graft.passes.library.attention.masks import MaskPlan, emit_mask, plan_masks
from graft.passes.library.attention.matmuls import result_steps
from graft.passes.library.attention.operands import ViewStep, emit, permutation
from graft.passes.library.attention.parts import Attention
from graft.passes.library.attention.read import read_sdpa, read_softmax
from graft.passes.library.attention.walk import values_of
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord
from graft.passes.rewriter import Rewriter, RewriteRun, closest

aten, ops = torch.ops.aten, torch.ops.graft
SOFTMAX = (aten.softmax.int, aten._softmax.default)
SDPA = aten.scaled_dot_product_attention.default


@TransformRegistry.register("fuse_attention")
class FuseAttention(Rewriter):
    """Spelled-out attention and scaled_dot_product_attention become one op that keeps mask, scale, cap and sinks.

    before:  %kt = transpose(repeat_kv(%k), -2, -1);  %s = matmul(%q, %kt);  %m = mul(%s, scale);  %a = add(%m, %mask)
             %p = softmax(%a, -1);  %o = matmul(%p, repeat_kv(%v));  %y = transpose(%o, -3, -2)
    after:   %y = graft.attention(%q, %k, %v, %mask, scale, is_causal, window, softcap, %sinks, nan_rows)

    Scales on q, k or the scores become one; heads repeated for grouped queries are read once; a mask that follows
    from sizes and is causal, perhaps with a window, becomes `is_causal` and `window`; where one stays a tensor, the
    match's note says why. [b, s, d] counts as one head. A mask that the op cannot say leaves the site as it is.
    Numerics: the same attention; a scale moves from q and k to the scores (not in float16), and the kernel may sum in
    another order. Rows that are closed throughout keep what they were.

    A walk: scales, masks, caps and repeated heads come in any number and order, and what a mask is follows from its
    values at many sizes.
    """

    size = 1
    not_kept = dict.fromkeys(
        ("one NaN", "infinite"), "kernels skip masked keys, and torch's own lose a NaN in a query"
    )

    def start(self, gm: GraphModule, context: Context) -> AttentionRun:
        return AttentionRun(gm, context, Editor(gm, self.name))

    def candidates(self, run: AttentionRun) -> list[Node]:
        return [node for node in calls(run.gm.graph) if is_op(node, SDPA, *SOFTMAX)]

    def find(self, run: AttentionRun, anchor: Node) -> Attending | None:
        mutated = run.evaluator.mutated
        if is_op(anchor, SDPA):
            found = read_sdpa(run.gm, anchor, mutated)
        else:
            out = values_of(anchor)
            if out is None:
                return None  # a router's or a sampler's softmax
            found = read_softmax(run.gm, anchor, out, mutated)
        check_result(found.out, mutated)
        nodes, plan = (*found.inner, found.out), plan_masks(found, run.evaluator)
        spelling = "scaled_dot_product_attention" if found.anchor is found.out else "softmax"
        return Attending(spelling, {}, {}, nodes, (found.out,), found, plan)

    def check(self, run: AttentionRun, match: Attending) -> None:
        """Readers and writers were looked at on the way: a mask is read higher up than the matmuls are."""

    def write(self, run: AttentionRun, match: Attending) -> list[Node]:
        """Puts the op where the result was, and points the readers at it."""
        editor, found, plan = run.editor, match.found, match.plan
        made, inputs = [], []
        for operand in (found.q, found.k, found.v):
            views = emit(editor, operand.node, operand.steps, found.out, found.anchor)
            inputs.append(views[-1] if views else operand.node)
            made += views
        mask, views = run.mask(match)
        options = (found.scale, plan.is_causal, plan.window, found.softcap, found.sinks, plan.nan_rows)
        args = (*inputs, mask, *options)
        attention = editor.call(ops.attention.default, args, before=found.out, like=found.anchor)
        normalize_arguments(attention)
        steps = result_steps(found.order, found.folded)
        return [*made, *views, attention, *settle(editor, found.out, attention, steps)]

    def rewrite(self, run: AttentionRun, match: Attending) -> MatchRecord:
        return replace(super().rewrite(run, match), note="; ".join(dict.fromkeys(match.plan.stays)))

    def reason(self, run: AttentionRun) -> str:
        return closest(run.misses) if run.misses else nothing_to_do(run.gm)


@dataclass(frozen=True)
class Attending(Match):
    found: Attention
    plan: MaskPlan

    @property
    def anchor(self) -> Node:
        return self.found.anchor


@dataclass
class AttentionRun(RewriteRun):
    """masks: those that were made for layers above, which layers below can read too."""

    masks: dict[str, Node | None] = field(default_factory=dict)

    @cached_property
    def evaluator(self) -> SizeEvaluator:
        return SizeEvaluator(self.gm)

    def mask(self, match: Attending) -> tuple[Node | None, list[Node]]:
        """The mask that the op reads, and what had to be made for it."""
        plan, made = match.plan, []
        known = self.masks.get(plan.tensor)
        late = known is not None and not known < match.found.out
        if plan.tensor not in self.masks or self.evaluator.mutated or late:
            self.masks[plan.tensor], made = emit_mask(self.editor, plan, match.found)
        return self.masks[plan.tensor], made


def nothing_to_do(gm: GraphModule) -> str:
    if any(is_op(node, ops.attention.default) for node in calls(gm.graph)):
        return "attention is graft::attention already"
    softmaxes = sum(is_op(node, *SOFTMAX) for node in calls(gm.graph))
    if softmaxes:
        return f"the graph has {softmaxes} softmax, none of which feeds a matmul"
    return "the graph has no softmax and no scaled_dot_product_attention"


def check_result(out: Node, mutated: Collection[Node]) -> None:
    """The op's result lies in memory in another way: nobody may write through its views or read its strides."""
    if storage_root(out) in mutated:
        raise Refused(out, f"the result {where(out)} is written to in place")
    for user in (user for alias in with_views([out]) for user in alias.users):
        if is_op(user, aten.as_strided.default):
            raise Refused(user, f"{where(user)} reads the result {where(out)} by its strides")


def settle(editor: Editor, old: Node, attention: Node, steps: Sequence[ViewStep]) -> list[Node]:
    """Readers of `old` get `steps` over the op's result; a reader that takes the last step back gets one less."""
    made: list[Node] = []
    for reader in list(old.users):
        if undoes(reader, attention, steps):
            made += settle(editor, reader, attention, steps[:-1])
            editor.erase(reader)
    if old.users:
        views = emit(editor, attention, steps, old, old)
        editor.replace(old, views[-1] if views else attention)
        made += views
    return made


def undoes(reader: Node, attention: Node, steps: Sequence[ViewStep]) -> bool:
    """Whether `reader` is what lay below the last step; what the op gives is contiguous."""
    if not steps:
        return is_op(reader, aten.contiguous.default) and not reader.kwargs
    target, args = steps[-1]
    if target is aten.permute.default:
        back = permutation(reader)
        return back is not None and tuple(args[0][i] for i in back) == tuple(range(len(back)))
    if target is aten.reshape.default and is_op(reader, aten.reshape.default) and len(steps) == 2:
        b, s, h, d = tensor_of(attention).shape
        return same_sizes(tensor_of(reader).shape, (b, h, s, d))
    return False
