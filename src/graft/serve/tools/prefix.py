"""An object of JSON that broke off."""

from __future__ import annotations

import json
from typing import Any

ENDS = {"{": "}", "[": "]"}


def whole_members(text: str) -> dict[str, Any]:
    """The object, as far as its values came whole. text: the beginning of one, or all of it."""
    opened: list[str] = []  # what closes what is open
    end, closing = 0, "{}"  # how far it is whole, and what is missing there
    quoted = escaped = value = False  # value: what is read is no name of a member
    for at, letter in enumerate(text):
        if quoted:
            quoted, escaped = escaped or letter != '"', not escaped and letter == "\\"
            if not quoted and value:
                end, closing = at + 1, "".join(reversed(opened))
            continue
        quoted = letter == '"'
        if letter in ENDS:
            opened.append(ENDS[letter])
        elif letter in "}]":
            opened.pop()
        elif letter == ",":
            end, closing = at, "".join(reversed(opened))
        if letter in "{[}]":
            end, closing = at + 1, "".join(reversed(opened))
        if letter in ":{[,":
            value = letter == ":" or opened[-1] == "]"
    return json.loads(text[:end] + closing)
