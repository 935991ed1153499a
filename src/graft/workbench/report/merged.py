"""Weights that a transform put together, by the names of all their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graft.ir.facts import Item
from graft.passes.report import TransformRecord

Parts = Mapping[str, tuple[str, ...]]  # by target


def add_merged(
    parts: dict[str, tuple[str, ...]], record: TransformRecord, before: Sequence[Item], after: Sequence[Item]
) -> None:
    """`qkv_proj.weight` is q_proj.weight, k_proj.weight and v_proj.weight: what the replaced calls read there."""
    old = {item.name: item for item in before}
    new = {item.name: item for item in after}
    for match in record.matches:
        made = [new[name] for name in match.made if name in new and new[name].op == "weight"]
        replaced = [old[name] for name in match.replaced if name in old]
        for weight in made:
            slots = {
                s for item in after_readers(weight, match.made, new) for s, i in item.inputs if i == weight.index
            }
            read = [before[i] for item in replaced for slot, i in item.inputs if slot in slots]
            names = dict.fromkeys(
                item.target for item in read if item.op == "weight" and item.target != weight.target
            )
            whole = tuple(dict.fromkeys(part for name in names for part in parts.get(name, (name,))))
            if len(whole) > 1:
                parts[weight.target] = whole


def after_readers(weight: Item, made: Sequence[str], new: Mapping[str, Item]) -> list[Item]:
    found = [new[name] for name in made if name in new]
    return [item for item in found if any(index == weight.index for _, index in item.inputs)]


def parts_of(item: Item, items: Sequence[Item], parts: Parts) -> tuple[str, ...]:
    """Of a weight, or of the weight that a call reads."""
    if item.op == "weight":
        return parts.get(item.target, ())
    read = (items[index] for _, index in item.inputs if items[index].op == "weight")
    return next((parts[weight.target] for weight in read if weight.target in parts), ())
