"""Which node of one graph is which node of another, whatever their names.

Inputs and weights are known by name. A call is the same where it calls the same op on the same things. Around a
difference that no longer holds; there a call is known by its surroundings (what it reads and what reads it, a few
steps far), then by its op, literals and module alone. Every step goes over the nodes once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import count

from graft.ir.facts import Item

RADIUS = 4  # steps of surroundings: a norm taken apart is 7 calls long, so its middle is told from either end
NEAREST = 16  # candidates that are weighed against each other where several would do


class Alignment:
    """Pairs of indices. `before` and `after` are the nodes in order."""

    def __init__(self, before: list[Item], after: list[Item]) -> None:
        self.before, self.after = before, after
        self.to_after: list[int | None] = [None] * len(before)
        self.to_before: list[int | None] = [None] * len(after)
        self.readers = readers(before), readers(after)

    def pair(self, old: int, new: int) -> None:
        self.to_after[old], self.to_before[new] = new, old

    def open_before(self) -> list[Item]:
        return [item for item in self.before if self.to_after[item.index] is None]

    def open_after(self) -> list[Item]:
        return [item for item in self.after if self.to_before[item.index] is None]

    def equal_inputs(self, old: Item, new: Item) -> int:
        theirs = dict(new.inputs)
        return sum(
            self.to_after[index] is not None and self.to_after[index] == theirs.get(s) for s, index in old.inputs
        )


def align(before: list[Item], after: list[Item]) -> Alignment:
    found = Alignment(before, after)
    for kind in ("input", "weight", "output"):
        known = grouped((i for i in before if i.op == kind), lambda i: i.target)
        for target, items in grouped((i for i in after if i.op == kind), lambda i: i.target).items():
            for old, new in zip(known.get(target, ()), items, strict=False):
                found.pair(old.index, new.index)
    spread(found)
    labels = surroundings(found)
    for old_labels, new_labels in reversed(labels):
        pair_equal_groups(found, old_labels, new_labels)
        spread(found)
    lines = [[(labels[0][s][item.index], item.source) for item in items] for s, items in enumerate((before, after))]
    pair_equal_groups(found, lines[0], lines[1])
    spread(found)
    spread(found, loose=True)
    pair_nearest(found, labels[0])
    pair_changed(found)
    return found


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Hashable, list[Item]]:
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def readers(items: list[Item]) -> list[list[tuple[int, str]]]:
    found: list[list[tuple[int, str]]] = [[] for _ in items]
    for item in items:
        for slot, index in item.inputs:
            found[index].append((item.index, slot))
    return found


def spread(found: Alignment, *, loose: bool = False) -> None:
    """Pairs calls of one op on pairs, and what pairs read at one slot, until that adds nothing."""
    for _ in range(RADIUS):  # what a pass in order leaves for the next is short; the levels below find the rest
        if not downward(found, loose) | upward(found):
            return


def downward(found: Alignment, loose: bool) -> bool:
    """The same op with the same literals on paired inputs is the same value. Unless `loose`, a node is left to the
    one that comes from the same line of the same module, where there is one."""
    index = grouped(found.open_before(), lambda i: (i.op, i.target, i.literals, i.inputs))
    offered, wanted = ({origin(item) for item in items} for items in (found.open_before(), found.open_after()))
    paired = False
    for new in found.open_after():
        inputs = tuple((slot, found.to_before[i]) for slot, i in new.inputs)
        candidates = index.get((new.op, new.target, new.literals, inputs))
        if candidates and all(i is not None for _, i in inputs):
            old = min(candidates, key=lambda c: (origin(c) != origin(new), origin(c) in wanted, c.index))
            apart = origin(old) != origin(new) and (origin(old) in wanted or origin(new) in offered)
            if loose or not apart:
                candidates.remove(old)
                found.pair(old.index, new.index)
                paired = True
    return paired


def origin(item: Item) -> Hashable:
    return kind(item), item.source


def upward(found: Alignment) -> bool:
    """Two calls of one op, literals and module that a pair reads at one slot."""
    paired = False
    for new in reversed(found.open_after()):
        for reader, slot in found.readers[1][new.index]:
            old_reader = found.to_before[reader]
            source = None if old_reader is None else dict(found.before[old_reader].inputs).get(slot)
            if source is not None and found.to_after[source] is None and kind(found.before[source]) == kind(new):
                found.pair(source, new.index)
                paired = True
                break
    return paired


def kind(item: Item) -> Hashable:
    return item.op, item.literals, item.module, item.target


def surroundings(found: Alignment) -> list[tuple[list[int], list[int]]]:
    """A label for every node of both graphs, for each radius: equal where that much of the surroundings is equal."""
    numbers: dict[Hashable, int] = defaultdict(count().__next__)
    sides = (found.before, found.after)
    first = [[numbers[own_label(found, item, side)] for item in items] for side, items in enumerate(sides)]
    levels = [(first[0], first[1])]
    for radius in range(1, RADIUS + 1):
        level: list[list[int]] = []
        for own, items, read_by in zip(levels[-1], sides, found.readers, strict=True):
            keys = (
                (
                    radius,
                    own[item.index],
                    tuple((slot, own[i]) for slot, i in item.inputs),
                    tuple(sorted((own[i], slot) for i, slot in read_by[item.index])),
                )
                for item in items
            )
            level.append([numbers[key] for key in keys])
        levels.append((level[0], level[1]))
    return levels


def own_label(found: Alignment, item: Item, side: int) -> Hashable:
    """A pair's is its own; of others: op, literals, module and the weights and inputs that are read."""
    partner = (found.to_after, found.to_before)[side][item.index]
    if partner is not None:
        return ("pair", partner if side else item.index)
    items = (found.before, found.after)[side]
    return kind(item), tuple((slot, items[i].target) for slot, i in item.inputs if items[i].is_leaf)


