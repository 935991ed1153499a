"""fuse_attention: what the op cannot say is refused with the reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attention_cases import (
    INF,
    SCALE,
    B,
    D,
    Fn,
    H,
    S,
    attend,
    causal,
    fuse,
    lowest,
    options,
    tensors,
)
from attention_spellings import scale_on_q, softmax_in_the_dtype
from graft.ir.io.text import graph_text
from graft.ir.nodes import is_op

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


@pytest.mark.some(13)
@pytest.mark.parametrize("spelling", REFUSALS, ids=lambda f: f.__name__)
def test_what_the_op_cannot_say_stays_byte_for_byte(spelling):
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
