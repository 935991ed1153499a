"""graft::packed_embedding(weight, scale, indices, columns, dtype)."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.ops.call import Call
from graft.ops.packed_embedding.reference import packed_embedding
from graft.ops.spec import OpSpec, define, native
from graft.weights.tiles import tiles_problem


def fake(weight: Tensor, scale: Tensor, indices: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((*indices.shape, columns), dtype=dtype)


def native_problem(call: Call) -> str | None:
    return tiles_problem(call.weight)


define(
    OpSpec(
        name="packed_embedding",
        schema="(Tensor weight, Tensor scale, Tensor indices, int columns, ScalarType dtype) -> Tensor",
        reference=packed_embedding,
        fake=fake,
        kernels=(native(native_problem),),
    )
)
