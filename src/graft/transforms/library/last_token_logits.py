"""last_token_logits: logits for the tokens that are sampled from, and no others."""

from __future__ import annotations

from operator import getitem

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.nodes import is_op, module_path, options_of, output_node, where
from graft.kvcache.layout import declare
from graft.transforms.base import BaseTransform, Context, Outcome
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

aten, ops = torch.ops.aten, torch.ops.graft
NORMS = (ops.rms_norm.default, ops.layer_norm.default)  # of each row by itself
# what models do to logits: each row by itself
ROW_WISE = frozenset(
    {
        aten.to.dtype,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.tanh.default,
        aten.slice.Tensor,
        aten.reshape.default,
    }
)


@TransformRegistry.register("last_token_logits")
class LastTokenLogits(BaseTransform):
    """The output projection runs on chosen tokens alone: a new input `logits_indices` says which.

    before:  %logits = linear(%hidden, %lm_head)                              [b, s, vocab]
    after:   %rows = index_select(%hidden, -2, %logits_indices)               [b, n, d]
             %logits = linear(%rows, %lm_head)                                [b, n, vocab]

    Where %hidden is a norm that nothing else reads, the rows are chosen before it. One that is fused with a sum is
    taken apart, so that a single choice is enough and the sum can go into the product before it:

    before:  %hidden, _ = graft.add_rms_norm(%x, %r, %g, eps)
    after:   %rows = index_select(add(%x, %r), -2, %logits_indices);  %hidden = graft.rms_norm(%rows, %g, eps)

    Numerics: the same rows, the same products; the matrix product may sum in another order for another row count.
    """

    unprovable = "it computes the logits of chosen tokens alone, so the results have other shapes"

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        if context.route != "decoder":
            return Outcome(
                reason="the module is not run by graft's engine, so all its outputs are kept", skipped=True
            )
        (logits,) = output_node(gm.graph).args[0]
        chain: list[Node] = []
        node = logits
        while isinstance(node, Node) and node.op == "call_function" and node.target in ROW_WISE:
            chain.append(node)
            node = node.args[0]
        if not is_op(node, aten.linear.default):
            return Outcome(reason=f"the logits do not come from a linear layer but from {where(node)}")
        editor = Editor(gm, self.name)
        hidden = node.args[0]
        index = declare(editor, hidden, ("logits_indices",))["logits_indices"]
        made, replaced = choose_rows(editor, hidden, index, node)
        node.args = (made[-1], *node.args[1:])
        for changed in (node, *reversed(chain)):
            changed.meta = {**changed.meta, "val": editor.abstract(changed)}
        names = tuple(new.name for new in (*made, index))
        return Outcome((MatchRecord(where(node), module_path(node), tuple(old.name for old in replaced), names),))


def choose_rows(editor: Editor, hidden: Node, index: Node, reader: Node) -> tuple[list[Node], list[Node]]:
    """What was made, the chosen rows of `hidden` last, and what it stands for. `reader` reads them."""

    def select(value: Node) -> Node:
        return editor.call(aten.index_select.default, (value, -2, index), before=reader, like=reader)

    norm = hidden.args[0] if is_op(hidden, getitem) and hidden.args[1] == 0 else hidden
    if list(hidden.users) != [reader] or not (is_op(norm, *NORMS) or is_lone_sum(norm)):
        return [select(hidden)], []
    if is_op(norm, *NORMS):
        rows = select(norm.args[0])
        normed = editor.call(norm.target, (rows, *norm.args[1:]), norm.kwargs, before=reader, like=norm)
        return [rows, normed], [norm]
    total = editor.call(aten.add.Tensor, norm.args[:2], before=norm, like=norm)
    rows = select(total)
    normed = editor.call(ops.rms_norm.default, (rows, *norm.args[2:]), norm.kwargs, before=reader, like=norm)
    return [total, rows, normed], [norm, hidden]


def is_lone_sum(node: Node) -> bool:
    """A norm fused with a sum, of which only the normed result is read."""
    return is_op(node, ops.add_rms_norm.default) and len(node.users) == 1 and not options_of(node)["wide"]
