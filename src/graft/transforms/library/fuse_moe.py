"""fuse_moe: the routing and the experts of a mixture become two ops."""

from __future__ import annotations

from operator import getitem

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor
from graft.graph.match import NearMiss, second_reader
from graft.graph.memory import storage_root, writers
from graft.graph.nodes import calls, is_op, is_weight, module_path, tensor_of, where
from graft.transforms.base import BaseTransform, Context, Outcome, erase_dead, no_match_reason
from graft.transforms.moe_experts import Experts, read_experts
from graft.transforms.moe_routing import Routing, read_routing
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord
from graft.transforms.walk import NoFit, Walk, require

aten, ops = torch.ops.aten, torch.ops.graft
SIZE = 37  # calls of the grouped form, from the softmax to the sum over experts


@TransformRegistry.register("fuse_moe")
class FuseMoE(BaseTransform):
    """The routing and the experts of a mixture become two ops; both are found, or neither is changed.

    before:  %p = softmax(%logits, -1, float32);  %t = topk(%p, k);  %v = getitem(%t, 0);  %ids = getitem(%t, 1)
             %s = sum(%v, [-1], True);  %weights = div_(%v, %s)
             …  %o = sort(reshape(%ids, [-1]));  %g = _grouped_mm(%x[%o / k], transpose(%gate_up), %ends)
             %h = mul(silu(slice(%g, -1, 0, f)), slice(%g, -1, f, 2f));  %d = _grouped_mm(%h, transpose(%down), %ends)
             …  %y = sum(reshape(%d * %weights, [n, k, d]), [-2])
    after:   %r = graft.moe_route(%logits, k, True, float32);  %weights = getitem(%r, 0);  %ids = getitem(%r, 1)
             %y = graft.moe_experts(%x, %weights, %ids, %gate_up, %down, "silu")

    Also without the division, with weights cast to the model's dtype, with topk before softmax (GraniteMoe), and with
    Hugging Face's `batched_mm` experts. Logits, weights and ids may have other readers. Numerics: bitwise with the
    reference for `grouped_mm` experts; `batched_mm` and the GPU kernels sum products in another order. Of equal
    logits the Triton routing takes the first, as CUDA's topk does.
    """

    def apply(self, gm: GraphModule, context: Context) -> Outcome:  # noqa: ARG002
        anchors = [node for node in calls(gm.graph) if is_op(node, aten.topk.default)]
        if not anchors:
            return Outcome(reason=no_match_reason((), ["aten.topk"]))
        editor = Editor(gm, self.name)
        records, misses = [], []
        for topk in anchors:
            walk = Walk()
            try:
                routing = read_routing(walk, topk)
                experts = read_experts(walk, routing)
                check_weights(routing, experts)
                check_readers(walk, routing, experts)
            except NoFit as stop:
                place, found = f"%{stop.node.name}", len(walk.nodes)
                misses.append(NearMiss("moe", where(topk), place, stop.reason, found, max(SIZE, found)))
            else:
                records.append(rewrite(editor, walk, topk, routing, experts))
        return Outcome(tuple(records), tuple(misses), "" if records else no_match_reason(misses))


def check_weights(routing: Routing, experts: Experts) -> None:
    x = tensor_of(experts.x)
    for node in (experts.gate_up, experts.down):
        require(is_weight(node), node, f"the weight {where(node)} is computed in the graph, it is not a parameter")
        dtype = tensor_of(node).dtype
        require(dtype == x.dtype, node, f"{where(experts.x)} is {x.dtype} and {where(node)} is {dtype}")
    gate_up, down = tensor_of(experts.gate_up), tensor_of(experts.down)
    e, d, f = down.shape
    fits = tuple(gate_up.shape) == (e, 2 * f, d) and x.dim() == 2 and x.shape[1] == d and e == routing.experts
    shapes = f"x {list(x.shape)}, gate_up {list(gate_up.shape)}, down {list(down.shape)}, {routing.experts} logits"
    require(fits, experts.gate_up, f"the sizes do not fit together: {shapes}")
    result = tensor_of(experts.result)
    require(result.dtype == x.dtype, experts.result, f"{where(experts.result)} is not cast back to {x.dtype}")


def check_readers(walk: Walk, routing: Routing, experts: Experts) -> None:
    """Inner values have no reader outside, and nobody else writes to what the two ops read."""
    outputs = (routing.weights, routing.ids, experts.result)
    stopped = second_reader(walk.nodes, outputs)
    if stopped is not None:
        raise NoFit(*stopped)
    for node in (*walk.nodes, routing.logits, experts.x, experts.gate_up, experts.down):
        writer = next((w for w in writers(storage_root(node)) if w not in walk.nodes), None)
        if writer is not None:
            raise NoFit(node, f"{where(node)} is written in place by {where(writer)}")


def rewrite(editor: Editor, walk: Walk, topk: Node, routing: Routing, experts: Experts) -> MatchRecord:
    dtype = tensor_of(routing.weights).dtype
    first = (True,) if routing.select_first else ()
    args = (routing.logits, routing.top_k, routing.normalize, dtype, *first)
    route = editor.call(ops.moe_route.default, args, before=topk, like=topk)
    weights, ids = (editor.call(getitem, (route, index), before=topk, like=topk) for index in (0, 1))
    result = experts.result
    named = () if experts.activation == "silu" else (experts.activation,)
    inputs = (experts.x, weights, ids, experts.gate_up, experts.down, *named)
    mixed = editor.call(ops.moe_experts.default, inputs, before=result, like=result)
    record = MatchRecord(
        where(result),
        module_path(result),
        tuple(node.name for node in walk.nodes),
        (route.name, weights.name, ids.name, mixed.name),
        "moe",
    )
    for old, new in ((routing.weights, weights), (routing.ids, ids), (result, mixed)):
        editor.replace(old, new)
    erase_dead(editor, list(walk.nodes))
    return record
