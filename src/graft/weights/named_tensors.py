"""Parameters and buffers as named entries of safetensors files, with ties, strides and shared memory kept.

A tensor that lies alone and contiguous in memory is stored as it is. Others (strided ones, buffers that overlap) are
stored as the flat span of memory they cover, and become views of it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from graft.base.errors import DumpError
from graft.ir.edit import attribute
from graft.ir.effects import mutated_roots
from graft.ir.storage import extent, identity, plain_bits, with_bits
from graft.ir.verify import module_state


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: all its names, where its data is, and how it lies there."""

    names: tuple[str, ...]
    kind: str  # parameter or buffer
    written: bool
    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | None  # in elements from the start of the span; None for a tensor that is stored as it is
    device: str
    requires_grad: bool = False
    conj: bool = False  # it is conjugated, or negated, when it is read
    neg: bool = False


@dataclass(frozen=True)
class PackedTensors:
    """Entries, and what goes into the two files by key."""

    entries: tuple[TensorEntry, ...]
    weights: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


def pack(graphs: Sequence[GraphModule]) -> PackedTensors:
    """The tensors of all graphs. One name is one tensor in all of them: they were made from one module."""
    tensors: dict[tuple[Any, ...], torch.Tensor] = {}
    found: dict[tuple[Any, ...], list[str]] = {}
    written = set()
    for gm in graphs:
        for name, tensor in module_state(gm).items():
            key = identity(tensor)
            tensors.setdefault(key, tensor)
            if any(name in others for other, others in found.items() if other != key):
                raise DumpError(f"{name} is another tensor in another graph of the module")
            if name not in found.setdefault(key, []):
                found[key].append(name)
        owners = [attribute(gm, str(n.target)) for n in mutated_roots(gm.graph) if n.op == "get_attr"]
        written |= {id(tensors[identity(owner)]) for owner in owners if isinstance(owner, torch.Tensor)}
    names = {id(tensor): tuple(found[key]) for key, tensor in tensors.items()}
    entries: list[TensorEntry] = []
    files: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    for members in clusters(list(tensors.values())):
        is_state = any(id(tensor) in written for tensor in members)
        key = names[id(members[0])][0]
        alone = len(members) == 1 and members[0].is_contiguous()
        data = members[0].detach() if alone else span(members, [names[id(m)][0] for m in members])
        data = plain_bits(data)
        files[is_state][key] = data
        for tensor in members:
            offset = None if alone else int(tensor.storage_offset()) - first_offset(members)
            entries.append(describe(tensor, names[id(tensor)], is_state, key, offset))
    return PackedTensors(tuple(entries), files[0], files[1])


def describe(
    tensor: torch.Tensor, names: tuple[str, ...], written: bool, key: str, offset: int | None
) -> TensorEntry:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
    layout = tuple(tensor.shape), tuple(tensor.stride())
    bits = tensor.is_conj(), tensor.is_neg()
    return TensorEntry(names, kind, written, key, *layout, offset, str(tensor.device), tensor.requires_grad, *bits)


def clusters(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that overlap in memory together, in the order of their addresses; the others alone."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise DumpError(f"a {tensor.layout} tensor on {tensor.device} holds no data that can be stored")
    found: list[list[torch.Tensor]] = []
    end, device = 0, None
    for tensor in sorted(tensors, key=lambda t: (str(t.device), t.data_ptr())):
        start, stop = tensor.data_ptr(), tensor.data_ptr() + extent(tensor) * tensor.element_size()
        if found and tensor.device == device and start < end:
            found[-1].append(tensor)
            end = max(end, stop)
        else:
            found.append([tensor])
            end, device = stop, tensor.device
    return found


def first_offset(members: list[torch.Tensor]) -> int:
    return min(int(tensor.storage_offset()) for tensor in members)


def span(members: list[torch.Tensor], names: list[str]) -> torch.Tensor:
    """The memory that the members cover, as one row of elements."""
    if len({tensor.dtype for tensor in members}) > 1:
        raise DumpError(f"{' and '.join(names)} share memory under different dtypes, which cannot be stored")
    start = first_offset(members)
    stop = max(int(tensor.storage_offset()) + extent(tensor) for tensor in members)
    return members[0].detach().as_strided([stop - start], [1], start)


def unpack(entries: list[dict[str, Any]], weights: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by name; every name of a tied tensor leads to the same one."""
    found: dict[str, Any] = {}
    moved: dict[tuple[str, bool], torch.Tensor] = {}
    for data in entries:
        entry = TensorEntry(**data)
        location = (entry.key, entry.written)
        if location not in moved:
            moved[location] = (state if entry.written else weights)[entry.key].to(entry.device)
        tensor = moved[location]
        if entry.offset is not None:
            tensor = tensor.as_strided(entry.shape, entry.stride, entry.offset)
        tensor = with_bits(tensor, entry.conj, entry.neg)
        if entry.kind == "parameter":
            tensor = torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
        found |= dict.fromkeys(entry.names, tensor)
    return found


def entries_data(packed: PackedTensors) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in packed.entries]
