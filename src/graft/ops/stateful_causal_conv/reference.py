"""A causal convolution over packed sequences, each of which goes on from what it saw last."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.causal_conv.reference import NONE, activated
from graft.ops.packed_states import held_states, parts_of


def stateful_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, state_slots: Tensor, token_to_seq: Tensor,  # noqa: ARG001
    cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, activation: str = NONE,
) -> Tensor:  # fmt: skip
    """x: [1, c, T], weight: [c, k], state: [slots, c, k - 1], the last inputs of each sequence, which are written →
    [1, c, T]."""
    held, taps = held_states(state, state_slots, cu_seqlens, seq_lens), weight.shape[1]
    out = torch.empty_like(x)
    for part in parts_of(lens_cpu):
        seen = torch.cat((held[part.row].to(x.dtype), x[0, :, part.first : part.last]), dim=1)
        found = F.conv1d(seen[None].to(weight.dtype), weight[:, None], bias, groups=weight.shape[0])
        out[0, :, part.first : part.last] = activated(found[0], activation).to(x.dtype)
        held[part.row] = seen[:, seen.shape[1] - (taps - 1) :].to(state.dtype)
    state.index_copy_(0, state_slots, held)
    return out


def stateful_causal_conv_windows(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, state_slots: Tensor, token_to_seq: Tensor,
    cu_seqlens: Tensor, seq_lens: Tensor, lens_cpu: Tensor, activation: str = NONE,
) -> Tensor:  # fmt: skip
    """The same for all sequences at once, tap by tap; no size is read from a device."""
    held, taps = held_states(state, state_slots, cu_seqlens, seq_lens), weight.shape[1]
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows, fed = x[0].T, len(state_slots)  # [T, c]
    if rows.shape[0] == fed and bool((lens_cpu[:, 0] == 1).all()):
        seen = torch.cat((held, rows[:, :, None].to(held.dtype)), dim=2)
        out = (seen.to(wide) * weight.to(wide)).sum(2)
        held = seen[:, :, 1:]
    else:
        here = torch.arange(rows.shape[0], device=x.device)
        inside = here - cu_seqlens[token_to_seq]  # the place of a token among those that its sequence brings
        out = torch.zeros(rows.shape, dtype=wide, device=x.device)
        for tap in range(taps):
            back = taps - 1 - tap
            older = held[token_to_seq, :, (inside + tap).clamp(max=taps - 2)].to(rows.dtype)
            seen = torch.where((inside >= back)[:, None], rows[(here - back).clamp(min=0)], older)
            out += seen.to(wide) * weight[:, tap].to(wide)
        held = last_inputs(rows, held, cu_seqlens)
    if bias is not None:
        out = out + bias.to(wide)
    state.index_copy_(0, state_slots, held.to(state.dtype))
    return activated(out.to(weight.dtype), activation).to(x.dtype).T[None]


def last_inputs(rows: Tensor, held: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[n, c, k - 1]: the last of what each sequence held [n, c, k - 1] and of the rows [T, c] that it brings."""
    kept = torch.arange(held.shape[2], device=rows.device)
    brought = cu_seqlens.diff()[:, None]
    place = brought - held.shape[2] + kept  # [n, k - 1], among the rows of the sequence; below 0: held before
    fed = rows[(cu_seqlens[:-1, None] + place).clamp(0, max(rows.shape[0] - 1, 0))].transpose(1, 2)
    older = held.gather(2, (kept + brought).clamp(max=held.shape[2] - 1)[:, None].expand(held.shape))
    return torch.where((place >= 0)[:, None], fed.to(held.dtype), older)
