"""Rows of a packed table, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.weights.tiles import unpack_rows


def packed_embedding(weight: Tensor, scale: Tensor, indices: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """weight: uint8 [tiles, bytes], scale: [rows, 0] (see fused_linear/tiles.py); indices: [...] → [..., columns]."""
    outside = (indices < 0) | (indices >= scale.shape[0])
    if bool(outside.any()):
        raise IndexError(f"an index is {int(indices[outside][0])}, and the table has {scale.shape[0]} rows")
    return unpack_rows(weight, scale, indices, columns).to(dtype)
