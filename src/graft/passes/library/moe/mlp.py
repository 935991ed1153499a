"""Reads the MLP of an expert backwards from its result, and says how the op takes the weights of all experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.io.text import op_text
from graft.ir.nodes import arg_values, is_op, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.ops.moe_experts.reference import ALPHA, LIMIT
from graft.passes.library.merge.stacking import StackedPart, owner_problem, sharer, stacked
from graft.passes.walk import GraphWalk, require, unexpected
from graft.weights.lazy import LazyWeights

aten, ops = torch.ops.aten, torch.ops.graft
ADDS = (aten.add.Tensor, aten.add_.Tensor)
MATMULS = (aten.matmul.default, aten.mm.default, aten.bmm.default)
END = 2**63 - 1  # how export writes an open slice


@dataclass(frozen=True)
class ExpertWeight:
    """A weight or bias as one expert reads it: a tensor of its own, or that of `expert` among stacked ones.

    transposed: it lies as [in, out]. half: 0 or 1 where it holds gate or up alone.
    """

    node: Node
    expert: int | None = None
    transposed: bool = False
    half: int | None = None


@dataclass(frozen=True)
class ExpertProjection:
    x: Any
    weight: ExpertWeight
    bias: ExpertWeight | None


@dataclass(frozen=True)
class Mlp:
    """down(activation(gate(x)) * up(x)); `up` holds one projection, or gate and up."""

    x: Any
    up: tuple[ExpertProjection, ...]
    down: ExpertProjection
    activation: str
    interleaved: bool


@dataclass(frozen=True)
class Stack:
    """What the op takes as one tensor [e, …]: a tensor of the module, perhaps transposed, or those of the experts."""

    parts: tuple[
        tuple[int | None, ExpertWeight], ...
    ]  # (expert, its weight); the expert is None where one holds them all

    @property
    def whole(self) -> ExpertWeight | None:
        """The one tensor that holds all of it in the op's order."""
        weights = [weight for _, weight in self.parts]
        one = len({(w.node, w.transposed) for w in weights}) == 1 and weights[0].half is None
        in_order = all(expert == weight.expert for expert, weight in self.parts)
        stacked_once = self.parts[0][0] is None or tensor_of(weights[0].node).shape[0] == len(weights)
        return weights[0] if one and in_order and stacked_once and len(self.parts) == self.count else None

    @property
    def count(self) -> int:
        return len({expert for expert, _ in self.parts})

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(dict.fromkeys(weight.node for _, weight in self.parts))


# ── one expert ──────────────────────────────────────────────────────────────────────────────────────────────────


def read_mlp(walk: GraphWalk, out: Any, reader: Node) -> Mlp:
    down = read_projection(walk, out, reader)
    hidden, activation, gate, up = read_activation(walk, down.x, reader)
    if is_op(gate, aten.slice.Tensor) and is_op(up, aten.slice.Tensor):
        gemm, interleaved = read_halves(walk, gate, up, hidden)
        both = read_projection(walk, gemm, hidden)
        return Mlp(both.x, (both,), down, activation, interleaved)
    pair = tuple(read_projection(walk, value, hidden, half) for half, value in enumerate((gate, up)))
    require(pair[0].x is pair[1].x, hidden, f"gate and up of {where(hidden)} read different inputs")
    return Mlp(pair[0].x, pair, down, activation, False)


def read_projection(walk: GraphWalk, value: Any, reader: Node, half: int | None = None) -> ExpertProjection:
    """linear(x, w, b), x @ w, bmm(x, w), and each of them + b."""
    added = None
    if is_op(value, *ADDS):
        left, right = walk.take(value).args[:2]
        reader, (value, added) = value, (right, left) if is_op(right, *MATMULS) else (left, right)
    if is_op(value, aten.linear.default):
        x, weight, *rest = walk.take(value).args
        bias = rest[0] if rest else added
        require(not (rest and added is not None), value, f"{where(value)} has a bias and another one is added")
        transposed = False
    elif is_op(value, *MATMULS):
        (x, weight), bias, transposed = walk.take(value).args, added, True
    elif is_op(value, aten.addmm.default) and not value.kwargs and added is None:
        (bias, x, weight), transposed = walk.take(value).args, True
    else:
        raise Refused(*unexpected(value, reader, "a linear layer, matmul or bmm of an expert"))
    return ExpertProjection(
        x,
        read_weight(walk, weight, value, transposed, half),
        None if bias is None else read_weight(walk, bias, value, False, half),
    )


