"""One token further, for every row of a batch that decodes, in plain torch: what packing a batch does on the host.

    command of the row ─▶ its table          entry: a block of the table changes; LEAVE: the row becomes padding
    length + 1         ─▶ position, slot     of live rows; padding stays at its one token in the padding block
    last token         ─▶ input              a token below 0 tells the host something and is fed as 0

Padding rows all write the first place of the padding block, which nobody else reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOTHING, LEAVE = -1, -2  # in `entries`


def advance_rows(
    tokens: Tensor, seq_lens: Tensor, live: Tensor, entries: Tensor, blocks: Tensor, block_tables: Tensor,
    padding: int, block_size: int,
) -> Tensor:  # fmt: skip
    """All [B] int64, block_tables [B, width] → [3, B]: input ids, positions, slot mapping.

    seq_lens, live, entries (NOTHING once obeyed) and block_tables are written in place. seq_lens: tokens in the
    cache, after the step with the one it feeds. live: 1, or 0 for padding. entries, blocks: which block of the row's
    table changes, and to what.
    """
    leaving = entries == LEAVE
    entry = entries.clamp(min=0)[:, None]  # [B, 1]
    told = torch.where(entries >= 0, blocks, block_tables.gather(1, entry)[:, 0])
    block_tables.scatter_(1, entry, torch.where(leaving, padding, told)[:, None])
    live.masked_fill_(leaving, 0)
    seq_lens.add_(1).masked_fill_(live == 0, 1)
    entries.fill_(NOTHING)
    positions = seq_lens - 1
    block = block_tables.gather(1, (positions // block_size)[:, None])[:, 0]
    return torch.stack((tokens.clamp(min=0), positions, block * block_size + positions % block_size))
