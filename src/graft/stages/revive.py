"""Records from what `asdict` and JSON made of them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def revive(kind: type[T], data: Mapping[str, Any]) -> T:
    """A record from what `asdict` and JSON made of it; an unknown key is an error, a missing one has its default."""
    hints = get_type_hints(kind)
    unknown = set(data) - {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**{name: revive_value(hints[name], value) for name, value in data.items()})


def revive_value(hint: Any, value: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        chosen = [one for one in get_args(hint) if is_dataclass(one)]
        return revive_value(chosen[0], value) if chosen and isinstance(value, Mapping) else value
    if get_origin(hint) is tuple:
        return tuple(revive_value(get_args(hint)[0], item) for item in value)
    if is_dataclass(hint) and isinstance(hint, type):
        return revive(hint, value)
    return value
