"""How a request wants its tokens chosen."""

from __future__ import annotations

from dataclasses import dataclass

from graft.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. temperature=0 is greedy; `seed` makes sampling repeatable."""

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, but is {self.max_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise UsageError(f"seed must fit into 64 bits, but is {self.seed}")
        if not self.temperature >= 0:
            raise UsageError(f"temperature must be 0 or more, but is {self.temperature}")
