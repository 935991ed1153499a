"""What a baseline is made from, and the two kinds there are: those that run the Hugging Face module, and engines with
weights of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from graft.base.errors import PeerNotRun
from graft.models.loaded import LoadedModel


@dataclass(frozen=True)
class Task:
    """length: tokens of a sequence at its end. source: what the model was loaded from, as the user named it.
    threads: on a CPU; None leaves the choice to the baseline."""

    model: LoadedModel
    length: int
    batch: int = 1
    source: str = ""
    threads: int | None = None


class BenchEngine(Protocol):
    name: str

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]: ...


@runtime_checkable
class Peer(BenchEngine, Protocol):
    """An engine of its own: made at its first call, so that this time is its setup, and closed after its last."""

    def step_bytes(self, batch: int, tokens: float) -> float:
        """What a decode step reads in this engine's own formats."""
        ...

    def close(self) -> None: ...


def need(module: str, package: str, engine: str) -> None:
    """Raises PeerNotRun, with how to get it, where the user has not installed it."""
    if importlib.util.find_spec(module) is None:
        raise PeerNotRun(f"{package} is not installed; for a row of {engine}: pip install {package}")
