"""A request that gets a token, and what it was before."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graft.engine.core import Request


@dataclass(frozen=True, eq=False)
class Due:
    """A request that gets a token from a row of the logits, and what it was before."""

    request: Request
    row: int
    length: int  # tokens that it has then
    state: Tensor | None  # of its generator

    @staticmethod
    def of(request: Request, row: int) -> Due:
        generator = None if request.params.greedy else request.generator
        state = None if generator is None else generator.get_state()
        return Due(request, row, request.length, state)

    def restore(self) -> None:
        if self.request.generator is not None and self.state is not None:
            self.request.generator.set_state(self.state)
