"""The gated delta rule over packed sequences, each of which goes on from its own state."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.gated_delta_rule.reference import in_chunks, token_by_token
from graft.ops.packed_states import held_states, parts_of


def stateful_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, lens_cpu: Tensor, l2_norm: bool = False,
) -> Tensor:  # fmt: skip
    """q, k: [1, T, h, d_k], v: [1, T, h, d_v], g, beta: [1, T, h], state: [slots, h, d_k, d_v], which is written →
    [1, T, h, d_v]."""
    held = held_states(state, state_slots, cu_seqlens, seq_lens)
    out = torch.zeros_like(v, dtype=q.dtype)
    for part in parts_of(lens_cpu):
        here, row = slice(part.first, part.last), slice(part.row, part.row + 1)
        some = [x[:, here] for x in (q, k, v, g, beta)]
        out[:, here], held[row] = token_by_token(some, held[row].to(wide(q)), l2_norm)
    state.index_copy_(0, state_slots, held)
    return out


def stateful_delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, lens_cpu: Tensor, l2_norm: bool = False,
) -> Tensor:  # fmt: skip
    """Single tokens, which come first in a batch, are one step of all their sequences; longer ones go in chunks."""
    held = held_states(state, state_slots, cu_seqlens, seq_lens)
    parts = list(parts_of(lens_cpu))
    single = next((i for i, part in enumerate(parts) if part.row != i or part.last - part.first > 1), len(parts))
    out = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    if single:
        some = [x[0, :single, None] for x in (q, k, v, g, beta)]
        found, held[:single] = token_by_token(some, held[:single].to(wide(q)), l2_norm)
        out[0, :single] = found[:, 0]
    for part in parts[single:]:
        here, row = slice(part.first, part.last), slice(part.row, part.row + 1)
        some = [x[:, here] for x in (q, k, v, g, beta)]
        out[:, here], held[row] = in_chunks(some, held[row].to(wide(q)), l2_norm)
    state.index_copy_(0, state_slots, held)
    return out


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
