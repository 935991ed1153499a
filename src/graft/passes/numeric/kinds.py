"""What kind of match one is: equal layers make equal pairs of pieces, of which one is tried in full.

Two pairs are of one kind when they call the same ops with the same literals on values of the same kinds, and read
weights in the same pattern. Then they compute the same function of their inputs and weights, unless one side reads a
weight that the other does not: one that the transform made (merged, packed), or one that it left out because of its
values (all ones, a causal mask). Such a match is also run once by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from graft.ir.edit import kind_text
from graft.ir.evaluate import Subprogram
from graft.ir.nodes import is_weight, val


def kind_of(old: Subprogram, new: Subprogram) -> str:
    """A fingerprint of the pair."""
    names: dict[Any, str] = {}
    lines = [line for side in (old, new) for line in piece_lines(side, names)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def piece_lines(piece: Subprogram, names: dict[Any, str]) -> list[str]:
    local: dict[Node, str] = {}
    lines = []
    for node in piece.program:
        shared, call = piece.boundary(node), piece.calls[node]
        if shared is not None:
            local[node] = names.setdefault(shared, f"i{len(names)}")
            lines.append(f"{local[node]} = {kind_text(val(shared))} {is_weight(shared)}")
        elif call.op == "get_attr":
            tensor = piece.attributes(str(call.target))
            local[node] = names.setdefault(id(tensor), f"w{len(names)}")
            lines.append(f"{local[node]} = {kind_text(tensor)} {memory(tensor, names)}")
        else:
            local[node] = f"v{len(local)}"
            lines.append(f"{local[node]} = {call.target} {text(call.args, local)} {text(call.kwargs, local)}")
    return [*lines, f"return {[local[node] for node in piece.outputs]}"]


def memory(tensor: torch.Tensor, names: dict[Any, str]) -> str:
    """Which memory it lies in, and where: parts of one merged weight are told apart."""
    storage = names.setdefault(("memory", tensor.untyped_storage()._cdata), f"m{len(names)}")
    return f"{storage}+{tensor.storage_offset()}"


def text(given: Any, local: Mapping[Node, str]) -> str:
    return str(map_aggregate(given, lambda leaf: local[leaf] if isinstance(leaf, Node) else repr(leaf)))


def rounds_weights(old: Subprogram, new: Subprogram) -> bool:
    """Whether the replacement reads a weight that the transform computed. One that was merged is no such: the
    original's weights are views of it."""
    known = weight_tensors(old)
    memory = {tensor.untyped_storage()._cdata for tensor in known.values()}
    made = (tensor for key, tensor in weight_tensors(new).items() if key not in known)
    return any(tensor.untyped_storage()._cdata not in memory for tensor in made)


def weights_differ(old: Subprogram, new: Subprogram) -> bool:
    """Whether one side reads weights that the other does not."""
    return weights(new) != weights(old)


def flat_storages(old: Subprogram, new: Subprogram) -> frozenset[int]:
    """Memory that both sides read weights of, where each has one value throughout: the ones of a norm that was
    never trained, the zeros of a bias. Their order, and whether they are read at all, would not show."""
    sides = [by_storage(piece) for piece in (old, new)]
    shared = sides[0].keys() & sides[1].keys()
    return frozenset(one for one in shared if all(map(is_flat, (*sides[0][one], *sides[1][one]))))


def flat_left_out(old: Subprogram, new: Subprogram) -> list[Tensor]:
    """Weights with one value throughout that the replacement does not read."""
    read = by_storage(new)
    found = (tensor for storage, group in by_storage(old).items() if storage not in read for tensor in group)
    return [tensor for tensor in found if is_flat(tensor)]


def by_storage(piece: Subprogram) -> dict[int, list[Tensor]]:
    groups: dict[int, list[Tensor]] = {}
    for tensor in weight_tensors(piece).values():
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    return groups


def is_flat(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point() or tensor.numel() < 2:
        return False
    some = tensor.detach().reshape(-1)[:64]  # enough for nearly all weights that are not
    return all(bool((part == some[0]).all()) for part in (some, tensor.detach()))


def weights(piece: Subprogram) -> set[int]:
    return set(weight_tensors(piece))


def weight_tensors(piece: Subprogram) -> dict[int, Tensor]:
    """By identity."""
    calls = (piece.calls[node] for node in piece.program if piece.boundary(node) is None)
    found = [piece.attributes(str(call.target)) for call in calls if call.op == "get_attr"]
    return {id(one): one for one in found}
