"""last_token_logits: logits for the tokens that are sampled from, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.nodes import is_op, options_of, output_node, where
from graft.ir.patterns.match import Match, Refused
from graft.ops.layout import declare
from graft.passes.base import Context, TransformConfig
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun

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
        ops.all_gather.default,  # of a row that several ranks have parts of
    }
)


@dataclass(frozen=True)
class LastTokenConfig(TransformConfig):
    """output: `logits`, or `hidden`, what the output projection would read: for embeddings, which have no use for
    it."""

    output: Literal["logits", "hidden"] = "logits"


@TransformRegistry.register("last_token_logits")
class LastTokenLogits(Rewriter):
    """The output projection runs on chosen tokens alone: a new input `logits_indices` says which.

    before:  %logits = linear(%hidden, %lm_head)                              [b, s, vocab]
    after:   %rows = index_select(%hidden, -2, %logits_indices)               [b, n, d]
             %logits = linear(%rows, %lm_head)                                [b, n, vocab]

    Where %hidden is a norm that nothing else reads, the rows are chosen before it. One that is fused with a sum is
    taken apart, so that a single choice is enough and the sum can go into the GEMM before it:

    before:  %hidden, _ = graft.add_rms_norm(%x, %r, %g, eps)
    after:   %rows = index_select(add(%x, %r), -2, %logits_indices);  %hidden = graft.rms_norm(%rows, %g, eps)

    With `output: hidden` (`--runner pooling`) the projection and what is done to logits go, and the rows are the
    graph's result:

    after:   %hidden = graft.rms_norm(%rows, %g, eps)                         [b, n, d]

    Numerics: the same rows, the same sums; the GEMM may sum in another order for another row count.

    A walk: its result has another shape, and so has all that is computed from it; a pattern's result keeps its shape,
    or what reads it would be wrong.
    """

    uncheckable = "it computes the logits of chosen tokens alone, so the results have other shapes"

    lacking = "the graph returns no logits"
    config: LastTokenConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return LastTokenConfig

    def applies(self, gm: GraphModule, context: Context) -> str | None:
        decodes = context.route == "decoder"
        return None if decodes else "the module is not run by graft's engine, so all its outputs are kept"

    def candidates(self, run: RewriteRun) -> list[Node]:
        return list(output_node(run.gm.graph).args[0])

    def find(self, run: RewriteRun, logits: Node) -> LogitsProjection:
        chain: list[Node] = []
        node = logits
        while isinstance(node, Node) and node.op == "call_function" and node.target in ROW_WISE:
            chain.append(node)
            node = node.args[0]
        if not is_op(node, aten.linear.default):
            raise Refused(logits, f"the logits do not come from a linear layer but from {where(node)}")
        return LogitsProjection("", {}, {}, norm_before(node), (node,), tuple(reversed(chain)))

    def check(self, run: RewriteRun, match: LogitsProjection) -> None:
        """`find` takes a norm that nothing else reads; the readers of the logits are told their new shape."""

    def write(self, run: RewriteRun, match: LogitsProjection) -> list[Node]:
        linear, editor = match.anchor, run.editor
        hidden = linear.args[0]
        index = declare(editor, hidden, ("logits_indices",))["logits_indices"]
        made = choose_rows(editor, match.nodes, index, linear)
        if self.config.output == "hidden":
            output = output_node(run.gm.graph)
            output.args = ((made[-1],),)
            run.context.notes.append(f"{where(linear)} is left out: the graph gives what it would read")
            return [*made, index]
        linear.args = (made[-1], *linear.args[1:])
        for changed in (linear, *match.chain):
            changed.meta = {**changed.meta, "val": editor.abstract(changed)}
        return [*made, index]

    def reason(self, run: RewriteRun) -> str:
        return run.misses[0].reason if run.misses else self.lacking


@dataclass(frozen=True)
class LogitsProjection(Match):
    """The output projection; `nodes` is the norm before it, as far as it goes too."""

    chain: tuple[Node, ...]  # what is done to the logits


def norm_before(linear: Node) -> tuple[Node, ...]:
    """The norm that `linear` reads, and its result where it has two; () where the rows are chosen after it."""
    hidden = linear.args[0]
    norm = hidden.args[0] if is_op(hidden, getitem) and hidden.args[1] == 0 else hidden
    if list(hidden.users) != [linear] or not (is_row_wise(norm) or is_lone_sum(norm)):
        return ()
    return (norm,) if norm is hidden else (norm, hidden)


def choose_rows(editor: Editor, norm: Sequence[Node], index: Node, reader: Node) -> list[Node]:
    """What was made, the chosen rows that `reader` reads last."""

    def select(value: Node) -> Node:
        return editor.call(aten.index_select.default, (value, -2, index), before=reader, like=reader)

    if not norm:
        return [select(reader.args[0])]
    old = norm[0]
    if is_op(old, *NORMS):
        rows = select(old.args[0])
        return [rows, editor.call(old.target, (rows, *old.args[1:]), old.kwargs, before=reader, like=old)]
    total = editor.call(aten.add.Tensor, old.args[:2], before=old, like=old)
    rows = select(total)
    normed = editor.call(ops.rms_norm.default, (rows, *old.args[2:]), old.kwargs, before=reader, like=old)
    return [total, rows, normed]


def is_row_wise(node: Node) -> bool:
    """A norm of each row by itself; a residual that it adds would have to be chosen from too."""
    return is_op(node, *NORMS) and options_of(node).get("residual") is None


def is_lone_sum(node: Node) -> bool:
    """A norm fused with a sum, of which only the normed result is read."""
    return is_op(node, ops.add_rms_norm.default) and len(node.users) == 1 and not options_of(node)["wide"]
