"""Two iteration notes of a transform, section by section."""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from graft.base.errors import UsageError

HEAD = re.compile(r"# (\S+) on (\S+): (accepted|not accepted)")


@dataclass(frozen=True)
class NoteSection:
    title: str
    status: Literal["same", "changed", "only before", "only after"]
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoteDiff:
    """verdict: before and after."""

    transform: str
    model: str
    verdict: tuple[str, str]
    sections: tuple[NoteSection, ...]

    @property
    def same(self) -> bool:
        return self.verdict[0] == self.verdict[1] and all(one.status == "same" for one in self.sections)

    def to_dict(self) -> dict[str, Any]:
        return {
            "transform": self.transform,
            "model": self.model,
            "verdict": list(self.verdict),
            "same": self.same,
            "sections": [asdict(one) for one in self.sections],
        }


def diff_notes(before: Path, after: Path) -> NoteDiff:
    (name, model, old), first = read_note(before)
    (other, other_model, new), second = read_note(after)
    if (name, model) != (other, other_model):
        raise UsageError(
            f"{before} is about {name} on {model} and {after} about {other} on {other_model}; compare notes of one"
        )
    titles = list(dict.fromkeys((*first, *second)))
    sections = tuple(compared(title, first.get(title), second.get(title)) for title in titles)
    return NoteDiff(name, model, (old, new), sections)


def read_note(file: Path) -> tuple[tuple[str, str, str], dict[str, list[str]]]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} cannot be read: {error}; graft check TRANSFORM --note FILE.md writes one"
        ) from error
    head = HEAD.fullmatch(lines[0]) if lines else None
    if head is None:
        raise UsageError(f"{file} is no note of graft check TRANSFORM --note FILE.md")
    sections: dict[str, list[str]] = {"Versions": []}
    title = "Versions"
    for line in lines[1:]:
        if line.startswith("## "):
            title = line[3:]
            sections[title] = []
        elif line.strip():
            sections[title].append(line)
    return (head[1], head[2], head[3]), sections


def compared(title: str, before: list[str] | None, after: list[str] | None) -> NoteSection:
    if before is None or after is None:
        only = "only after" if before is None else "only before"
        return NoteSection(title, only, tuple(before or ()), tuple(after or ()))
    if before == after:
        return NoteSection(title, "same")
    told = [line for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")]
    removed = tuple(line[2:] for line in told if line.startswith("- "))
    return NoteSection(title, "changed", removed, tuple(line[2:] for line in told if line.startswith("+ ")))
