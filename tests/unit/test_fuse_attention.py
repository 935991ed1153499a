"""fuse_attention: every spelling becomes one op with the same numbers; what the op cannot say stays as it is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attention_cases import (
    INF,
    KV,
    OP,
    SCALE,
    B,
    D,
    Fn,
    H,
    S,
    attend,
    causal,
    close,
    fuse,
    lowest,
    only,
    options,
    repeat_kv,
    tensors,
)
from graft.graph.canonical import canonicalize
from graft.graph.nodes import calls, is_op
from graft.graph.text import graph_text, target_text
from graft.graph.trace import export_graph
from graft.transforms.pipeline import run_pipeline

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling_becomes_one_op_r17(spelling, dtype):
    wanted = dict(SPELLINGS[spelling])
    inputs = tensors(dtype, kv=wanted.pop("kv", H))
    heads = wanted.pop("heads", inputs[1].shape[1])
    gm, record, _ = fuse(Fn(spelling), inputs)
    assert (record.status, len(record.matches), record.near_misses) == ("applied", 1, ())
    given = options(gm)
    for name, value in (NOTHING | wanted).items():
        if value == "tensor":
            assert given[name] is not None
        else:
            exact = 1e-6 if spelling is not scale_of_a_full_tensor else 1e-3  # the tensor is rounded to its dtype
            assert given[name] == (pytest.approx(value, rel=exact) if isinstance(value, float) else value), name
    assert given["k"].meta["val"].shape[1] == heads
    assert not any(is_op(n, torch.ops.aten.softmax.int) for n in calls(gm.graph))
    close(gm(*inputs), spelling(*inputs), dtype)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────


def training_dropout(q, k, v):
    return F.dropout(F.softmax(q @ k.mT * SCALE, -1), 0.1, training=True) @ v


def training_dropout_in_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def weights_are_returned(q, k, v):
    weights = F.softmax(q @ k.mT * SCALE, -1)
    return weights @ v, weights


def scores_are_read_elsewhere(q, k, v):
    scores = q @ k.mT * SCALE
    return F.softmax(scores, -1) @ v, scores.amax()


def mask_after_softmax(q, k, v):
    return (F.softmax(q @ k.mT * SCALE, -1) * causal(S)) @ v


def fill_after_softmax(q, k, v):
    return F.softmax(q @ k.mT * SCALE, -1).masked_fill(~causal(S), 0.0) @ v


def closes_with_a_finite_number(q, k, v):
    return attend((q @ k.mT * SCALE).masked_fill(~causal(S), -1e9), v)


def closes_with_a_tensor(q, k, v):
    scores = q @ k.mT * SCALE
    return attend(torch.where(causal(S), scores, v.mean()), v)


def multiplicative_mask(q, k, v):
    return attend(q @ k.mT * SCALE * causal(S), v)


def mask_from_the_scores(q, k, v):
    scores = q @ k.mT * SCALE
    return attend(scores.masked_fill(scores < scores.mean(-1, keepdim=True), INF), v)


def softmax_over_the_queries(q, k, v):
    return F.softmax(q @ k.mT * SCALE, -2) @ v


def scores_of_no_keys(q, k, v):
    return F.softmax(F.linear(q, k[0, 0]), -1) @ v


def mask_before_the_scale(q, k, v):
    return attend((q @ k.mT).masked_fill(~causal(S), lowest(q)) * SCALE, v)


def mask_before_the_cap(q, k, v):
    return attend(torch.tanh((q @ k.mT).masked_fill(~causal(S), INF) / 5.0) * 5.0, v)


def scale_after_the_cap(q, k, v):
    return attend(torch.tanh(q @ k.mT / 5.0) * 5.0 * SCALE, v)


def scale_of_a_tensor(q, k, v):
    return attend(q @ k.mT * v.abs().amax(), v)


def two_biases(q, k, v):
    return attend(q @ k.mT * SCALE + v.sin().sum(-1)[..., None] + v.cos().sum(-1)[:, :, None], v)


def bias_wider_than_the_scores(q, k, v):
    return attend(q[:1] @ k[:1].mT * SCALE + v.sum(-1)[:, :, None], v)


def another_number_for_all(q, k, v):
    return attend(q @ k.mT * SCALE + 0.5, v)


def multiple_of_a_mask(q, k, v):
    return attend(torch.add(q @ k.mT * SCALE, v.sum(-1)[:, :, None], alpha=2), v)


def causal_from_the_first_key(q, k, v):
    return F.scaled_dot_product_attention(q[:, :, :3], k, v, is_causal=True)


def groups_as_a_fifth_dim(q, k, v):
    q = q.reshape(B, 2, 2, S, D)
    return (F.softmax(q @ k[:, :2, None].mT * SCALE, -1) @ v[:, :2, None]).reshape(B, H, S, D)


def keys_broadcast_over_the_batch(q, k, v):
    return attend(q @ k[:1].mT * SCALE, v)


def weights_transposed(q, k, v):
    return F.softmax(q @ k.mT * SCALE, -1).mT @ v


def a_part_of_the_weights(q, k, v):
    return F.softmax(q @ k.mT * SCALE, -1)[..., 1:] @ v[:, :, 1:]


def written_meanwhile(q, k, v):
    keys = k.clone()
    scores = q @ keys.mT * SCALE
    keys.zero_()
    return F.softmax(scores, -1) @ v, keys


REFUSALS = {
    training_dropout: "training-mode dropout (p=0.1)",
    training_dropout_in_sdpa: "training-mode dropout (p=0.1)",
    weights_are_returned: "have a second reader %output",
    scores_are_read_elsewhere: "has a second reader %amax",
    mask_after_softmax: "(aten.mul.Tensor) after the softmax",
    fill_after_softmax: "(aten.masked_fill.Scalar) after the softmax",
    closes_with_a_finite_number: "closes with -1e+09, neither -inf nor the lowest",
    closes_with_a_tensor: "puts a tensor, not a number",
    multiplicative_mask: "multiplied by a tensor",
    mask_from_the_scores: "has a second reader %mean",
    softmax_over_the_queries: "softmax runs over dim -2",
    scores_of_no_keys: "(aten.linear), which is not q·kᵀ",
    mask_before_the_scale: "before the scores are scaled",
    mask_before_the_cap: "before the scores are scaled or capped",
    scale_after_the_cap: "scaled or capped again after the cap",
    scale_of_a_tensor: "multiplied by a tensor",
    two_biases: "two masks of unknown values",
    bias_wider_than_the_scores: "scores are broadcast to",
    another_number_for_all: "adds one number to all scores",
    multiple_of_a_mask: "a multiple of a mask",
    causal_from_the_first_key: "3 queries meet 7 keys",
    groups_as_a_fifth_dim: "5] dims; the op takes",
    keys_broadcast_over_the_batch: "do not fit the op",
    weights_transposed: "(aten.transpose.int) after the softmax",
    a_part_of_the_weights: "takes a part of the weights",
    written_meanwhile: "before attention is done",
}


def refused(spelling, inputs, reason):
    """Nothing matches, the reason names the place, and the graph is what it was, byte for byte."""
    gm, record, before = fuse(Fn(spelling), inputs)
    assert (record.status, record.matches) == ("no_match", ())
    (miss,) = record.near_misses
    assert reason in miss.reason and reason in record.reason and miss.anchor.startswith("%")
    assert graph_text(gm.graph) == before


@pytest.mark.parametrize("spelling", REFUSALS, ids=lambda f: f.__name__)
def test_what_the_op_cannot_say_stays_byte_for_byte_r17_r26(spelling):
    refused(spelling, tensors(), REFUSALS[spelling])


def scaled_in_float32(q, k, v):
    return attend((q @ k.mT).float() * SCALE, v)


def float32_queries(q, k, v):
    return attend(q.float() @ k.float().mT * SCALE, v)


def test_other_rounding_is_refused():
    """16-bit scores that the model keeps in float32, and softmax that is not float32, would round elsewhere."""
    refused(scaled_in_float32, tensors(torch.bfloat16), "the scores become torch.float32")
    refused(float32_queries, tensors(torch.bfloat16), "differ in dtype: torch.bfloat16, torch.float32")
    refused(softmax_in_the_dtype, tensors(torch.float64), "the scores are torch.float64")


def test_float16_keeps_the_scale_where_it_prevents_overflow():
    q, k, v = (x * 60 for x in tensors(torch.float16))
    gm, record, _ = fuse(Fn(scale_on_q), (q, k, v))
    assert len(record.matches) == 1 and options(gm)["scale"] == 1.0
    assert is_op(options(gm)["q"], torch.ops.aten.mul.Tensor)


# ── graphs without attention ────────────────────────────────────────────────────────────────────────────────────


class Router(nn.Module):
    """A mixture of experts as models spell it: softmax, top k, and the weights on the experts' results."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, 4, bias=False), nn.Parameter(torch.randn(4, D, D))

    def forward(self, x):
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1, dtype=torch.float32), 2, dim=-1)
        routed = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights.to(x.dtype))
        experts = torch.bmm(x.expand(4, -1, -1) * routed.t()[..., None], self.up)
        return experts.sum(0)


