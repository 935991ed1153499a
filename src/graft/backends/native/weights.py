"""The weights of regions as their kernels read them, and which of the module's own can then be freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from graft.backends.native.program import NativeWeight
from graft.backends.native.regions import Split
from graft.ir.edit import attribute
from graft.ir.storage import storage_id
from graft.weights.native_tiles import pack

Release = Callable[[str], None]  # frees the tensor of that name


def in_form(weight: NativeWeight, tensor: Tensor) -> Tensor:
    """As the kernel reads it."""
    if weight.form == "float32":
        return tensor.to(torch.float32).contiguous()
    if weight.form == "as_is":
        return tensor.contiguous()
    return pack(tensor.t() if weight.transposed else tensor, weight.form, weight.gated).data


def prepare_all(gm: GraphModule, parts: Split, release: Release | None) -> tuple[list[list[Tensor]], int]:
    """The weights of every region, and how many of the module's own were freed, each as soon as it was packed."""
    weights = list(dict.fromkeys(weight for region in parts.regions for weight in region.program.weights))
    spare = spare_targets(gm, parts, weights) if release is not None else {}
    made: dict[NativeWeight, Tensor] = {}  # once for all regions that read it
    for weight in weights:
        made[weight] = in_form(weight, attribute(gm, weight.target).detach())
        if release is not None and spare.get(weight.target) == weight:
            release(weight.target)
    return [[made[weight] for weight in region.program.weights] for region in parts.regions], len(spare)


def spare_targets(gm: GraphModule, parts: Split, weights: Sequence[NativeWeight]) -> dict[str, NativeWeight]:
    """Names of tensors that nothing reads once they are packed, each with the last form that is made of it.

    What a kernel or an eager node reads where it lies stays, and so does all that shares its memory.
    """
    where_it_lies = {weight.target for weight in weights if weight.form in ("as_is", "float32")}
    native = {node for region in parts.regions for node in region.nodes}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and any(user not in native for user in readers(node)):
            where_it_lies.add(str(node.target))
    kept = {storage_id(attribute(gm, name)) for name in where_it_lies}
    last = {storage_id(attribute(gm, weight.target)): weight for weight in weights}
    return {weight.target: weight for storage, weight in last.items() if storage not in kept}


def readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Who reads a weight, perhaps its transpose: a transposed one is no call of the step."""
    found: set[torch.fx.Node] = set()
    for user in node.users:
        found |= set(user.users) if user.target is torch.ops.aten.transpose.int else {user}
    return found
