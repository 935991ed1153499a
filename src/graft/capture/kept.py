"""A tensor that a decoder keeps from one step to the next, and whether graft carries it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

KEYS_VALUES = frozenset({"keys", "values"})
CARRIED: Mapping[type, frozenset[str]] = {
    DynamicLayer: KEYS_VALUES,
    DynamicSlidingWindowLayer: KEYS_VALUES | {"_sliding_window_tensor"},  # the window's width, a constant
}
NUMBERED = re.compile(r"(.*?)(?:[.\[](\d+)\b\]?(.*))?$", re.DOTALL)  # up to its first number, and after it


@dataclass(frozen=True)
class StateTensor:
    """A tensor that a model keeps: where it is found, and what holds it."""

    path: str
    holder: type
    name: str  # in its holder
    shape: tuple[int, ...]
    recurrent: bool = False  # it goes through a recurrence that graft captures (recurrence.py)

    @property
    def carried(self) -> bool:
        return self.recurrent or self.name in CARRIED.get(self.holder, ())


def by_layer(states: Sequence[StateTensor]) -> list[str]:
    """`past_key_values.layers 0, 2 (LinearAttentionLayer: conv_states[0], recurrent_states[0])`."""
    groups: dict[tuple[str, type], tuple[dict[str, None], dict[str, None]]] = {}
    for state in states:
        prefix, number, rest = NUMBERED.match(state.path).groups()  # pyrefly: ignore
        layers, names = groups.setdefault((prefix, state.holder), ({}, {}))
        if number is not None:
            layers[number] = None
        names[(rest or "").strip(".")] = None
    texts = []
    for (prefix, holder), (layers, names) in groups.items():
        held = ", ".join(sorted((name for name in names if name), key=KEYS_VALUES.__contains__))
        texts.append(f"{prefix} {', '.join(layers)}".rstrip() + f" ({holder.__name__}{held and ': ' + held})")
    return texts
