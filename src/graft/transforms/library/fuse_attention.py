"""fuse_attention: spelled-out attention, and torch's own, become graft::attention."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import NearMiss
from graft.graph.memory import storage_root, with_views
from graft.graph.nodes import calls, is_op, module_path, same_sizes, tensor_of, where
from graft.graph.rules import normalize_arguments
from graft.graph.sizes import SizeEvaluator
from graft.transforms.attention.masks import MaskPlan, emit_mask, plan_masks
from graft.transforms.attention.operands import Step, emit, permutation
from graft.transforms.attention.parts import Attention, Refused
from graft.transforms.attention.products import result_steps
from graft.transforms.attention.read import read_sdpa, read_softmax
from graft.transforms.attention.walk import values_of
from graft.transforms.base import BaseTransform, Context, Outcome, erase_dead, no_match_reason
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

aten, ops = torch.ops.aten, torch.ops.graft
SOFTMAX = (aten.softmax.int, aten._softmax.default)
SDPA = aten.scaled_dot_product_attention.default


@TransformRegistry.register("fuse_attention")
class FuseAttention(BaseTransform):
    """Spelled-out attention and scaled_dot_product_attention become one op that keeps mask, scale, cap and sinks.

    before:  %kt = transpose(repeat_kv(%k), -2, -1);  %s = matmul(%q, %kt);  %m = mul(%s, scale);  %a = add(%m, %mask)
             %p = softmax(%a, -1);  %o = matmul(%p, repeat_kv(%v));  %y = transpose(%o, -3, -2)
    after:   %y = graft.attention(%q, %k, %v, %mask, scale, is_causal, window, softcap, %sinks, nan_rows)

    Scales on q, k or the scores become one; heads repeated for grouped queries are read once; a mask that follows
    from sizes and is causal, perhaps with a window, becomes `is_causal` and `window`; where one stays a tensor, the
    match's note says why. [b, s, d] counts as one head. A mask that the op cannot say leaves the place as it is.
    Numerics: the same attention; a scale moves from q and k to the scores (not in float16), and the kernel may sum in
    another order. Rows that are closed throughout keep what they were.
    """

    def apply(self, gm: GraphModule, context: Context) -> Outcome:  # noqa: ARG002
        anchors = [node for node in calls(gm.graph) if is_op(node, SDPA, *SOFTMAX)]
        if not anchors:
            return Outcome(reason=nothing_to_do(gm))
        evaluator, editor = SizeEvaluator(gm), Editor(gm, self.name)
        masks: dict[str, Node | None] = {}
        records: list[MatchRecord] = []
        misses: list[NearMiss] = []
        for anchor in anchors:
            out = anchor if is_op(anchor, SDPA) else values_of(anchor)
            if out is None:
                continue  # a router's or a sampler's softmax
            try:
                found, plan = decide(evaluator, anchor, out)
            except Refused as refused:
                misses.append(NearMiss(self.name, where(anchor), f"%{anchor.name}", str(refused), 1, 1))
            else:
                records.append(fuse(editor, found, plan, evaluator.mutated, masks))
        if records:
            return Outcome(tuple(records), tuple(misses))
        return Outcome((), tuple(misses), no_match_reason(misses) if misses else nothing_to_do(gm))


def nothing_to_do(gm: GraphModule) -> str:
    if any(is_op(node, ops.attention.default) for node in calls(gm.graph)):
        return "attention is graft::attention already"
    softmaxes = sum(is_op(node, *SOFTMAX) for node in calls(gm.graph))
    if softmaxes:
        return f"the graph has {softmaxes} softmax, none of which feeds a matrix product"
    return "the graph has no softmax and no scaled_dot_product_attention"


def decide(evaluator: SizeEvaluator, anchor: Node, out: Node) -> tuple[Attention, MaskPlan]:
    """What the place is, or Refused; the graph stays as it is."""
    if is_op(anchor, SDPA):
        found = read_sdpa(evaluator.gm, anchor, evaluator.mutated)
    else:
        found = read_softmax(evaluator.gm, anchor, out, evaluator.mutated)
    check_result(out, evaluator.mutated)
    return found, plan_masks(found, evaluator)


def check_result(out: Node, mutated: Collection[Node]) -> None:
    """The op's result lies in memory in another way: nobody may write through its views or read its strides."""
    if storage_root(out) in mutated:
        raise Refused(f"the result {where(out)} is written to in place")
    for user in (user for alias in with_views([out]) for user in alias.users):
        if is_op(user, aten.as_strided.default):
            raise Refused(f"{where(user)} reads the result {where(out)} by its strides")


def fuse(
    editor: Editor, found: Attention, plan: MaskPlan, mutated: Collection[Node], masks: dict[str, Node | None]
) -> MatchRecord:
    """Puts the op where the result was, points the readers at it, and erases what is dead.

    masks: those that were made for layers above, which this one can read too.
    """
    made: list[Node] = []
    inputs = []
    for operand in (found.q, found.k, found.v):
        views = emit(editor, operand.node, operand.steps, found.out, found.anchor)
        inputs.append(views[-1] if views else operand.node)
        made += views
    known = masks.get(plan.tensor)
    if plan.tensor not in masks or mutated or (known is not None and not known < found.out):
        masks[plan.tensor], mask_nodes = emit_mask(editor, plan, found)
        made += mask_nodes
    options = (found.scale, plan.is_causal, plan.window, found.softcap, found.sinks, plan.nan_rows)
    args = (*inputs, masks[plan.tensor], *options)
    attention = editor.call(ops.attention.default, args, before=found.out, like=found.anchor)
    normalize_arguments(attention)
    made.append(attention)
    replaced = [*found.inner, found.out]
    steps = result_steps(found.order, found.folded)
    made += settle(editor, found.out, attention, steps, replaced, cancel=True)
    record = MatchRecord(
        where(found.anchor),
        module_path(found.anchor),
        tuple(dict.fromkeys(node.name for node in replaced)),
        tuple(node.name for node in made),
        "scaled_dot_product_attention" if found.anchor is found.out else "softmax",
        note="; ".join(dict.fromkeys(plan.stays)),
    )
    erase_dead(editor, list(dict.fromkeys(replaced)))
    return record


def settle(
    editor: Editor, old: Node, attention: Node, steps: Sequence[Step], replaced: list[Node], *, cancel: bool
) -> list[Node]:
    """Readers of `old` get `steps` over the op's result; a reader that takes the last step back gets one less."""
    made: list[Node] = []
    for reader in list(old.users):
        if not cancel:
            break
        if undoes(reader, attention, steps):
            made += settle(editor, reader, attention, steps[:-1], replaced, cancel=cancel)
            replaced.append(reader)
    if old.users:
        views = emit(editor, attention, steps, old, old)
        editor.replace(old, views[-1] if views else attention)
        made += views
    return made


def undoes(reader: Node, attention: Node, steps: Sequence[Step]) -> bool:
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