def test_a_router_is_no_near_miss():
    _, record, _ = fuse(Router(), (torch.randn(5, D),))
    assert record.near_misses == () and "1 softmax, none of which feeds a matrix product" in record.reason


def test_reasons_where_there_is_nothing_to_do():
    _, record, _ = fuse(Fn(lambda x: x.exp()), (torch.randn(3),))
    assert record.reason == "the graph has no softmax and no scaled_dot_product_attention"
    _, record, _ = fuse(Fn(lambda q, k, v: torch.ops.graft.attention(q, k, v, None, 1.0)), tensors())
    assert record.reason == "attention is graft::attention already"


# ── what stands around it ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spelling", [with_transpose, sdpa_causal, bmm, einsum_sequence_first])
def test_transposes_that_cancel_are_gone(spelling):
    gm, record, _ = fuse(Fn(spelling), tensors())
    names = [target_text(n.target) for n in calls(gm.graph)]
    after = names[names.index("graft.attention") + 1 :]
    assert after in ([], ["aten.reshape"])
    assert len(record.matches[0].replaced) >= 2 and "attention_default" in record.matches[0].made


def test_both_layouts_can_be_read():
    def both(q, k, v):
        out = plain(q, k, v)
        return out.transpose(1, 2).contiguous(), out.exp()

    inputs = tensors()
    gm, record, _ = fuse(Fn(both), inputs)
    assert len(record.matches) == 1
    for got, expected in zip(gm(*inputs), both(*inputs), strict=True):
        close(got, expected)


