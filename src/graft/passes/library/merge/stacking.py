"""Several parameters laid out in one memory. They become views of it, so that memory grows by one layer at most while
it is done, and not at all after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graft.ir.edit import attribute
from graft.ir.nodes import is_weight, where
from graft.ir.storage import share_storage, storage_id
from graft.weights.lazy import LazyWeights, untouched


@dataclass(frozen=True)
class StackedPart:
    """A parameter, and its part of the whole: a view of the parameter's own shape. None: zeros."""

    tensor: torch.nn.Parameter | None
    view_in: Callable[[Tensor], Tensor]


def stacked(shape: Sequence[int], parts: Sequence[StackedPart], lazy: LazyWeights | None = None) -> Tensor:
    """The whole of `shape`. lazy: the parts lie in their file, so that rows of it are joined, and no numbers."""
    known = [part.tensor for part in parts if part.tensor is not None]
    whole = stacked_already(shape, parts)
    if whole is not None:
        return whole
    if lazy is None:
        whole = torch.empty(tuple(shape), dtype=known[0].dtype, device=known[0].device)
    else:
        whole = untouched(shape, known[0].dtype)
        lazy.put(whole, *(rows for tensor in known for rows in lazy.of(tensor)))
    for part in parts:
        view = part.view_in(whole)
        if part.tensor is None:
            view.zero_()
            continue
        if lazy is not None:
            lazy.drop(part.tensor)
        elif not part.tensor.is_meta:
            view.copy_(part.tensor.data)
        part.tensor.data = view
    return whole


def stacked_already(shape: Sequence[int], parts: Sequence[StackedPart]) -> Tensor | None:
    """The whole, where an earlier graph of the same module has laid the parts out: it shares that memory."""
    model = torch.empty(tuple(shape), device="meta")
    known = [(part.tensor, part.view_in(model)) for part in parts if part.tensor is not None]
    first, model_view = known[0]
    start = first.storage_offset() - model_view.storage_offset()
    if first.is_meta or start < 0:
        return None
    for tensor, view in known:
        here = tensor.storage_offset() == start + view.storage_offset() and tensor.stride() == view.stride()
        if not here or not share_storage(tensor, first):
            return None
    if (start + model.numel()) * first.element_size() > first.untyped_storage().nbytes():
        return None
    whole = first.data.as_strided(tuple(shape), model.stride(), start)
    zeros = all(not bool(part.view_in(whole).any()) for part in parts if part.tensor is None)
    return whole if zeros else None


def is_parameter(gm: GraphModule, node: object) -> bool:
    if not isinstance(node, Node) or node.op != "get_attr":
        return False
    return isinstance(attribute(gm, str(node.target)), torch.nn.Parameter)


def owner_problem(gm: GraphModule, states: Sequence[Node], what: str) -> str | None:
    """Why these weights and biases cannot be moved, or None: they must be parameters of the module."""
    owned = next((state for state in states if is_weight(state) and not is_parameter(gm, state)), None)
    if owned is not None and owned.op == "placeholder":
        return f"{where(owned)} is an input of the graph and stays the model's; graft.compile merges weights"
    if any(not is_parameter(gm, state) for state in states):
        return f"a weight or bias of {what} is not a parameter"
    return None


def sharer(gm: GraphModule, tensors: Sequence[Tensor]) -> str | None:
    """Whoever else lies in the memory of these tensors: they would move away from it."""
    own, memory = {id(tensor) for tensor in tensors}, {storage_id(tensor) for tensor in tensors} - {None}
    everybody = (*gm.named_parameters(), *gm.named_buffers())
    return next((name for name, state in everybody if storage_id(state) in memory and id(state) not in own), None)
