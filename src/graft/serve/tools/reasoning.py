"""What a model thinks before it answers, where its chat template marks that: <think>…</think>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graft.base.errors import UsageError, near
from graft.serve.tools.parser import overlap


@dataclass(frozen=True)
class ThinkMarks:
    opening: str
    closing: str


THINK = ThinkMarks("<think>", "</think>")
MISTRAL = ThinkMarks("[THINK]", "[/THINK]")
AUTO, NONE = "auto", "none"
# names of vLLM's --reasoning-parser
MARKS = {"deepseek_r1": THINK, "qwen3": THINK, "mistral": MISTRAL}


def check_reasoning(name: str) -> None:
    known = [AUTO, NONE, *MARKS]
    if name not in known:
        raise UsageError(f"--reasoning-parser: unknown name {name!r}{near(name, known)}")


def marks_of(asked: str, template: str | None) -> ThinkMarks | None:
    """By name; or those that the chat template has."""
    if asked != AUTO:
        return MARKS.get(asked)
    return next((marks for marks in (THINK, MISTRAL) if marks.closing in (template or "")), None)


def begins_inside(marks: ThinkMarks, prompt: str) -> bool:
    """Whether the prompt ends with the opening mark: then the answer begins with thoughts."""
    return prompt.rstrip().endswith(marks.opening)


@dataclass(eq=False)
class ThinkParser:
    """Splits a text as it comes into thoughts and the rest. Thoughts stand at the beginning or nowhere; blanks round
    them belong to neither."""

    marks: ThinkMarks
    state: Literal["before", "inside", "behind", "done"] = "before"
    rest: str = ""  # not yet decided upon
    begun: bool = False  # a thought that is not blank has come

    def feed(self, text: str) -> tuple[str, str]:
        """Thoughts, and what is none."""
        if self.state == "done":
            return "", text
        self.rest += text
        if self.state == "before" and not self.enter():
            return "", self.leave()
        thought = self.inside() if self.state == "inside" else ""
        if self.state == "behind" and (found := self.rest.lstrip()):
            self.state, self.rest = "done", ""
            return thought, found
        return thought, ""

    def enter(self) -> bool:
        """Whether thoughts begin, or may still begin."""
        found = self.rest.lstrip()
        if found.startswith(self.marks.opening):
            self.state, self.rest = "inside", found[len(self.marks.opening) :]
        return self.state == "inside" or self.marks.opening.startswith(found)

    def leave(self) -> str:
        self.state, text, self.rest = "done", self.rest, ""
        return text

    def inside(self) -> str:
        """Up to the closing mark, or what may be its beginning; blanks at the end wait."""
        thought, mark, behind = self.rest.partition(self.marks.closing)
        if mark:
            self.state, self.rest = "behind", behind
            thought = thought.rstrip()
        else:
            held = overlap(self.rest, self.marks.closing)
            thought = self.rest[: len(self.rest) - held].rstrip()
            self.rest = self.rest[len(thought) :]
        if not self.begun:
            thought = thought.lstrip()
            self.begun = bool(thought)
        return thought

    def finish(self) -> tuple[str, str]:
        """At the end of the text: what was held back."""
        text, self.rest = self.rest, ""
        if self.state == "inside":
            return (text if self.begun else text.lstrip()).rstrip(), ""
        return "", text if self.state == "before" else ""