def changed_number(q, k, v):
    c = torch.full((1,), 1.0)
    c[0] = 0.1
    return attend(q @ k.transpose(2, 3) * c, v)


def changed_fill(q, k, v):
    c = torch.full((), INF)
    c.fill_(-1.0)
    return attend(torch.where(causal(S), q @ k.transpose(2, 3), c), v)


def weights_as(*dtypes):
    def fn(q, k, v):
        weights = torch.softmax(q @ k.transpose(2, 3) * SCALE, -1)
        for dtype in dtypes:
            weights = weights.to(dtype)
        return weights @ v

    return fn


def result_written(q, k, v):
    out = plain(q, k, v)
    out.view(B, H, S * D).add_(1)
    return out * 2


def result_strided(q, k, v):
    return plain(q, k, v).as_strided((B, S * H * D), (H * S * D, 1))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (changed_number, "multiplied by a tensor"),
        (changed_fill, "not a number"),
        (weights_as(torch.int32, torch.float32), "become torch.int32"),
        (weights_as(torch.bfloat16, torch.float32), "become torch.bfloat16"),
        (result_written, "written to in place"),
        (result_strided, "by its strides"),
    ],
)
def test_writes_casts_and_strides_that_the_op_would_lose_r17(fn, reason):
    inputs = tensors()
    gm, record, _ = fuse(Fn(fn), inputs)
    assert record.matches == () and reason in record.reason
    close(gm(*inputs), fn(*inputs))


