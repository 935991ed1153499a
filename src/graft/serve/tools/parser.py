"""From text as it comes to content and calls. What a stream gives, put together, is what the whole text gives."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from dataclasses import dataclass, field

from graft.serve.tools.formats import ToolFormat
from graft.serve.tools.scan import NotJson, Rule, blank, expect, members, string, value

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class CallDelta:
    """More of a call: its name, once, or a piece of its arguments, which are JSON when put together."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(eq=False)
class ToolParser:
    """names: of the functions that may be called; what looks like a call of another one is content. So is what is no
    JSON, unless its name is told already: then the call ends there, and what follows is content."""

    format: ToolFormat
    names: Collection[str]
    most: int | None = None  # calls; what looks like more is read and left out
    rest: str = ""  # not yet decided upon
    blanks: str = ""  # held back: content if content follows, nothing if a call does
    region: str = ""  # what was read since the marker of a call
    rule: Generator[None, str, None] | None = None  # in the middle of calls
    calls: int = 0
    told: bool = False  # the name of the call that is read
    broken: bool = False  # a call that was told never came to its end
    between: bool = False  # no call is half read
    begun: bool = False  # something that is not blank has come
    out: list[str | CallDelta] = field(default_factory=list)

    def feed(self, text: str) -> list[str | CallDelta]:
        """Content (a string) and calls, in their order."""
        self.rest += text
        while self.rest and (self.read_call() if self.rule is not None else self.read_text()):
            pass
        return self.take()

    def finish(self) -> list[str | CallDelta]:
        """At the end of the text."""
        if self.rule is not None and not self.between:
            self.give_up("", "")
        self.content(self.rest)
        self.rest = ""
        if not self.calls and self.blanks:
            self.out.append(self.blanks)
        return self.take()

    def take(self) -> list[str | CallDelta]:
        """Pieces of the same, put together."""
        found: list[str | CallDelta] = []
        for one in self.out:
            last = found[-1] if found else None
            if isinstance(one, str) and isinstance(last, str):
                found[-1] = last + one
            elif isinstance(one, CallDelta) and isinstance(last, CallDelta) and one.index == last.index:
                found[-1] = CallDelta(last.index, last.name, last.arguments + one.arguments)
            else:
                found.append(one)
        self.out = []
        return found

    def content(self, text: str) -> None:
        """Blanks at its end wait."""
        if not text:
            return
        kept = text.rstrip()
        if kept:
            self.out.append(self.blanks + kept)
            self.blanks = ""
        self.blanks += text[len(kept) :]

    def read_text(self) -> bool:
        """Whether a call begins; else all is content but what may be the beginning of a marker."""
        if self.format.bare and not self.begun:
            text = self.rest.lstrip()
            if not text:
                return False
            if text[0] in self.format.bare:
                self.content(self.rest[: -len(text)])
                return self.begin("", text)
        found = [(at, marker) for marker in self.format.openings if (at := self.rest.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self.content(self.rest[:at])
            return self.begin(marker, self.rest[at + len(marker) :])
        held = max((overlap(self.rest, marker) for marker in self.format.openings), default=0)
        text, self.rest = self.rest[: len(self.rest) - held], self.rest[len(self.rest) - held :]
        self.begun = self.begun or bool(text.strip())
        self.content(text)
        return False

    def begin(self, marker: str, rest: str) -> bool:
        self.region, self.rest, self.begun = marker, rest, True
        self.told = self.between = False
        self.rule = self.call_list()
        next(self.rule)
        return True

    def read_call(self) -> bool:
        """Whether the calls have ended, or were none."""
        assert self.rule is not None
        for at, letter in enumerate(self.rest):
            self.region += letter
            try:
                self.rule.send(letter)
            except StopIteration:
                behind = self.rest[at + 1 :] if self.between else self.rest[at:]
                self.rest, self.rule = behind, None
                return True
            except NotJson:
                self.give_up(letter, self.rest[at + 1 :])
                return True
        self.rest = ""
        return False

    def give_up(self, letter: str, rest: str) -> None:
        """It was no call: its text is content, marker and all; or it was one, up to this letter."""
        inside = self.told and not self.between
        self.broken = self.broken or (inside and self.shown)
        self.rest, self.rule = rest, None
        self.content(letter if inside else self.region)

    def call_list(self) -> Generator[None, str, None]:
        """One region: a call, a list of them, or one after another; and how it ends."""
        first = yield from blank()
        if self.format.named and first not in "[{":
            yield from self.named_call(first)
            return
        if first == "[":
            found = yield from blank()
            while found != "]":
                yield from self.call(found)
                found = yield from blank()
                expect(found in ",]")
                found = (yield from blank()) if found == "," else found
            self.end_call()
        else:
            yield from self.call(first)
        if self.format.closing or self.format.separator:
            yield from self.region_end()

    def region_end(self) -> Generator[None, str, None]:
        """Further calls, and the closing mark. Another character belongs to what follows."""
        closing, separator = self.format.closing, self.format.separator
        while True:
            found = yield from blank()
            if separator and found == separator:
                found = yield from blank()
            elif closing and found == closing[0]:
                for letter in closing[1:]:
                    expect((yield) == letter)
                return
            if found != "{":
                self.between = False  # the character that was read is no part of the region
                return
            self.region = "{"
            yield from self.call(found)

    def named_call(self, first: str) -> Generator[None, str, None]:
        """name[ARGS]{…}, or name{…}."""
        name, found = "", first
        while found not in "{[":
            name += found
            expect(len(name) <= 256)
            found = yield
        if found == "[":
            for letter in "ARGS]":
                expect((yield) == letter)
            found = yield from blank()
        expect(found == "{")
        self.tell(name.strip())
        yield from self.arguments(found, [])
        self.end_call()

    def call(self, first: str) -> Generator[None, str, None]:
        """{"name": …, "arguments": {…}}, in any order, with whatever else."""
        expect(first == "{")
        self.told = self.between = False
        early: list[str] = []  # arguments that came before the name
        given = False
        found = yield from blank()
        while found != "}":
            key = yield from string(found, nothing)
            expect((yield from blank()) == ":")
            first_of_value = yield from blank()
            if key == "name" and not self.told:
                self.tell((yield from string(first_of_value, nothing)))
                self.say("".join(early))
                found = yield from blank()
            elif key in ARGUMENTS and not given:
                given = True
                found = yield from self.arguments_behind(first_of_value, early)
            else:
                found = yield from value(first_of_value, nothing)
            expect(found in ",}")
            found = (yield from blank()) if found == "," else found
        expect(self.told)
        if not given:
            self.say("{}")
        self.end_call()

    def arguments_behind(self, first: str, early: list[str]) -> Rule:
        """An object; or one that is written as a string; or none."""
        if first == '"':
            text = yield from string(first, nothing)
            expect(is_object(text))
            self.add(text, early)
            return (yield from blank())
        if first == "n":
            found = yield from value(first, nothing)
            self.add("{}", early)
            return found
        expect(first == "{")
        yield from self.arguments(first, early)
        return (yield from blank())

    def arguments(self, first: str, early: list[str]) -> Generator[None, str, None]:
        yield from members(first, lambda letter: self.add(letter, early), 0)

    def add(self, text: str, early: list[str]) -> None:
        self.say(text) if self.told else early.append(text)

    def tell(self, name: str) -> None:
        expect(name in self.names)
        self.told, self.blanks = True, ""
        self.calls += 1
        if self.shown:
            self.out.append(CallDelta(self.calls - 1, name))

    @property
    def shown(self) -> bool:
        return self.most is None or self.calls <= self.most

    def say(self, text: str) -> None:
        if text and self.shown:
            self.out.append(CallDelta(self.calls - 1, None, text))

    def end_call(self) -> None:
        self.between, self.region = True, ""


def nothing(_: str) -> None:
    """Takes what nobody wants."""


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
