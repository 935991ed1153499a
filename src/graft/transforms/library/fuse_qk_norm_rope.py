"""fuse_qk_norm_rope: the norm of each head goes into the rotary embedding that follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graft.graph.match import Match, Refused
from graft.graph.nodes import calls, is_op, options_of, where
from graft.transforms.registry import TransformRegistry
from graft.transforms.rewriter import Rewriter, Run

aten, ops = torch.ops.aten, torch.ops.graft
HEADS_FIRST = (-3, -2)  # [b, s, h, d] ↔ [b, h, s, d]


@TransformRegistry.register("fuse_qk_norm_rope")
class FuseQKNormRoPE(Rewriter):
    """The norm of each head goes into the rotary embedding that follows it, for queries and keys each.

    before:  %n = graft.rms_norm(%x, %weight, eps);  %t = transpose(%n, -3, -2);  %y = graft.rope(%t, %cos, %sin)
    after:   %t = transpose(%x, -3, -2);  %y = graft.rms_norm_rope(%t, %weight, %cos, %sin, eps)

    Also without the transpose, and with all that the two ops can be told. A norm over the whole projection (OLMo 2)
    is none of each head and stays. Numerics: the reference is the two references one after the other, bitwise; the
    Triton kernel sums the squares in another order (float32) and rounds where they do.

    A walk: the transpose is there or not, and both ops may have been told anything.
    """

    find_first = True
    lacking = "no rotary embedding of the graph reads an RMSNorm"

    def candidates(self, run: Run) -> list[Node]:
        return [node for node in calls(run.gm.graph) if is_op(node, ops.rope.default)]

    def find(self, run: Run, rope: Node) -> Match | None:
        """A rotation of normed heads; Refused where the norm is none of each head."""
        turned = rope.args[0]
        swapped = is_op(turned, aten.transpose.int) and turned.args[1:] == HEADS_FIRST
        norm = turned.args[0] if swapped else turned
        if is_op(norm, aten.reshape.default) and is_op(norm.args[0], ops.rms_norm.default):
            whole = where(norm.args[0])
            raise Refused(norm, f"{whole} norms the whole projection, before {where(norm)} splits it into heads")
        if not is_op(norm, ops.rms_norm.default):
            return None
        dtype = options_of(norm)["dtype"]
        if dtype is not None:
            raise Refused(norm, f"{where(norm)} rounds float32 heads to {dtype}; the op keeps one dtype")
        nodes = (rope, turned, norm) if swapped else (rope, norm)
        tensors = {"x": norm.args[0], "weight": norm.args[1], "cos": rope.args[1], "sin": rope.args[2]}
        return Match("heads first" if swapped else "plain", tensors, {}, nodes, (rope,))

    def write(self, run: Run, match: Match) -> list[Node]:
        rope, norm = match.nodes[0], match.nodes[-1]
        given = options_of(norm) | options_of(rope)
        x: Any = norm.args[0]
        made = []
        if len(match.nodes) > 2:  # the norm is of the last dim alone, so the heads may come first before it
            x = run.editor.call(aten.transpose.int, (x, *HEADS_FIRST), before=rope, like=match.nodes[1])
            made.append(x)
        args = [x, norm.args[1], rope.args[1], rope.args[2], given["eps"]]
        options = [given["offset"], given["cast_last"], given["interleaved"]]
        while options and not options[-1]:  # defaults are left out
            options.pop()
        made.append(run.editor.call(ops.rms_norm_rope.default, (*args, *options), before=rope, like=rope))
        run.editor.replace(rope, made[-1])
        return made
