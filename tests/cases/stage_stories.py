"""Stories of the programs, told once in a process: compiling takes seconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import stage_programs as programs
from graft.stages.story import Story
from graft.stages.tell import tell_story


@cache
def story(name: str, backend: Any = "eager", mode: str | None = None) -> Story:
    return tell_story(
        getattr(programs, name), getattr(programs, f"{name}_inputs")(), target=name, backend=backend, mode=mode
    )


def step() -> Story:
    return story("step", "inductor", "reduce-overhead")
