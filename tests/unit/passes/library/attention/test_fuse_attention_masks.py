"""fuse_attention: masks that stay tensors, and rows that see nothing."""

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
    close,
    fuse,
    lowest,
    options,
    tensors,
)
from attention_masks import scores
from graft.ir.nodes import calls, is_op
from graft.ops.attention.reference import attention, attention_sdpa


def padding_inf(q, k, v, seen):
    return attend(scores(q, k).masked_fill(~seen[:, None, None, :], INF), v)


def padding_lowest(q, k, v, seen):
    return attend(scores(q, k).masked_fill(seen[:, None, None, :] == 0, lowest(q)), v)


def padding_where(q, k, v, seen):
    return attend(torch.where(seen[:, None, None, :], scores(q, k), INF), v)


def padding_added_inf(q, k, v, seen):
    mask = torch.zeros(B, S, dtype=q.dtype).masked_fill(~seen, INF)
    return attend(scores(q, k) + mask[:, None, None, :], v)


def padding_added_lowest(q, k, v, seen):
    mask = torch.where(seen, 0.0, lowest(q)).to(q.dtype)
    return attend(scores(q, k) + mask[:, None, None, :], v)


def padding_times_lowest(q, k, v, seen):
    mask = (1.0 - seen[:, None, None, :].to(q.dtype)) * lowest(q)
    return attend(scores(q, k) + mask, v)


def padding_and_causal_inf(q, k, v, seen):
    return attend(scores(q, k).masked_fill(~causal(S), INF).masked_fill(~seen[:, None, None, :], INF), v)


def padding_and_causal_lowest(q, k, v, seen):
    return attend(scores(q, k).masked_fill(~causal(S), lowest(q)).masked_fill(~seen[:, None, None, :], lowest(q)), v)


def padding_inf_and_causal_lowest(q, k, v, seen):
    return attend(scores(q, k).masked_fill(~causal(S), lowest(q)).masked_fill(~seen[:, None, None, :], INF), v)


def padding_and_causal_joined(q, k, v, seen):
    return attend(scores(q, k).masked_fill(~(causal(S) & seen[:, None, None, :]), INF), v)


def padding_by_query_too(q, k, v, seen):
    return attend(scores(q, k).masked_fill(~seen[:, None, None, :], INF).masked_fill(~seen[:, None, :, None], INF), v)


def padding_and_alibi_added(q, k, v, seen):
    mask = torch.where(seen, 0.0, lowest(q)).to(q.dtype)
    return attend(scores(q, k) + alibi(q) + mask[:, None, None, :], v)


def padding_in_sdpa(q, k, v, seen):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])


def padding_added_in_sdpa(q, k, v, seen):
    mask = torch.zeros(B, S, dtype=q.dtype).masked_fill(~seen, INF)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].expand(B, 1, S, S))


def padding_with_a_cap(q, k, v, seen):
    return attend((torch.tanh(scores(q, k) / 3) * 3).masked_fill(~seen[:, None, None, :], INF), v)


def padding_folded(q, k, v, seen):
    q3, k3, v3 = (x.reshape(B * H, S, D) for x in (q, k, v))
    mask = seen[:, None, None, :].expand(B, H, S, S).reshape(B * H, S, S)
    weights = F.softmax((torch.bmm(q3, k3.transpose(1, 2)) * SCALE).masked_fill(~mask, INF), -1)
    return torch.bmm(weights, v3)


def padding_of_a_single_head(q, k, v, seen):
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    return attend((q @ k.transpose(1, 2) * SCALE).masked_fill(~seen[:, None, :], INF), v)


def alibi(q):
    slopes = 2.0 ** -torch.arange(1, H + 1)
    distance = torch.arange(S)[None, :] - torch.arange(S)[:, None]
    return (slopes[:, None, None] * distance).to(q.dtype)  # [h, s, t]


# spelling → is_causal, mask is boolean, nan_rows
TENSORS = {
    padding_inf: (False, True, True),
    padding_lowest: (False, False, False),
    padding_where: (False, True, True),
    padding_added_inf: (False, False, True),
    padding_added_lowest: (False, False, False),
    padding_times_lowest: (False, False, True),
    padding_and_causal_inf: (True, True, True),
    padding_and_causal_lowest: (False, False, False),
    padding_inf_and_causal_lowest: (False, False, True),
    padding_and_causal_joined: (False, True, True),
    padding_by_query_too: (False, True, True),
    padding_and_alibi_added: (False, False, True),
    padding_in_sdpa: (False, True, False),
    padding_added_in_sdpa: (False, False, False),
    padding_with_a_cap: (False, True, True),
    padding_folded: (False, True, True),
    padding_of_a_single_head: (False, True, True),
}


