"""Every spelling of attention that fuse_attention knows, with what it becomes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from attention_cases import (
    INF,
    KV,
    SCALE,
    B,
    D,
    H,
    S,
    attend,
    causal,
    lowest,
    repeat_kv,
)

# ── spellings ───────────────────────────────────────────────────────────────────────────────────────────────────


def plain(q, k, v):
    return attend(q @ k.transpose(-2, -1) * SCALE, v)


def divided(q, k, v):
    return attend(q @ k.mT / math.sqrt(D), v)


def scale_on_q(q, k, v):
    return attend((q * SCALE) @ k.transpose(2, 3), v)


def scale_on_k(q, k, v):
    return attend(q @ (k.transpose(2, 3) * SCALE), v)


def scale_on_both(q, k, v):
    return attend((q * SCALE**0.5) @ (k / (1 / SCALE**0.5)).transpose(2, 3), v)


def scale_thrice(q, k, v):
    return attend((q * 0.5) @ (2 * k).transpose(2, 3) / 3.0, v)


def scale_from_the_left(q, k, v):
    return attend(SCALE * (q @ k.transpose(2, 3)), v)


def no_scale(q, k, v):
    return attend(q @ k.transpose(2, 3), v)


def scale_below_views(q, k, v):
    x = q.transpose(1, 2).reshape(B, S, H * D) * SCALE
    return attend(x.view(B, S, H, D).transpose(1, 2) @ k.transpose(2, 3), v)


def scale_of_a_full_tensor(q, k, v):
    scores = q @ k.transpose(2, 3)
    return attend(scores / torch.full([], D**0.5, dtype=scores.dtype), v)


def softmax_in_the_dtype(q, k, v):
    return F.softmax(q @ k.transpose(2, 3) * SCALE, dim=3) @ v


def float_then_softmax(q, k, v):
    return F.softmax((q @ k.transpose(2, 3) * SCALE).float(), dim=-1).type_as(v) @ v


def inference_dropout(q, k, v):
    weights = F.softmax(q @ k.transpose(2, 3) * SCALE, dim=-1)
    return F.dropout(weights, 0.1, training=False) @ v


def in_place(q, k, v):
    scores = q @ k.transpose(2, 3)
    scores /= math.sqrt(D)
    scores.masked_fill_(~causal(S), INF)
    return F.softmax(scores, -1) @ v


def soft_cap(q, k, v):
    scores = q @ k.transpose(2, 3) * SCALE
    return attend(torch.tanh(scores / 5.0) * 5.0, v)


def soft_cap_by_multiplying(q, k, v):
    scores = q @ k.transpose(2, 3) * SCALE
    return attend(5.0 * torch.tanh(scores * 0.2), v)


def soft_cap_and_mask(q, k, v):
    scores = torch.tanh(q @ k.transpose(2, 3) * SCALE / 5.0) * 5.0
    return attend(scores.masked_fill(~causal(S), lowest(scores)), v)


def grouped(q, k, v):
    return attend(q @ repeat_kv(k, 2).transpose(2, 3) * SCALE, repeat_kv(v, 2))


def grouped_by_interleaving(q, k, v):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, 1)
    return attend(q @ k.transpose(2, 3) * SCALE, v)


def grouped_before_the_transpose(q, k, v):  # [b, s, kv, d], as Meta's Llama has it
    def repeat(x):
        x = x.transpose(1, 2)
        b, t, kv, d = x.shape
        return x[:, :, :, None, :].expand(b, t, kv, 2, d).reshape(b, t, kv * 2, d).transpose(1, 2)

    return attend(q @ repeat(k).transpose(2, 3) * SCALE, repeat(v))


def grouped_and_scaled(q, k, v):
    return attend((q * 0.5) @ (repeat_kv(k * 0.5, 2) * 2.0).transpose(2, 3), repeat_kv(v, 2))


def one_head_for_all(q, k, v):
    k, v = k[:, :1].expand(B, H, S, D), v[:, :1].expand(B, H, S, D)
    return attend(q @ k.transpose(2, 3) * SCALE, v)


def one_head_broadcast(q, k, v):
    return attend(q @ k[:, :1].transpose(2, 3) * SCALE, v[:, :1])


def tiled_heads_are_no_groups(q, k, v):  # heads 0 1 0 1, not 0 0 1 1
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return attend(q @ k.transpose(2, 3) * SCALE, v)


def keys_laid_out_in_one_permute(q, k, v):
    kt = k.transpose(1, 2).permute(0, 2, 3, 1)
    return attend(q @ kt * SCALE, v)


def einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE
    return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, -1), v)


def einsum_sequence_first(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    return torch.einsum("bhqk,bkhd->bqhd", F.softmax(scores, -1), v)


def einsum_keys_first(q, k, v):
    scores = torch.einsum("bhkd,bhqd->bhqk", k, q) * SCALE
    return torch.einsum("bhqk,bhkd->bqhd", F.softmax(scores, -1), v)


def bmm(q, k, v):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) * SCALE, -1)
    return torch.bmm(weights, v).view(B, H, S, D).transpose(1, 2).reshape(B, S, H * D)


def bmm_grouped_and_masked(q, k, v):
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    scores = torch.bmm(q * SCALE, k.transpose(1, 2)).view(B, H, S, S)
    scores = scores.masked_fill(~causal(S), INF).view(B * H, S, S)
    return torch.bmm(F.softmax(scores, -1), v).view(B, H, S, D)


def bmm_with_keys_transposed_first(q, k, v):
    q, v, kt = q.reshape(B * H, S, D), v.reshape(B * H, S, D), k.transpose(2, 3).reshape(B * H, D, S)
    return torch.bmm(F.softmax(torch.bmm(q, kt) * SCALE, -1), v)


def single_head(q, k, v):  # [b, s, d]
    q, k, v = (x[:, 0] for x in (q, k, v))
    return attend((q @ k.transpose(1, 2) * SCALE).masked_fill(~causal(S), INF), v)


def single_head_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], is_causal=True)


def with_transpose(q, k, v):
    return plain(q, k, v).transpose(1, 2).contiguous().reshape(B, S, H * D)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25).transpose(1, 2).reshape(B, S, H * D)


def sdpa_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_repeated(q, k, v):
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=causal(S))


def sdpa_scaled_queries(q, k, v):
    return F.scaled_dot_product_attention(q * 0.5, k, v, scale=1.0)


def masked_fill_inf(q, k, v):
    return attend((q @ k.mT * SCALE).masked_fill(~causal(S), INF), v)


def masked_fill_lowest(q, k, v):
    scores = q @ k.mT * SCALE
    return attend(scores.masked_fill(torch.ones(S, S).triu(1).bool(), lowest(scores)), v)


def where_open(q, k, v):
    scores = q @ k.mT * SCALE
    return attend(torch.where(causal(S), scores, lowest(scores)), v)


def where_closed(q, k, v):
    scores = q @ k.mT * SCALE
    return attend(torch.where(torch.ones(S, S).triu(1) == 1, INF, scores), v)


def where_full_like(q, k, v):
    scores = q @ k.mT * SCALE
    return attend(torch.where(causal(S)[None, None], scores, torch.full_like(scores, INF)), v)


def added_triangle(q, k, v):  # Meta's Llama
    mask = torch.full((S, S), INF, dtype=q.dtype).triu(diagonal=1)
    return attend(q @ k.mT * SCALE + mask, v)


def added_from_the_left(q, k, v):
    mask = torch.where(causal(S), 0.0, INF).to(q.dtype)
    return attend(mask[None, None] + q @ k.mT * SCALE, v)


def by_positions(q, k, v):
    i = torch.arange(S)
    return attend((q @ k.mT * SCALE).masked_fill(i[None, :] > i[:, None], INF), v)


def sliding_window(q, k, v):
    i = torch.arange(S)
    seen = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 3)
    return attend((q @ k.mT * SCALE).masked_fill(~seen, INF), v)


def window_and_causal_apart(q, k, v):
    i = torch.arange(S)
    scores = (q @ k.mT * SCALE).masked_fill(i[None, :] > i[:, None], INF)
    return attend(scores.masked_fill(i[None, :] <= i[:, None] - 4, INF), v)


def window_without_causal(q, k, v):
    return attend((q @ k.mT * SCALE).masked_fill(torch.ones(S, S).tril(-3).bool(), INF), v)


def everything_open(q, k, v):
    return attend((q @ k.mT * SCALE).masked_fill(torch.zeros(S, S, dtype=torch.bool), INF), v)


def two_sided_window(q, k, v):  # the op's window looks back only: stays a tensor
    i = torch.arange(S)
    return attend((q @ k.mT * SCALE).masked_fill((i[None, :] - i[:, None]).abs() > 2, INF), v)


NOTHING = {"scale": SCALE, "is_causal": False, "window": None, "softcap": None, "mask": None, "nan_rows": False}
SPELLINGS = {
    plain: {},
    divided: {},
    scale_on_q: {},
    scale_on_k: {},
    scale_on_both: {},
    scale_thrice: {"scale": 1 / 3},
    scale_from_the_left: {},
    no_scale: {"scale": 1.0},
    scale_below_views: {},
    scale_of_a_full_tensor: {},
    softmax_in_the_dtype: {},
    float_then_softmax: {},
    inference_dropout: {},
    in_place: {"is_causal": True},
    soft_cap: {"softcap": 5.0},
    soft_cap_by_multiplying: {"softcap": 5.0},
    soft_cap_and_mask: {"softcap": 5.0, "is_causal": True},
    grouped: {"kv": KV},
    grouped_by_interleaving: {"kv": KV},
    grouped_before_the_transpose: {"kv": KV},
    grouped_and_scaled: {"kv": KV, "scale": 0.5},
    one_head_for_all: {"kv": KV, "heads": 1},
    one_head_broadcast: {"kv": KV, "heads": 1},
    tiled_heads_are_no_groups: {"kv": KV, "heads": H},
    keys_laid_out_in_one_permute: {},
    einsum: {},
    einsum_sequence_first: {},
    einsum_keys_first: {},
    bmm: {},
    bmm_grouped_and_masked: {"kv": KV, "is_causal": True},
    bmm_with_keys_transposed_first: {},
    single_head: {"is_causal": True, "heads": 1},
    single_head_sdpa: {"is_causal": True, "heads": 1},
    with_transpose: {},
    sdpa: {},
    sdpa_causal: {"is_causal": True, "scale": 0.25},
    sdpa_grouped: {"kv": KV, "is_causal": True},
    sdpa_repeated: {"kv": KV, "is_causal": True},
    sdpa_scaled_queries: {"scale": 0.5},
    masked_fill_inf: {"is_causal": True},
    masked_fill_lowest: {"is_causal": True},
    where_open: {"is_causal": True},
    where_closed: {"is_causal": True},
    where_full_like: {"is_causal": True},
    added_triangle: {"is_causal": True},
    added_from_the_left: {"is_causal": True},
    by_positions: {"is_causal": True},
    sliding_window: {"is_causal": True, "window": 3},
    window_and_causal_apart: {"is_causal": True, "window": 4},
    window_without_causal: {"window": 3},
    everything_open: {},
    two_sided_window: {"mask": "tensor", "nan_rows": True},
}
