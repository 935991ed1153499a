"""What a benchmark measures, and what can be told to be wrong with it before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.base.errors import PromptTooLong, UsageError, near
from graft.bench.baselines.hf import BASELINES
from graft.models.registry import entries

SPARE_TOKENS = 48  # of a sequence in the cache: blocks are filled up, and a step may be planned before one has ended


@dataclass(frozen=True)
class Cell:
    """One batch size and one length of prompts; every engine gets a row for it."""

    batch: int
    prompt: int


@dataclass(frozen=True)
class BenchPlan:
    """What is measured. `new` counts the tokens after the first.

    time_limit: seconds after which no baseline is begun; one whose first calls took longer before than what is left
    is not begun either. None: no limit. threads: of every engine on a CPU; None leaves them as they are.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompts: tuple[int, ...] = (128,)
    new: int = 32
    repeats: int = 3
    against: tuple[str, ...] = ("eager", "compile")
    time_limit: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, values in (("batch", self.batches), ("prompt", self.prompts), ("new", (self.new,))):
            if min(values, default=0) < 1:
                raise UsageError(f"--{name} must be at least 1, but is {min(values) if values else 'empty'}")
        if self.repeats < 1:
            raise UsageError(f"--repeats must be at least 1, but is {self.repeats}")
        if self.time_limit is not None and self.time_limit <= 0:
            raise UsageError(f"--time-limit must be more than 0 seconds, but is {self.time_limit}")
        unknown = next((name for name in self.against if name not in BASELINES), None)
        if unknown is not None:
            raise UsageError(f"--against: unknown baseline {unknown!r}{near(unknown, (*BASELINES, 'none'))}")

    def cells(self) -> Iterator[Cell]:
        for prompt in self.prompts:
            for batch in self.batches:
                yield Cell(batch, prompt)

    def length(self, cell: Cell) -> int:
        """Tokens of a sequence at its end."""
        return cell.prompt + 1 + self.new

    def check_context(self, context: int | None) -> None:
        longest = max(self.prompts)
        if context is not None and longest + 1 + self.new > context:
            raise PromptTooLong(longest, 1 + self.new, context)

    def cache_tokens(self) -> int:
        """Tokens that graft's cache must hold at once; taking all free memory would leave none to the baselines."""
        return max(cell.batch * (self.length(cell) + SPARE_TOKENS) for cell in self.cells())


def known_context(model: str) -> int | None:
    """The context of a model as far as it can be told without loading it."""
    settings: Any = {}
    if model in entries():
        settings = entries()[model].settings
    elif (file := Path(model) / "config.json").is_file():
        try:
            settings = json.loads(file.read_text())
        except ValueError:
            return None  # loading the model says what is wrong with the file
    if not isinstance(settings, Mapping):
        return None
    return settings.get("max_position_embeddings") or settings.get("n_positions")
