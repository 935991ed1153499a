"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graft.runtime.core import Request


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """One token a request. logits: [n, vocab]. Greedy rows take the largest; others draw with their own generator."""
    tokens = logits.argmax(dim=-1).tolist()
    for row, request in enumerate(requests):
        if request.params.temperature > 0:
            row_logits = logits[row].double().cpu()
            scaled = (row_logits - row_logits.max()) / request.params.temperature  # the largest is 0: no overflow
            tokens[row] = int(torch.multinomial(scaled.softmax(-1), 1, generator=request.generator))
    return tokens


def make_generator(seed: int | None) -> torch.Generator:
    """A generator of its own for a request, so that its text does not depend on the batch around it."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