@pytest.mark.some(8)
@pytest.mark.parametrize("spelling", TENSORS, ids=lambda f: f.__name__)
def test_masks_stay_tensors_and_closed_rows_stay_what_they_were(spelling):
    """A row that sees nothing is NaN after -inf, the mean after the lowest number, zero in torch's own attention."""
    is_causal, boolean, nan_rows = TENSORS[spelling]
    inputs = tensors()
    left_padded = torch.ones(B, S, dtype=torch.bool)
    left_padded[0, :3] = False
    nothing = left_padded.clone()
    nothing[1] = False
    gm, record, _ = fuse(Fn(spelling), (*inputs, left_padded))
    assert (len(record.matches), record.near_misses) == (1, ())
    given = options(gm)
    assert (given["is_causal"], given["nan_rows"]) == (is_causal, nan_rows)
    assert (given["mask"].meta["val"].dtype == torch.bool) == boolean and given["mask"].meta["val"].dim() == 4
    for seen in (left_padded, nothing):
        expected = spelling(*inputs, seen)
        close(gm(*inputs, seen), expected)
    sdpa = spelling in (padding_in_sdpa, padding_added_in_sdpa)
    assert (expected[1] == 0).all() if sdpa else expected[-1].isnan().all() or expected.isfinite().all()
    narrow = tensors(torch.bfloat16)
    gm, record, _ = fuse(Fn(spelling), (*narrow, left_padded))
    assert len(record.matches) == 1
    close(gm(*narrow, nothing), spelling(*narrow, nothing), torch.bfloat16)


def test_a_lost_nan_would_be_seen():
    """The comparison of closed rows fails for an op without `nan_rows`."""
    inputs, seen = tensors(), torch.zeros(B, S, dtype=torch.bool)
    gm, _, _ = fuse(Fn(padding_inf), (*inputs, seen))
    node = options(gm)
    plain = torch.ops.graft.attention(*inputs, seen[:, None, None, :], node["scale"], False).transpose(1, 2)
    with pytest.raises(AssertionError):
        close(plain, padding_inf(*inputs, seen))


def test_lowest_float16_in_the_scores_is_refused():
    seen = torch.ones(B, S, dtype=torch.bool)
    _, record, _ = fuse(Fn(padding_lowest), (*tensors(torch.float16), seen))
    assert record.matches == () and "lowest float16" in record.reason
    _, record, _ = fuse(Fn(padding_added_lowest), (*tensors(torch.float16), seen))
    assert record.matches == () and "lowest float16" in record.reason
    assert fuse(Fn(padding_added_inf), (*tensors(torch.float16), seen))[1].matches


@pytest.mark.parametrize("nan_rows", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_kernels_agree_on_rows_with_a_mask(kind, nan_rows):
    """And under `nan_rows` also on rows that see nothing."""
    q, k, v = tensors()
    mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[..., 0] = True
    if nan_rows:
        mask[0, 0, 2] = False
    given = mask if kind == "boolean" else torch.where(mask, torch.randn(S, S), INF)
    args = (q, k, v, given, SCALE, True, None, None, None, nan_rows)
    close(attention_sdpa(*args), attention(*args))
    assert attention(*args)[0, 2].isnan().all() == nan_rows


def test_bias_per_head_from_a_table_and_from_queries():
    """An added tensor of any origin is a mask, also one that is a product itself."""

    def relative(q, k, v, table):
        return attend(q @ table.transpose(0, 1) + scores(q, k), v)

    inputs = (*tensors(), torch.randn(S, D))
    gm, record, _ = fuse(Fn(relative), inputs)
    assert len(record.matches) == 1 and options(gm)["mask"] is not None
    close(gm(*inputs), relative(*inputs))


def test_a_float32_mask_beside_bfloat16_scores_runs_on_the_reference():
    def promoted(q, k, v, mask):
        return attend(scores(q, k) + mask, v)

    inputs = (*tensors(torch.bfloat16), torch.randn(S, S))
    gm, record, _ = fuse(Fn(promoted), inputs)
    assert len(record.matches) == 1
    close(gm(*inputs), promoted(*inputs), torch.bfloat16)


def test_layers_share_one_mask():
    def layers(q, k, v, seen):
        for _ in range(3):
            q = padding_lowest(q, k, v, seen)
        return q

    inputs = (*tensors(), torch.ones(B, S, dtype=torch.bool))
    gm, record, _ = fuse(Fn(layers), inputs)
    assert len(record.matches) == 3
    assert len({n.args[3] for n in calls(gm.graph) if is_op(n, torch.ops.graft.attention.default)}) == 1
    close(gm(*inputs), layers(*inputs))


def test_a_mask_is_shared_only_with_what_comes_after_it():
    def fn(q, k, v, seen):
        x = scores(q, k).masked_fill(~seen[:, None, None, :], lowest(q))
        y = scores(k, q).masked_fill(~seen[:, None, None, :], lowest(q))
        first, second = torch.softmax(x, -1), torch.softmax(y, -1)
        later = second @ v  # the second softmax is done first
        return (first @ v) * later

    inputs = (*tensors(), torch.rand(B, S) > 0.4)
    gm, record, _ = fuse(Fn(fn), inputs)
    gm.graph.lint()
    assert len(record.matches) == 2
    close(gm(*inputs), fn(*inputs))