TRANSPOSES = {
    "twice": (lambda x: x.transpose(1, 2).transpose(2, 1).exp(), 0),
    "twice, as permute": (lambda x: x.permute(0, 2, 1).transpose(-1, -2).exp(), 0),
    "other names": (lambda x: x.mT.swapaxes(1, 2).swapdims(0, 1).transpose(0, 1).exp(), 0),
    "three times": (lambda x: x.mT.mT.mT.exp(), 1),
    "other dims": (lambda x: x.transpose(0, 1).transpose(1, 2).exp(), 2),
}


@pytest.mark.parametrize("name", TRANSPOSES)
def test_transposes_of_transposes_r9(name):
    fn, left = TRANSPOSES[name]
    x = torch.randn(2, 3, 4)
    gm = export_graph(Fn(fn), (x,))
    assert sum(is_op(n, torch.ops.aten.transpose.int) for n in calls(gm.graph)) == left
    assert torch.equal(gm(x), fn(x))
    once = graph_text(gm.graph)
    canonicalize(gm)
    assert graph_text(gm.graph) == once


def test_transposes_around_a_write_keep_who_sees_it():
    def fn(x):
        y = x.clone()
        z = y.transpose(0, 1).transpose(0, 1)
        y.add_(1)
        return z * 2

    x = torch.randn(3, 4)
    assert torch.equal(export_graph(Fn(fn), (x,))(x), fn(x))


class Block(nn.Module):
    """x → q, k, v → attention → output, as in GPT-style models."""

    def __init__(self, kind, bias, kv):
        super().__init__()
        self.kind, self.kv = kind, kv
        self.q, self.k, self.v = (nn.Linear(24, n * D, bias) for n in (H, kv, kv))
        self.o = nn.Linear(H * D, 24)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            f(x).view(b, s, n, D).transpose(1, 2) for f, n in ((self.q, H), (self.k, self.kv), (self.v, self.kv))
        )
        k, v = repeat_kv(k, H // self.kv), repeat_kv(v, H // self.kv)
        if self.kind == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = attend((q @ k.transpose(2, 3) / math.sqrt(D)).masked_fill(~causal(s), INF), v)
        return x + self.o(out.transpose(1, 2).contiguous().view(b, s, H * D))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("kind", "bias", "kv"), [("eager", False, KV), ("eager", True, H), ("sdpa", True, KV)])
def test_projections_merge_behind_a_fused_attention_r16_r17(kind, bias, kv, dynamic):
    module = Block(kind, bias, kv).eval()
    x, other = torch.randn(2, 5, 24), torch.randn(3, 9, 24)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    gm = export_graph(module, (x,), dynamic_shapes=(sizes,) if dynamic else None)
    inputs = (other, x) if dynamic else (x,)
    with torch.no_grad():
        expected = [module(given) for given in inputs]
    report = run_pipeline(gm, only("fuse_attention", "merge_qkv"))
    assert [len(report.transforms[n].matches) for n in ("fuse_attention", "merge_qkv")] == [1, 1]
    assert sum(is_op(n, torch.ops.aten.linear.default) for n in calls(gm.graph)) == 2
    assert (options(gm)["is_causal"], options(gm)["mask"], options(gm)["k"].meta["val"].shape[1]) == (True, None, kv)
    with torch.no_grad():
        for given, wanted in zip(inputs, expected, strict=True):
            close(gm(given), wanted)


def test_new_nodes_carry_value_place_and_maker_r27():
    gm, _, _ = fuse(Block("eager", True, KV).eval(), (torch.randn(2, 5, 24),))
    made = [n for n in calls(gm.graph) if n.meta.get("made_by") == "fuse_attention"]
    assert any(is_op(n, OP) for n in made)
    assert all("val" in n.meta and n.meta.get("stack_trace") for n in made)
