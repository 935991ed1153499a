"""Values of a JSON body, each checked: what is wrong is a 400 that names the field. null is the same as left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from graft.base.errors import HttpRefused

Json = Mapping[str, Any]
Refused = Mapping[str, tuple[Callable[[Any], bool], str]]  # field: (values that ask for nothing, what is refused)
KINDS: dict[type, str] = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null",
}  # fmt: skip


def parse_json(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw.decode(), parse_constant=not_json)
    except RecursionError as error:
        raise HttpRefused("the body is nested too deeply") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise HttpRefused(f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise HttpRefused(f"the body must be a JSON object, but is {kind_of(found)}")
    return found


def not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def kind_of(value: object) -> str:
    return KINDS.get(type(value), "a number")


def wrong(param: str, expected: str, value: object) -> HttpRefused:
    shown = json.dumps(value) if isinstance(value, (bool, int, float)) else kind_of(value)
    return HttpRefused(f"{param} must be {expected}, but is {shown}", param=param)


def boolean(body: Json, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def whole(body: Json, name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise wrong(name, f"a whole number from {least} to {most}", value)
    return value


def mapping(body: Json, name: str) -> Json:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(name, "an object", value)
    return value


def text(value: object, param: str) -> str:
    """A string that UTF-8 can write: JSON may hold half of a surrogate pair."""
    if not isinstance(value, str):
        raise wrong(param, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise HttpRefused(f"{param} is not valid text: {error.reason}", param=param) from error
    return value


def token_ids(value: object, param: str, vocabulary: int) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise wrong(param, "a list of token ids", value)
    if value and (min(value) < 0 or max(value) >= vocabulary):
        strange = next(one for one in value if not 0 <= one < vocabulary)
        raise HttpRefused(f"{param}: token id {strange} is outside the vocabulary of {vocabulary}", param=param)
    return value


def refuse_fields(body: Json, table: Refused) -> None:
    """Nothing that a client relies on is silently left out."""
    for name, (harmless, why) in table.items():
        if body.get(name) is not None and not harmless(body[name]):
            raise HttpRefused(f"{name}: {why}", param=name, code="unsupported_parameter")


def one_of(body: Json, names: Sequence[str]) -> str | None:
    """The first of these fields that is there."""
    return next((name for name in names if body.get(name) is not None), None)
