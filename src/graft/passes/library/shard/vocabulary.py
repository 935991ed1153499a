"""The vocabulary: each rank has the rows of its tokens, in the embedding and in the output head."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.nodes import is_op, tensor_of, where
from graft.ir.patterns.match import Refused
from graft.passes.library.last_token_logits import ROW_WISE
from graft.passes.library.merge.stacking import is_parameter
from graft.passes.library.shard.regions import problem_of
from graft.passes.library.shard.splits import LINEARS, share
from graft.passes.library.shard.weights import Shards

aten, ops = torch.ops.aten, torch.ops.graft


def is_head(linear: Node) -> bool:
    """Whether the graph returns what the layer gives, changed row by row at most."""
    waiting = list(linear.users)
    while waiting:
        user = waiting.pop()
        if user.op == "output":
            return True
        if user.op == "call_function" and user.target in ROW_WISE:
            waiting += user.users
    return False


def reads_tokens(embedding: Node) -> bool:
    ids = embedding.args[1]
    return isinstance(ids, Node) and ids.op == "placeholder" and ids.name == "input_ids"


def check_vocabulary(gm: GraphModule, node: Node, world: int) -> None:
    linear = is_op(node, *LINEARS)
    problem = problem_of(gm, node) if linear else None
    if problem is None and not linear and not is_parameter(gm, node.args[0]):
        problem = f"the weight of {where(node)} is not a parameter"
    if problem is not None:
        raise Refused(node, problem)
    tokens = int(tensor_of(node).shape[-1] if linear else tensor_of(node.args[0]).shape[0])
    if tokens % world:
        raise Refused(node, f"{where(node)}: a vocabulary of {tokens} does not divide by {world} ranks")


def write_embedding(editor: Editor, shards: Shards, node: Node, rank: int, world: int) -> list[Node]:
    """Tokens of other ranks give zeros here; the sum over the ranks has one number that is not, so it is exact."""
    weight, ids = node.args[0], node.args[1]
    ranges = share(int(tensor_of(weight).shape[0]), rank, world)
    ((first, last),) = ranges
    rows = shards.part(weight, 0, ranges, before=node)
    made = [rows]

    def call(target: object, *args: object) -> Node:
        made.append(editor.call(target, args, before=node, like=node))
        return made[-1]

    own = call(aten.sub.Tensor, ids, first)
    found = call(aten.embedding.default, rows, call(aten.clamp.default, own, 0, last - first - 1))
    inside = call(aten.mul.Tensor, call(aten.ge.Scalar, own, 0), call(aten.lt.Scalar, own, last - first))
    kept = call(aten.mul.Tensor, found, call(aten.unsqueeze.default, inside, -1))
    editor.replace(node, call(ops.all_reduce.default, kept, world))
    return made


def write_head(editor: Editor, shards: Shards, node: Node, rank: int, world: int) -> list[Node]:
    x, weight, *rest = node.args
    ranges = share(int(tensor_of(node).shape[-1]), rank, world)
    rows = shards.part(weight, 0, ranges, before=node)
    made = [rows]
    args = [x, rows]
    if rest and rest[0] is not None:
        made.append(shards.part(rest[0], 0, ranges, before=node))
        args.append(made[-1])
    local = editor.call(aten.linear.default, args, before=node, like=node)
    whole = editor.call(ops.all_gather.default, (local, world), before=node, like=node)
    editor.replace(node, whole)
    return [*made, local, whole]
