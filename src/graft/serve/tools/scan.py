"""JSON, one character after another: every rule is a generator that is sent the next character.

A rule begins with a character that its caller has read, and gives back the first one behind it where it had to look
ahead, so that nothing depends on how a text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

Rule = Generator[None, str, str]
Sink = Callable[[str], None]  # takes what was read, character by character
BLANK = " \t\r\n"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = ("true", "false", "null")
DEEPEST = 64


class NotJson(Exception):
    """What came cannot be the beginning of JSON."""


def expect(ok: bool) -> None:
    if not ok:
        raise NotJson


def blank(sink: Sink | None = None) -> Rule:
    """The next character that is not blank."""
    while (found := (yield)) in BLANK:
        if sink is not None:
            sink(found)
    return found


def string(first: str, sink: Sink) -> Generator[None, str, str]:
    """A string, which it gives back as it is meant."""
    expect(first == '"')
    raw = [first]
    sink(first)
    while True:
        found = yield
        raw.append(found)
        if found == '"':
            break
        sink(found)
        if found == "\\":
            raw.append((yield))
            sink(raw[-1])
    try:
        meant = json.loads("".join(raw))
    except ValueError as error:
        raise NotJson from error
    sink('"')
    return meant


def value(first: str, sink: Sink, depth: int = 0) -> Rule:
    """Any value; the first character behind it that is not blank."""
    expect(depth <= DEEPEST)
    if first == '"':
        yield from string(first, sink)
    elif first == "{":
        yield from members(first, sink, depth)
    elif first == "[":
        yield from elements(first, sink, depth)
    else:
        return (yield from plain(first, sink))
    return (yield from blank())


def plain(first: str, sink: Sink) -> Rule:
    """A number, true, false or null: it ends where something else begins."""
    text, found = "", first
    while found not in ",]}" + BLANK:
        expect(found.isascii() and (found.isalnum() or found in "+-."))
        text += found
        sink(found)
        found = yield
    expect(bool(text) and (text in WORDS or NUMBER.fullmatch(text) is not None))
    return (yield from blank()) if found in BLANK else found


def members(first: str, sink: Sink, depth: int) -> Generator[None, str, None]:
    sink(first)
    found = yield from blank(sink)
    while found != "}":
        yield from string(found, sink)
        found = yield from blank(sink)
        expect(found == ":")
        sink(found)
        found = yield from value((yield from blank(sink)), sink, depth + 1)
        found = yield from following(found, sink, "}")
    sink("}")


def elements(first: str, sink: Sink, depth: int) -> Generator[None, str, None]:
    sink(first)
    found = yield from blank(sink)
    while found != "]":
        found = yield from value(found, sink, depth + 1)
        found = yield from following(found, sink, "]")
    sink("]")


def following(found: str, sink: Sink, end: str) -> Rule:
    """A comma and what is behind it, or the end."""
    if found == end:
        return found
    expect(found == ",")
    sink(found)
    behind = yield from blank(sink)
    expect(behind != end)
    return behind