def pair_equal_groups(found: Alignment, old_labels: Sequence[Hashable], new_labels: Sequence[Hashable]) -> None:
    """Open nodes of one label, in order, where there are as many on both sides."""
    before = grouped(found.open_before(), lambda i: old_labels[i.index])
    for label, items in grouped(found.open_after(), lambda i: new_labels[i.index]).items():
        others = before.get(label, ())
        if len(others) == len(items):
            for old, new in zip(others, items, strict=True):
                found.pair(old.index, new.index)


def pair_nearest(found: Alignment, labels: tuple[list[int], list[int]]) -> None:
    """Open nodes of one label that are more on one side than on the other: most equal inputs first, then in order."""
    before = grouped(found.open_before(), lambda i: labels[0][i.index])
    for label, items in grouped(found.open_after(), lambda i: labels[1][i.index]).items():
        choices = [
            (-found.equal_inputs(old, new), new.index, old.index)
            for new in items
            for old in before.get(label, [])[:NEAREST]
        ]
        pair_best(found, choices)


def pair_changed(found: Alignment) -> None:
    """Of one op and module: other literals on the same inputs, or other inputs that give the same kind of value."""
    before = grouped(found.open_before(), lambda i: (i.op, i.module, i.target))
    for key, items in grouped(found.open_after(), lambda i: (i.op, i.module, i.target)).items():
        choices = []
        for new in items:
            for old in before.get(key, [])[:NEAREST]:
                equal = found.equal_inputs(old, new)
                on_same = equal == len(old.inputs) == len(new.inputs)
                if on_same or (old.literals == new.literals and old.value == new.value and (equal or not old.inputs)):
                    choices.append((-equal, new.index, old.index))
        pair_best(found, choices)


def pair_best(found: Alignment, choices: list[tuple[int, int, int]]) -> None:
    for _, new, old in sorted(choices):
        if found.to_before[new] is None and found.to_after[old] is None:
            found.pair(old, new)
