"""graft::latent_attention: causal attention over whole sequences, of which every token has one latent row."""

from __future__ import annotations

from torch import Tensor

from graft.ops.latent_attention.reference import latent_attention
from graft.ops.spec import OpSpec, define


def fake(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, scale: float) -> Tensor:
    heads = q.shape[1]
    return q.new_empty(q.shape[0], q.shape[2], heads, weight.shape[0] // heads - q.shape[3] + rope.shape[3])


define(
    OpSpec(
        name="latent_attention",
        schema="(Tensor q, Tensor latent, Tensor rope, Tensor weight, float scale) -> Tensor",
        reference=latent_attention,
        fake=fake,
    )
)