def read_weight(walk: GraphWalk, value: Any, reader: Node, transposed: bool, half: int | None) -> ExpertWeight:
    """A tensor of the module, or one expert's part of it; transposed, or with a dim of one where it broadcasts."""
    expert = None
    while isinstance(value, Node) and value.op == "call_function":
        if is_op(value, aten.transpose.int) and value.args[1:] == (-2, -1):
            transposed = not transposed
        elif is_op(value, aten.select.int) and value.args[1] == -tensor_of(value.args[0]).dim() and expert is None:
            expert = value.args[2]
        elif not (is_op(value, aten.unsqueeze.default) and value.args[1] == -2):
            raise Refused(value, f"the weight {where(value)} is computed in the graph, it is not a parameter")
        value = walk.take(value).args[0]
    require(isinstance(value, Node), reader, f"{where(reader)} takes no tensor as its weight")
    return ExpertWeight(value, expert, transposed, half)


def read_activation(walk: GraphWalk, hidden: Any, reader: Node) -> tuple[Node, str, Any, Any]:
    """activation(gate) * up: the call, the activation, gate and up."""
    hidden = walk.call(hidden, reader, aten.mul.Tensor, ops.swiglu.default)
    if is_op(hidden, ops.swiglu.default):
        gate, up, activation, upcast = (value for _, value in arg_values(hidden))
        require(not upcast, hidden, f"{where(hidden)} computes in float32, the op in the model's dtype")
        return hidden, activation, gate, up
    clamped = read_clamped(walk, hidden)
    if clamped is not None:
        return hidden, "clamped_swiglu", *clamped
    activated, up = sorted(hidden.args, key=lambda side: not is_op(side, aten.silu.default, aten.gelu.default))
    if activation_of(activated) is None:
        activated, up = sorted(hidden.args, key=lambda side: is_op(side, aten.slice.Tensor, *MATMULS, *ADDS))
    name = activation_of(activated)
    if name is None and isinstance(activated, Node):
        known = "silu, gelu, gelu_tanh and gpt-oss' clamped_swiglu"
        raise Refused(
            activated, f"the experts' activation {where(activated)} is {op_text(activated)}, known are {known}"
        )
    if name is None:
        raise Refused(hidden, f"{where(hidden)} is not an activation times a projection")
    return hidden, name, walk.take(activated).args[0], up


def activation_of(node: Any) -> str | None:
    if is_op(node, aten.silu.default):
        return "silu"
    if is_op(node, aten.gelu.default):
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return None


def read_clamped(walk: GraphWalk, hidden: Node) -> tuple[Any, Any] | None:
    """gpt-oss: (clamp(up, -7, 7) + 1) * (gate * sigmoid(gate * 1.702)) with gate = clamp(gate, max=7)."""
    sides = [side for side in hidden.args if is_op(side, aten.add.Tensor)]
    if len(sides) != 1 or sides[0].args[1] != 1:
        return None
    one_more, glu = sides[0], hidden.args[1] if hidden.args[0] is sides[0] else hidden.args[0]
    if not is_op(glu, aten.mul.Tensor) or not any(is_op(side, aten.sigmoid.default) for side in glu.args):
        return None
    up = walk.call(walk.take(one_more).args[0], one_more, aten.clamp.default)
    gate, share = sorted(walk.take(glu).args, key=lambda side: is_op(side, aten.sigmoid.default))
    scaled = walk.call(walk.take(share).args[0], share, aten.mul.Tensor)
    gate = walk.call(gate, glu, aten.clamp.default)
    numbers = (scaled.args, gate.args[1:], up.args[1:])
    fits = numbers == ((gate, ALPHA), (None, LIMIT), (-LIMIT, LIMIT))
    require(fits, glu, f"{where(glu)} is not bounded by {LIMIT} and scaled by {ALPHA}, as the op's clamped_swiglu is")
    return gate.args[0], up.args[0]


def read_halves(walk: GraphWalk, gate: Node, up: Node, hidden: Node) -> tuple[Node, bool]:
    """gate and up as halves of one GEMM's result, or its even and odd columns: that result, and which of the two."""
    gemm, f = gate.args[0], tensor_of(hidden).shape[-1]
    halves = gate.args == (gemm, -1, 0, f) and up.args == (gemm, -1, f, 2 * f)
    interleaved = gate.args == (gemm, -1, 0, END, 2) and up.args == (gemm, -1, 1, END, 2)
    walk.take(gate), walk.take(up)
    require(
        halves or interleaved,
        gate,
        f"{where(gate)} and {where(up)} are not the first and the second half of one GEMM's result, nor its"
        " even and odd columns",
    )
    return gemm, interleaved


