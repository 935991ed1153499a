"""Attention in plain torch: operation for operation what Hugging Face's `sdpa` and `eager` compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ops.half_precision import matmul, widen_problem


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = True,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, nan_rows: bool = False,
) -> Tensor:  # fmt: skip
    """q: [b, h, s, d], k and v: [b, kv, t, d] → [b, s, h, d]. Explicit softmax; supports everything in the schema.

    mask: boolean (True = attend) or additive, broadcastable to [b, h, s, t]; on top of it `is_causal` and `window`
    count positions from the end, so the last query sees the last key. `nan_rows`: what booleans and positions close
    is -inf, and a row that is -inf throughout gives NaN, as plain softmax does; without it such a row is the kernel's
    own matter (zeros from scaled_dot_product_attention).
    """
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_heads(k, groups), repeat_heads(v, groups)
    scores = matmul(q, k.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    for part in (mask, positions_mask(q.shape[2], k.shape[2], is_causal, window, q.device)):
        if part is not None:
            scores = scores + additive(part, scores.dtype, nan_rows)
    if sinks is None:
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    else:
        weights = softmax_with_sinks(scores, sinks).to(v.dtype)
    return matmul(weights, v).transpose(1, 2).contiguous()


def attention_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = True,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,  # noqa: ARG001
    nan_rows: bool = False,
) -> Tensor:  # fmt: skip
    """The same through torch's scaled_dot_product_attention; no soft cap, no sinks."""
    s, t = q.shape[2], k.shape[2]
    plain = mask is None and (window is None or t < window) and (not is_causal or s == t or s == 1)
    if not plain:
        positions = positions_mask(s, t, is_causal, window, q.device)
        mask = combine(mask, positions, nan_rows)
    groups = q.shape[1] // k.shape[1]
    grouped = groups > 1 and mask is None and k.shape[-1] == v.shape[-1] <= 256
    if groups > 1 and not grouped:
        k, v = repeat_heads(k, groups), repeat_heads(v, groups)
    causal = is_causal and mask is None and s > 1
    out = sdpa(q, k, v, mask, scale, causal, grouped)
    if nan_rows and mask is not None:
        out = out.masked_fill(closed_rows(mask), torch.nan)
    return out.transpose(1, 2).contiguous()


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool = False, grouped: bool = False
) -> Tensor:
    """torch's scaled_dot_product_attention, in float32 where the CPU multiplies 16-bit matrices slowly."""
    dtype = q.dtype
    if widen_problem(q, k, v) is None:  # 512 tokens of 9 heads in bfloat16: 40 ms instead of 6.9 s on a Neoverse-N1
        q, k, v = (t.to(torch.float32) for t in (q, k, v))
        mask = mask if mask is None or mask.dtype is torch.bool else mask.to(torch.float32)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, is_causal=is_causal, enable_gqa=grouped
    )
    return out.to(dtype)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """[b, kv, t, d] → [b, kv * groups, t, d]."""
    b, kv, t, d = x.shape
    return x if groups == 1 else x[:, :, None].expand(b, kv, groups, t, d).reshape(b, kv * groups, t, d)


def positions_mask(s: int, t: int, is_causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """[1, 1, s, t], True where a query may look: not ahead, and not further back than the window."""
    if not is_causal and window is None:
        return None
    query = torch.arange(t - s, t, device=device)[:, None]
    key = torch.arange(t, device=device)[None, :]
    allowed = key <= query if is_causal else torch.ones(s, t, dtype=torch.bool, device=device)
    if window is not None:
        allowed = allowed & (key > query - window)
    return allowed[None, None]


def combine(mask: Tensor | None, positions: Tensor | None, nan_rows: bool = False) -> Tensor | None:
    if mask is None or positions is None:
        return positions if mask is None else mask
    if mask.dtype == torch.bool:
        return mask & positions
    return mask + additive(positions, mask.dtype, nan_rows)


def additive(mask: Tensor, dtype: torch.dtype, nan_rows: bool = False) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    closed = -torch.inf if nan_rows else torch.finfo(dtype).min
    return torch.where(mask, torch.tensor(0.0, device=mask.device, dtype=dtype), closed)


def closed_rows(mask: Tensor) -> Tensor:
    """[…, s, 1], True for a query that the mask lets see nothing."""
    return ~mask.any(-1, keepdim=True) if mask.dtype == torch.bool else (mask == -torch.inf).all(-1, keepdim=True)


def softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Softmax over the scores and one more logit a head, which takes its share and gives nothing."""
    b, h, s, _ = scores.shape
    logits = torch.cat([scores, sinks.reshape(1, h, 1, 1).expand(b, h, s, 1)], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
