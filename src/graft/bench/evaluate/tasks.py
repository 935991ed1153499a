"""The tasks that ship with graft: questions with a few answers each, of which the first is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graft.base.errors import UsageError, near
from graft.base.yaml_file import read_yaml

FOLDER = Path(__file__).parent
TEXT = FOLDER / "lighthouse.txt"  # written for graft: no model was trained on it


@dataclass(frozen=True)
class EvalQuestion:
    prompt: str
    choices: tuple[str, ...]  # the first is right; how they are asked shows no order


@dataclass(frozen=True)
class EvalTask:
    name: str
    about: str
    questions: tuple[EvalQuestion, ...]

    @property
    def chance(self) -> float:
        """What guessing would reach."""
        return sum(1 / len(one.choices) for one in self.questions) / len(self.questions)


@cache
def all_tasks() -> dict[str, EvalTask]:
    return {file.stem: read_task(file) for file in sorted((FOLDER / "tasks").glob("*.yaml"))}


def read_task(file: Path) -> EvalTask:
    """about: a line; items: [prompt, [right, wrong, …]] each."""
    data = read_yaml(file)
    try:
        found = tuple(EvalQuestion(prompt, tuple(choices)) for prompt, choices in data["items"])
        about = str(data["about"])
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(f"{file}: a task has `about` and `items` of [prompt, [right, wrong, …]]: {error}") from error
    for one in found:
        texts = (one.prompt, *one.choices)
        if not all(isinstance(text, str) and text for text in texts) or len(set(one.choices)) < 2:
            raise UsageError(f"{file}: {one.prompt!r}: a prompt and at least two different answers, all text")
    if not found:
        raise UsageError(f"{file} has no questions")
    return EvalTask(file.stem, about, found)


def find_tasks(names: Sequence[str]) -> tuple[EvalTask, ...]:
    """`all`, `none`, names of shipped tasks, or YAML files of the same form."""
    known = all_tasks()
    if list(names) == ["all"]:
        return tuple(known.values())
    if list(names) == ["none"]:
        return ()
    found = []
    for name in names:
        if name.endswith(".yaml"):
            found.append(read_task(Path(name)))
        elif name in known:
            found.append(known[name])
        else:
            raise UsageError(f"no task {name!r}{near(name, known)}: all, none, {', '.join(known)} or a .yaml file")
    return tuple(found)


def shipped_text() -> str:
    return TEXT.read_text()
