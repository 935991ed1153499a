"""graft::attention: what Hugging Face's attention hook becomes in a captured graph."""

from __future__ import annotations

from torch import Tensor

from graft.ops.attention.reference import attention, attention_sdpa
from graft.ops.spec import Kernel, OpSpec, define


def fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = True,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def sdpa_supports(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = True,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> str | None:  # fmt: skip
    if softcap is not None:
        return "scaled_dot_product_attention has no soft cap"
    return "scaled_dot_product_attention has no sinks" if sinks is not None else None


SPEC = define(
    OpSpec(
        name="attention",
        schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool is_causal=True, int? window=None,"
        " float? softcap=None, Tensor? sinks=None) -> Tensor",
        reference=attention,
        fake=fake,
        kernels=(Kernel("sdpa", "existing_kernel", attention_sdpa, sdpa_supports),),
    )
)
