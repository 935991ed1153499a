"""last_token_logits: logits for the tokens that are sampled from, and no others."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor, fake_mode, symbolic_sizes
from graft.graph.nodes import is_op, module_path, output_node, tensor_of, where
from graft.transforms.base import BaseTransform, Context, Outcome
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

aten = torch.ops.aten
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
    """The output projection runs on chosen tokens alone: a new input `logits_index` says which.

    before:  %logits = linear(%hidden, %lm_head)                              [b, s, vocab]
    after:   %rows = index_select(%hidden, -2, %logits_index)                 [b, n, d]
             %logits = linear(%rows, %lm_head)                                [b, n, vocab]

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
        (count,) = symbolic_sizes(hidden, 1)
        with fake_mode(hidden):
            example = torch.empty(count, dtype=torch.int64, device=tensor_of(hidden).device)
        index = editor.placeholder("logits_index", example)
        rows = editor.call(aten.index_select.default, (hidden, -2, index), before=node, like=node)
        node.args = (rows, *node.args[1:])
        for changed in (node, *reversed(chain)):
            changed.meta = {**changed.meta, "val": editor.abstract(changed)}
        record = MatchRecord(where(node), module_path(node), (), (rows.name, index.name))
        return Outcome((record,))
