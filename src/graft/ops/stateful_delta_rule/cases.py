"""The gated delta rule over batches of packed sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graft.ops.cases import Case
from graft.ops.gated_delta_rule.cases import operands
from graft.ops.packed_states import make_layout, make_state


def make(
    new: tuple[int, ...], old: tuple[int, ...], h: int, d_k: int, d_v: int, l2_norm: bool,
    device: str, dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Any, ...]:  # fmt: skip
    given = operands(1, sum(new), h, d_k, d_v, device, dtype, generator)
    state = make_state((h, d_k, d_v), len(new), device, torch.promote_types(dtype, torch.float32), generator)
    layout = make_layout(new, old, device)
    del layout["token_to_seq"]
    return *given, state, *layout.values(), l2_norm


def wrong(args: list[Any]) -> list[Any]:
    """Values that are a little too large."""
    return [*args[:2], args[2] * 1.05, *args[3:]]


CASES = [
    Case("qwen3-next decode", partial(make, (1, 1, 1), (4, 1, 70), 4, 128, 128, True), 128),
    Case("decode, prompts, a chunk", partial(make, (1, 1, 65, 3, 1), (9, 2, 0, 64, 5), 2, 16, 32, True), 65 * 16),
    Case("a sequence without tokens", partial(make, (1, 0, 4), (3, 5, 0), 2, 16, 16, True), 64),
]