# ── all experts ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Weights:
    """The op's weights, and how they are read."""

    gate_up: Stack
    down: Stack
    gate_up_bias: Stack | None
    down_bias: Stack | None
    activation: str
    interleaved: bool


def weights_of(mlps: Sequence[tuple[int | None, Mlp]], site: Node) -> Weights:
    """The MLPs of all experts, or one over stacked weights, whose expert is None."""
    kinds = {(mlp.activation, mlp.interleaved, len(mlp.up)) for _, mlp in mlps}
    require(len(kinds) == 1, site, f"the experts of {where(site)} are not all spelled the same way")
    activation, interleaved, _ = kinds.pop()
    ups = [(expert, projection) for expert, mlp in mlps for projection in mlp.up]
    downs = [(expert, mlp.down) for expert, mlp in mlps]
    stacks = [Stack(tuple((e, projection.weight) for e, projection in side)) for side in (ups, downs)]
    biases = [bias_stack(side, site) for side in (ups, downs)]
    return Weights(stacks[0], stacks[1], biases[0], biases[1], activation, interleaved)


def bias_stack(side: Sequence[tuple[int | None, ExpertProjection]], site: Node) -> Stack | None:
    found = tuple((expert, projection.bias) for expert, projection in side if projection.bias is not None)
    require(len(found) in (0, len(side)), site, f"some experts of {where(site)} have a bias and some have none")
    return Stack(found) if found else None


def stack_problem(gm: GraphModule, stack: Stack, walk: GraphWalk, lazy: LazyWeights | None) -> str | None:
    """Why the experts' own tensors cannot be laid out in one, or None."""
    problem = owner_problem(gm, stack.nodes, "the experts")
    if problem is not None:
        return problem
    other = next(((e, w) for e, w in stack.parts if w.expert is not None and w.expert != e), None)
    if other is not None:
        return f"expert {other[0]} reads the weight of expert {other[1].expert} in {other[1].node.target}"
    alone = [weight.node for _, weight in stack.parts if weight.expert is None]
    tied = next(
        (n for n in stack.nodes if alone.count(n) > 1 or any(user not in walk.nodes for user in n.users)), None
    )
    if tied is not None:
        return f"the weight {tied.target} is tied: something else reads it too"
    tensors = [gm.get_parameter(str(node.target)) for node in stack.nodes]
    other = sharer(gm, tensors)
    if other is not None:
        return f"a weight of the experts shares its memory with {other}"
    if lazy is not None and any(lazy.in_blocks(tensor) for tensor in tensors):
        return "the weights of the experts lie in blocks in their file"
    if lazy is not None:
        lazy.fill_floats(tensors)  # one tensor is made of them, of which ranks take parts
    return None


def as_tensor(editor: Editor, stack: Stack, shape: Sequence[int], name: str, before: Node) -> Node:
    """The node that the op takes, [e, …]: a tensor of the module, its transpose, or a new one."""
    whole = stack.whole
    if whole is not None:
        if not whole.transposed:
            return whole.node
        return editor.call(aten.transpose.int, (whole.node, -2, -1), before=before, like=before)
    each = {
        weight.node: (expert, weight) for expert, weight in stack.parts
    }  # a stacked one is there for every expert
    parts = [place_of(editor, expert, weight, shape) for expert, weight in each.values()]
    tensor = stacked(shape, parts)
    # model.layers.0.experts.0.w1.weight → model.layers.0.experts.gate_up
    names = [str(node.target).split(".") for node in stack.nodes]
    common = [ours for ours, *others in zip(*names, strict=False) if all(ours == other for other in others)]
    prefix = "".join(f"{part}." for part in common[: len(names[0]) - 1])
    return editor.parameter(f"{prefix}{name}", tensor, before=before, like=before)


def place_of(editor: Editor, expert: int | None, weight: ExpertWeight, shape: Sequence[int]) -> StackedPart:
    f = shape[1] // 2

    def part(whole: torch.Tensor) -> torch.Tensor:
        view = whole if weight.half is None else whole[:, weight.half * f : (weight.half + 1) * f]
        view = view.transpose(-2, -1) if weight.transposed else view
        return view if expert is None or weight.expert is not None else view[expert]

    return StackedPart(editor.gm.get_parameter(str(weight.node.target)), part)
