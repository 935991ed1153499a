"""fuse_qk_norm_rope: the norm of each head goes into the rotary embedding that follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import Match, NearMiss, check_outside
from graft.graph.memory import mutated_roots
from graft.graph.nodes import calls, is_op, module_path, options_of, where
from graft.transforms.base import BaseTransform, Context, Outcome, erase_dead, no_match_reason
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

aten, ops = torch.ops.aten, torch.ops.graft
HEADS_FIRST = (-3, -2)  # [b, s, h, d] ↔ [b, h, s, d]


@TransformRegistry.register("fuse_qk_norm_rope")
class FuseQKNormRoPE(BaseTransform):
    """The norm of each head goes into the rotary embedding that follows it, for queries and keys each.

    before:  %n = graft.rms_norm(%x, %weight, eps);  %t = transpose(%n, -3, -2);  %y = graft.rope(%t, %cos, %sin)
    after:   %t = transpose(%x, -3, -2);  %y = graft.rms_norm_rope(%t, %weight, %cos, %sin, eps)

    Also without the transpose, and with all that the two ops can be told. A norm over the whole projection (OLMo 2)
    is none of each head and stays. Numerics: the reference is the two references one after the other, bitwise; the
    Triton kernel sums the squares in another order (float32) and rounds where they do.
    """

    def apply(self, gm: GraphModule, context: Context) -> Outcome:  # noqa: ARG002
        order = {node: index for index, node in enumerate(gm.graph.nodes)}
        mutated = mutated_roots(gm.graph)
        matches: list[Match] = []
        misses: list[NearMiss] = []
        for rope in calls(gm.graph):
            found = normed_rope(rope) if is_op(rope, ops.rope.default) else None
            if isinstance(found, Match):
                found = check_outside(found, order, mutated)
            if isinstance(found, Match):
                matches.append(found)
            elif found is not None:
                at, reason = found
                misses.append(NearMiss(self.name, where(rope), f"%{(at or rope).name}", reason, 1, 2))
        editor = Editor(gm, self.name)
        records = tuple(write(editor, match) for match in matches)
        reason = no_match_reason(misses) if misses else "no rotary embedding of the graph reads an RMSNorm"
        return Outcome(records, tuple(misses), "" if records else reason)


def normed_rope(rope: Node) -> Match | tuple[Node | None, str] | None:
    """A rotation of normed heads; why the norm is none of each head; or None where there is no norm."""
    turned = rope.args[0]
    swapped = is_op(turned, aten.transpose.int) and turned.args[1:] == HEADS_FIRST
    norm = turned.args[0] if swapped else turned
    if is_op(norm, ops.rms_norm.default) and options_of(norm)["dtype"] is not None:
        return norm, f"{where(norm)} rounds float32 heads to {options_of(norm)['dtype']}; the op keeps one dtype"
    if is_op(norm, ops.rms_norm.default):
        nodes = (rope, turned, norm) if swapped else (rope, norm)
        tensors = {"x": norm.args[0], "weight": norm.args[1], "cos": rope.args[1], "sin": rope.args[2]}
        return Match("heads first" if swapped else "plain", tensors, {}, nodes, (rope,))
    if is_op(norm, aten.reshape.default) and is_op(norm.args[0], ops.rms_norm.default):
        whole = where(norm.args[0])
        return norm, f"{whole} norms the whole projection, before {where(norm)} splits it into heads"
    return None


def write(editor: Editor, match: Match) -> MatchRecord:
    rope, norm = match.nodes[0], match.nodes[-1]
    given = options_of(norm) | options_of(rope)
    x: Any = norm.args[0]
    made = []
    if len(match.nodes) > 2:  # the norm is of the last dim alone, so the heads may come first before it
        x = editor.call(aten.transpose.int, (x, *HEADS_FIRST), before=rope, like=match.nodes[1])
        made.append(x.name)
    args = [x, norm.args[1], rope.args[1], rope.args[2], given["eps"]]
    options = [given["offset"], given["cast_last"], given["interleaved"]]
    while options and not options[-1]:  # defaults are left out
        options.pop()
    fused = editor.call(ops.rms_norm_rope.default, (*args, *options), before=rope, like=rope)
    replaced = tuple(node.name for node in match.nodes)
    record = MatchRecord(where(rope), module_path(rope), replaced, (*made, fused.name), match.pattern)
    editor.replace(rope, fused)
    erase_dead(editor, match.nodes)
    return record
