"""fuse_moe: the routing and the experts of a mixture become two ops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.effects import storage_root, writers
from graft.ir.nodes import args_of, calls, is_op, is_weight, tensor_of, where
from graft.ir.patterns.match import Match, NearMiss, Refused, refuse_readers
from graft.passes.base import Context
from graft.passes.library.moe.experts import Experts, read_experts
from graft.passes.library.moe.mlp import Stack, Weights, as_tensor, stack_problem
from graft.passes.library.moe.routing import Routing, read_routing
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun, forget_taken
from graft.passes.walk import GraphWalk, require

aten, ops = torch.ops.aten, torch.ops.graft
SIZE = 37  # calls of the grouped form, from the softmax to the sum over experts


@TransformRegistry.register("fuse_moe")
class FuseMoE(Rewriter):
    """The routing and the experts of a mixture become two ops; both are found, or neither is changed.

    before:  %p = softmax(%logits, -1, float32);  %t = topk(%p, k);  %v = getitem(%t, 0);  %ids = getitem(%t, 1)
             %s = sum(%v, [-1], True);  %weights = div_(%v, %s)
             …  %o = sort(reshape(%ids, [-1]));  %g = _grouped_mm(%x[%o / k], transpose(%gate_up), %ends)
             %h = mul(silu(slice(%g, -1, 0, f)), slice(%g, -1, f, 2f));  %d = _grouped_mm(%h, transpose(%down), %ends)
             …  %y = sum(reshape(%d * %weights, [n, k, d]), [-2])
    after:   %r = graft.moe_route(%logits, k, True, float32);  %weights = getitem(%r, 0);  %ids = getitem(%r, 1)
             %y = graft.moe_experts(%x, %weights, %ids, %gate_up, %down, "silu")

    Also without the division, with weights cast to the model's dtype, with topk before softmax (GraniteMoe), with a
    sigmoid (Llama 4), with groups of experts, a bias of the choice and a factor (DeepSeek), and with Hugging Face's
    `batched_mm` experts; loops over experts that take their tokens (Mixtral's index_add) or all tokens with a share;
    all experts in one bmm (gpt-oss, Llama 4). Experts of their own weights are laid out as one tensor, of which the
    old ones become views: no second copy. Logits may have other readers, and so may weights and ids where the model's
    topk gives them in a set order. Numerics: bitwise with the reference for `grouped_mm` experts in that order;
    without one, in other spellings and in GPU kernels, GEMMs and the experts of a token are summed in another order,
    and an expert that was not chosen counts nothing even where it overflows. Of equal logits the Triton routing takes
    the first, as CUDA's topk does.

    A walk: there are as many experts as there are, and their weights become one tensor.
    """

    lacking = "the graph has no aten.topk"

    def candidates(self, run: RewriteRun) -> list[Reading]:
        return [Reading(node, GraphWalk()) for node in calls(run.gm.graph) if is_op(node, aten.topk.default)]

    def find(self, run: RewriteRun, reading: Reading) -> Mixture:
        walk = reading.walk
        routing = read_routing(walk, reading.anchor)
        experts = read_experts(walk, routing)
        kept = keep_shares(walk, routing)
        check_weights(run.gm, walk, routing, experts, run.context)
        routed = (routing.weights, routing.ids) if routing.ordered else ()
        outputs = tuple(node for node in (experts.result, *routed) if node is not None)
        return Mixture("moe", {}, {}, tuple(walk.nodes), outputs, reading.anchor, routing, experts, kept)

    def check(self, run: RewriteRun, match: Mixture) -> None:
        """Inner values have no reader outside, and nobody else writes to what the two ops read; the match may."""
        nodes, routing, experts = match.nodes, match.routing, match.experts
        refuse_readers(nodes, match.outputs)
        stacks = [stack for stack, _ in shapes(experts.weights, 0, 0, 0)]
        bias = [] if routing.bias is None else [routing.bias]
        for node in (*nodes, routing.logits, *bias, experts.x, *(n for stack in stacks for n in stack.nodes)):
            writer = next((w for w in writers(storage_root(node)) if w not in nodes and w not in match.kept), None)
            if writer is not None and node not in (routing.weights, routing.ids):
                raise Refused(node, f"{where(node)} is written in place by {where(writer)}")

    def write(self, run: RewriteRun, match: Mixture) -> list[Node]:
        editor, topk, routing, experts = run.editor, match.topk, match.routing, match.experts
        route = editor.call(ops.moe_route.default, route_args(routing), before=topk, like=topk)
        weights, ids = (editor.call(getitem, (route, index), before=topk, like=topk) for index in (0, 1))
        result = experts.result
        args = experts_args(editor, routing, experts, weights, ids)
        made = [route, weights, ids, editor.call(ops.moe_experts.default, args, before=result, like=result)]
        if experts.sizes is not None:
            flat = (made[-1], list(experts.sizes))
            made.append(editor.call(aten.reshape.default, flat, before=result, like=result))
        for old, new in ((routing.weights, weights), (routing.ids, ids), (result, made[-1])):
            if old in match.outputs:
                editor.replace(old, new)
        return made

    def finish(self, run: RewriteRun) -> None:
        forget_taken(run)  # the choice of groups is a topk too

    def near_miss(self, run: RewriteRun, reading: Reading, refused: Refused) -> NearMiss:
        found = len(reading.walk.nodes)
        return replace(super().near_miss(run, reading, refused), pattern="moe", matched=found, size=max(SIZE, found))


@dataclass(frozen=True)
class Reading:
    """A mixture that is being read: from its topk on, and what was recognised so far."""

    anchor: Node
    walk: GraphWalk


@dataclass(frozen=True)
class Mixture(Match):
    """kept: the weights as [n, e], where somebody else reads them."""

    topk: Node
    routing: Routing
    experts: Experts
    kept: tuple[Node, ...]


def keep_shares(walk: GraphWalk, routing: Routing) -> tuple[Node, ...]:
    """Where somebody else reads the weights as [n, e] they are made as before, of what the op gives."""
    shares = routing.shares
    if shares is None or routing.weights is None or all(user in walk.nodes for user in shares.users):
        return ()
    kept = (shares, shares.args[0])
    for node in kept:
        walk.nodes.pop(node, None)
    return kept


def check_weights(gm: GraphModule, walk: GraphWalk, routing: Routing, experts: Experts, context: Context) -> None:
    x, weights = tensor_of(experts.x), experts.weights
    for stack in (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias):
        for node in stack.nodes if stack is not None else ():
            require(
                is_weight(node), node, f"the weight {where(node)} is computed in the graph, it is not a parameter"
            )
            dtype = tensor_of(node).dtype
            require(dtype == x.dtype, node, f"{where(experts.x)} is {x.dtype} and {where(node)} is {dtype}")
        problem = stack and stack.whole is None and stack_problem(gm, stack, walk, context.lazy)
        require(not problem, stack.nodes[0] if stack else experts.x, str(problem))
    e, d, f = routing.experts, x.shape[-1], hidden_size(experts)
    fits = x.dim() == 2 and all(size_fits(stack, shape) for stack, shape in shapes(weights, e, d, f))
    sizes = ", ".join(f"{list(tensor_of(n).shape)}" for n in (*weights.gate_up.nodes, *weights.down.nodes)[:4])
    require(
        fits, weights.gate_up.nodes[0],
        f"the sizes do not fit together: x {list(x.shape)}, weights {sizes}, {routing.experts} logits",
    )  # fmt: skip
    result = tensor_of(experts.result)
    require(result.dtype == x.dtype, experts.result, f"{where(experts.result)} is not cast back to {x.dtype}")
    require(routing.dtype != torch.float64, routing.ids, "the routing is float64, and the op computes in float32")


def route_args(routing: Routing) -> tuple[Any, ...]:
    groups = routing.groups
    options = {
        "logits": routing.logits, "top_k": routing.top_k, "normalize": routing.normalize, "dtype": routing.dtype,
        "select_first": routing.select_first, "scoring": routing.scoring, "bias": routing.bias,
        "groups": groups.count, "top_groups": groups.top, "group_best": groups.best, "eps": routing.eps,
        "scale": routing.scale,
    }  # fmt: skip
    return tuple(args_of(ops.moe_route.default, options, defaults=False))


def hidden_size(experts: Experts) -> int:
    weight = experts.weights.down.parts[0][1]
    return tensor_of(weight.node).shape[-2 if weight.transposed else -1]


def shapes(weights: Weights, e: int, d: int, f: int) -> list[tuple[Stack, tuple[int, ...]]]:
    """The experts' tensors and the shapes that the op takes them in."""
    pairs = [(weights.gate_up, (e, 2 * f, d)), (weights.down, (e, d, f))]
    biases = [(weights.gate_up_bias, (e, 2 * f)), (weights.down_bias, (e, d))]
    return [*pairs, *((stack, shape) for stack, shape in biases if stack is not None)]


def size_fits(stack: Stack, shape: tuple[int, ...]) -> bool:
    """Whether each tensor has the shape that the op takes."""
    for expert, weight in stack.parts:
        wanted = [*shape]
        if weight.half is not None:
            wanted[1] //= 2
        if weight.transposed:
            wanted[-2:] = reversed(wanted[-2:])
        own = expert is not None and weight.expert is None
        if list(tensor_of(weight.node).shape) != (wanted[1:] if own else wanted):
            return False
    return True


def experts_args(editor: Editor, routing: Routing, experts: Experts, weights: Node, ids: Node) -> tuple[Any, ...]:
    result, read = experts.result, experts.weights
    sizes = shapes(read, routing.experts, tensor_of(experts.x).shape[-1], hidden_size(experts))
    names = {id(read.gate_up): "gate_up", id(read.down): "down"}
    tensors = {
        id(stack): as_tensor(editor, stack, shape, names.get(id(stack), f"bias_{len(shape)}_{shape[1]}"), result)
        for stack, shape in sizes
    }
    biases = [tensors.get(id(bias)) for bias in (read.gate_up_bias, read.down_bias)]
    options = {
        "x": experts.x, "weights": weights, "ids": ids, "gate_up": tensors[id(read.gate_up)],
        "down": tensors[id(read.down)], "activation": read.activation, "gate_up_bias": biases[0],
        "down_bias": biases[1], "interleaved": read.interleaved, "weigh_input": experts.weigh_input,
        "gate_up_scale": None, "down_scale": None,
    }  # fmt: skip
    return tuple(args_of(ops.moe_experts.default, options, defaults=False))
