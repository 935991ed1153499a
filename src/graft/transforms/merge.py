"""Linears that read one input become one larger linear: shared by merge_qkv and merge_gate_up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from graft.graph.edit import Editor, attribute
from graft.graph.match import NearMiss
from graft.graph.nodes import is_op, is_weight, module_path, tensor_of, where
from graft.graph.storage import share_storage
from graft.ops.fused_linear.file_rows import Held, untouched
from graft.transforms.base import Outcome
from graft.transforms.report import MatchRecord

aten = torch.ops.aten


def merge_problem(gm: GraphModule, linears: Sequence[Node | None], what: str, held: Held | None = None) -> str | None:
    """Why these linears cannot be merged, or None."""
    found = [node for node in linears if node is not None]
    if len(found) < len(linears):
        return f"{what} do not all come from linear layers"
    if len(set(found)) < len(found):
        return f"{what} come from one linear layer already"
    if len({node.args[0] for node in found}) > 1:
        return f"{what} read different inputs"
    weights = [node.args[1] for node in found]
    biases = [node.args[2] for node in found if len(node.args) > 2 and node.args[2] is not None]
    owned = next((state for state in (*weights, *biases) if is_weight(state) and not is_parameter(gm, state)), None)
    if owned is not None and owned.op == "placeholder":
        return f"{where(owned)} is an input of the graph and stays the model's; graft.compile merges weights"
    if any(not is_parameter(gm, state) for state in (*weights, *biases)):
        return f"a weight or bias of {what} is not a parameter"
    shared = next((w for w in weights if len(w.users) > 1), None)
    if shared is not None:
        return f"the weight {shared.target} is tied: something else reads it too"
    if len({tensor_of(w).dtype for w in weights}) > 1:
        return f"the weights of {what} differ in dtype"
    if 0 < len(biases) < len(found):
        return f"some of {what} have a bias and some have none"
    problem = held and held.joinable([gm.get_parameter(str(weight.target)) for weight in weights])
    return f"the weights of {what} cannot be joined: {problem}" if problem else None


def is_parameter(gm: GraphModule, node: object) -> bool:
    if not isinstance(node, Node) or node.op != "get_attr":
        return False
    return isinstance(attribute(gm, str(node.target)), torch.nn.Parameter)


def merge_linears(editor: Editor, linears: Sequence[Node], name: str, held: Held | None = None) -> MatchRecord:
    """One linear over the stacked weights, and a slice of its result for each of the old ones."""
    first = min(linears)
    weight = stack_state(editor, [n.args[1] for n in linears], name, "weight", first, held)
    args = [first.args[0], weight]
    if len(first.args) > 2:
        args.append(stack_state(editor, [n.args[2] for n in linears], name, "bias", first))
    merged = editor.call(aten.linear.default, args, before=first, like=first)
    made, start = [weight.name, merged.name], 0
    for node in linears:
        end = start + tensor_of(node).shape[-1]
        piece = editor.call(aten.slice.Tensor, (merged, -1, start, end), before=first, like=node)
        made.append(piece.name)
        editor.replace(node, piece)
        start = end
    record = MatchRecord(where(first), module_path(first), tuple(n.name for n in linears), tuple(made))
    for node in linears:
        editor.graph.erase_node(node)
    return record


def stack_state(
    editor: Editor, parts: Sequence[Node], name: str, leaf: str, before: Node, held: Held | None = None
) -> Node:
    """The tensors of `parts` below each other in one new parameter. The old ones become views of it, so that memory
    grows by one layer at most while merging, and not at all after it."""
    tensors = [editor.gm.get_parameter(str(part.target)) for part in parts]
    stacked = stacked_already(tensors)
    if stacked is None:
        stacked = stack(tensors, held if held is not None and tensors[0] in held else None)
    # model.layers.0.self_attn.q_proj.weight → model.layers.0.self_attn.qkv_proj.weight
    prefix = "".join(f"{part}." for part in str(parts[0].target).split(".")[:-2])
    return editor.parameter(f"{prefix}{name}.{leaf}", stacked, before=before, like=before)


def stack(tensors: Sequence[torch.nn.Parameter], held: Held | None = None) -> torch.Tensor:
    """held: the weights lie in their file, so that rows of the file are joined, and no numbers."""
    shape = (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:])
    if held is None:
        stacked = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    else:
        stacked = untouched(shape, tensors[0].dtype)
        held.put(stacked, *(part for tensor in tensors for part in held.of(tensor)))
    start = 0
    for tensor in tensors:
        view = stacked[start : start + tensor.shape[0]]
        if held is not None:
            held.drop(tensor)
        elif not tensor.is_meta:
            view.copy_(tensor.data)
        tensor.data = view
        start += tensor.shape[0]
    return stacked


def stacked_already(tensors: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    """The tensors as one, where an earlier graph of the same module has stacked them: it shares that memory."""
    first = tensors[0]
    one = all(share_storage(t, first) and t.is_contiguous() for t in tensors)
    ends = [t.storage_offset() + t.numel() for t in tensors]
    if not one or first.is_meta or ends[:-1] != [t.storage_offset() for t in tensors[1:]]:
        return None
    shape = (sum(t.shape[0] for t in tensors), *first.shape[1:])
    return first.data.as_strided(shape, first.stride(), first.storage_offset())


def merge_groups(
    gm: GraphModule,
    transform: str,
    groups: Sequence[tuple[Node, Sequence[Node | None]]],
    name: str,
    what: str,
    none: str,
    held: Held | None = None,
) -> Outcome:
    """Merges every group that can be; `none` is the reason where there is no group at all."""
    editor = Editor(gm, transform)
    records, misses = [], []
    for anchor, linears in groups:
        problem = merge_problem(gm, linears, what, held)
        if problem is None:
            records.append(merge_linears(editor, [n for n in linears if n is not None], name, held))
        else:
            found = sum(n is not None for n in linears)
            misses.append(NearMiss(transform, where(anchor), f"%{anchor.name}", problem, found, len(linears)))
    reason = ""
    if not records:
        reason = misses[0].reason if misses else none
    return Outcome(tuple(records), tuple(misses), reason)


def producing_linear(node: object, through: frozenset[object]) -> Node | None:
    """Follows the first argument upward through `through` to an aten.linear."""
    while isinstance(node, Node) and node.op == "call_function" and node.target in through:
        node = node.args[0]
    return node if isinstance(node, Node) and is_op(node, aten.linear.default) else None
