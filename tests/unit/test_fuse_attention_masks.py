"""Masks of fuse_attention: which become positions, which stay tensors, rows that see nothing, and random mixtures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

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
    repeat_kv,
    tensors,
)
from graft.graph.nodes import calls, is_op
from graft.graph.sizes import SizeEvaluator
from graft.graph.trace import export_graph
from graft.ops.attention.reference import attention, attention_sdpa

# ── mask tensors ────────────────────────────────────────────────────────────────────────────────────────────────


def scores(q, k):
    return q @ k.transpose(2, 3) * SCALE


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


@pytest.mark.parametrize("spelling", TENSORS, ids=lambda f: f.__name__)
def test_masks_stay_tensors_and_closed_rows_stay_what_they_were_r17(spelling):
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
def test_kernels_agree_on_rows_with_a_mask_r17(kind, nan_rows):
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


# ── positions ───────────────────────────────────────────────────────────────────────────────────────────────────


def positional(kind, s, t, device="cpu"):
    i, j = torch.arange(t - s, t, device=device)[:, None], torch.arange(t, device=device)[None, :]
    return {
        "causal": j <= i,
        "window": (j <= i) & (j > i - 5),
        "window, off by one": (j <= i) & (j >= i - 5),
        "look ahead by one": j <= i + 1,
        "strictly before": j < i,
        "blocks": j // 2 <= i // 2,
        "from the first key": torch.ones(s, t, dtype=torch.bool).tril(),
        "prefix": (j <= i) | (j < 2),
    }[kind]


# kind → what it means where every query has its key, and where there are three keys more than queries
POSITIONAL = {
    "causal": ((True, None), (True, None)),
    "window": ((True, 5), (True, 5)),
    "window, off by one": ((True, 6), (True, 6)),
    "look ahead by one": (None, None),
    "strictly before": (None, None),
    "blocks": (None, None),
    "from the first key": ((True, None), None),
    "prefix": (None, (True, None)),  # the three keys more are all before the first query
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("kind", POSITIONAL)
def test_masks_that_follow_from_sizes_are_proven_or_stay_r17(kind, more, dynamic):
    def fn(q, k, v):
        mask = positional(kind, q.shape[2], k.shape[2])
        return attend(scores(q, k).masked_fill(~mask, lowest(q)), v)

    inputs = tensors(s=9, t=9 + more)
    s = torch.export.Dim("s", min=2, max=4000)
    t = s + more if more else s
    shapes = ({2: s}, {2: t}, {2: t}) if dynamic else None
    gm, record, _ = fuse(Fn(fn), inputs, dynamic_shapes=(shapes,) if dynamic else None)
    meaning = POSITIONAL[kind][more > 0]
    given = options(gm)
    assert len(record.matches) == 1
    assert (given["is_causal"], given["window"]) == (meaning or (False, None))
    assert (given["mask"] is None) == (meaning is not None)
    for length in (9, 4, 30) if dynamic else (9,):
        other = tensors(s=length, t=length + more, seed=length)
        close(gm(*other), fn(*other))


def test_keys_that_grow_apart_from_queries_keep_their_mask():
    """With sizes of their own there may be more queries than keys, whose rows would see nothing."""

    def fn(q, k, v):
        return attend(scores(q, k).masked_fill(~positional("causal", q.shape[2], k.shape[2]), lowest(q)), v)

    s, t = torch.export.Dim("s"), torch.export.Dim("t")
    gm, record, _ = fuse(Fn(fn), tensors(s=4, t=9), dynamic_shapes=(({2: s}, {2: t}, {2: t}),))
    assert len(record.matches) == 1 and not options(gm)["is_causal"] and options(gm)["mask"] is not None
    for lengths in ((3, 8), (5, 5), (6, 4)):
        other = tensors(s=lengths[0], t=lengths[1])
        close(gm(*other), fn(*other))


def test_buffers_are_state_and_not_looked_into():
    class Buffered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("bias", torch.ones(16, 16).tril().view(1, 1, 16, 16))

        def forward(self, q, k, v):
            return attend(scores(q, k).masked_fill(self.bias[:, :, :S, :S] == 0, INF), v)

    module, inputs = Buffered(), tensors()
    gm, record, _ = fuse(module, inputs)
    assert len(record.matches) == 1 and options(gm)["mask"] is not None
    close(gm(*inputs), module(*inputs))
    module.bias.fill_(1)
    close(gm(*inputs), module(*inputs))


def test_a_mask_that_is_written_to_is_not_evaluated():
    def fn(q, k, v):
        mask = torch.ones(S, S, dtype=torch.bool).tril()
        mask[:, 0] = True
        mask[2, 1] = False
        return attend(scores(q, k).masked_fill(~mask, INF), v)

    inputs = tensors()
    gm, record, _ = fuse(Fn(fn), inputs)
    assert len(record.matches) == 1 and options(gm)["mask"] is not None
    close(gm(*inputs), fn(*inputs))


# what looks causal or open in small sizes, and is not; (i, j, s, t) → True where a query may look
FAR_OFF = {
    "a large window": lambda i, j, s, t: (j <= i) & (i - j <= 5000),
    "a float": lambda i, j, s, t: (i - j).float() < 16.5,
    "a tensor": lambda i, j, s, t: i - j < torch.tensor(16),
    "sums": lambda i, j, s, t: i - j - 10 - 10 - 10 < 0,
    "products": lambda i, j, s, t: i - j < torch.full((), 4) * 4 * 4,
    "doubled": lambda i, j, s, t: i - j - doubled(doubled(torch.full((), 9))) < 0,
    "the last keys": lambda i, j, s, t: (j <= i) & ((j >= t - 64) | (j == i)),
    "a part of the size": lambda i, j, s, t: j <= i + s // 16,
    "a part of the size, less": lambda i, j, s, t: (j <= i) | (j + 5 < s // 16),
    "a smaller size": lambda i, j, s, t: (j >= i - torch.sym_min(s, 64)) & (j <= i),
    "rounded": lambda i, j, s, t: j.bfloat16() <= i.bfloat16(),
    "overflowing": lambda i, j, s, t: (i - j).to(torch.int8) >= 0,
}


def doubled(x):
    return x + x


@pytest.mark.parametrize("kind", FAR_OFF)
@pytest.mark.parametrize("apart", [False, True])
def test_masks_of_dynamic_sizes_are_right_at_every_size_r17(kind, apart):
    """Whatever they become, the numbers hold in sizes beyond every literal."""

    def fn(q, k, v):
        s, t = q.shape[2], k.shape[2]
        mask = FAR_OFF[kind](torch.arange(s)[:, None], torch.arange(t)[None], s, t)
        return attend(scores(q, k).masked_fill(~mask, lowest(q)), v)

    s, t = torch.export.Dim("s", min=2, max=9000), torch.export.Dim("t", min=2, max=9000)
    shapes = (({2: s}, {2: t}, {2: t}),) if apart else (({2: s}, {2: s}, {2: s}),)
    gm, record, _ = fuse(Fn(fn), tensors(s=9, t=11 if apart else 9), dynamic_shapes=shapes)
    assert len(record.matches) == 1
    if kind == "a large window":
        assert options(gm)["mask"] is not None
        return
    for sizes in ((9, 9), (90, 90), (300, 300), (40, 90), (90, 40)) if apart else ((9, 9), (90, 90), (300, 300)):
        other = tensors(s=sizes[0], t=sizes[1], seed=3)
        close(gm(*other), fn(*other))


@pytest.mark.parametrize("window", [600, 1001])
def test_large_windows_of_dynamic_sizes_are_proven(window):
    def fn(q, k, v):
        i = torch.arange(q.shape[2])
        mask = (i[None] <= i[:, None]) & (i[:, None] - i[None] < window)
        return attend(scores(q, k).masked_fill(~mask, lowest(q)), v)

    s = torch.export.Dim("s", min=2, max=9000)
    gm, _, _ = fuse(Fn(fn), tensors(), dynamic_shapes=(({2: s}, {2: s}, {2: s}),))
    assert (options(gm)["is_causal"], options(gm)["window"], options(gm)["mask"]) == (True, window, None)


@pytest.mark.parametrize("kind", ["third size", "rows of the batch", "expanded", "ones"])
def test_sizes_of_something_else_are_not_fixed(kind):
    def fn(q, k, v, w):
        b, s = q.shape[0], q.shape[2]
        i, j = torch.arange(s)[:, None], torch.arange(s)[None]
        mask = {
            "third size": lambda: i - j < w.shape[0],
            "rows of the batch": lambda: (j <= i) & ~((torch.arange(b) >= 2)[:, None, None, None] & (j > 0)),
            "expanded": lambda: (j <= i)[None, None].expand(b, 1, s, s),
            "ones": lambda: (j <= i) & torch.ones(b, 1, 1, s, dtype=torch.bool),
        }[kind]()
        return attend(scores(q, k).masked_fill(~mask, lowest(q)), v)

    b, s, n = (torch.export.Dim(name, min=2, max=900) for name in "bsn")
    shapes = (({0: b, 2: s}, {0: b, 2: s}, {0: b, 2: s}, {0: n}),)
    gm, record, _ = fuse(Fn(fn), (*tensors(), torch.randn(20)), dynamic_shapes=shapes)
    assert len(record.matches) == 1
    assert (options(gm)["mask"] is None) == (kind in ("expanded", "ones"))
    other = (*(torch.cat([x, x]) for x in tensors(s=30, t=30)), torch.randn(3))
    close(gm(*other), fn(*other))


def test_an_empty_sequence_is_refused():
    for s, t in ((0, 3), (3, 0)):
        _, record, _ = fuse(
            Fn(lambda q, k, v, s=s, t=t: attend(scores(q, k).masked_fill(~causal(s).new_ones(s, t), INF), v)),
            tensors(s=s, t=t),
        )
        assert record.matches == () and "nothing to attend to" in record.reason


def test_evaluator_knows_its_limits():
    """A literal that is too large to sample around, or a tensor that is too large, is not decided."""

    def fn(x, width):
        i = torch.arange(x.shape[0])
        return ((i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - width)) * x

    for width, known in ((5, True), (100_000, False)):
        gm = export_graph(
            Fn(lambda x, w=width: fn(x, w)), (torch.randn(6),), dynamic_shapes=(({0: torch.export.Dim("s")},),)
        )
        mask = next(n for n in calls(gm.graph) if is_op(n, torch.ops.aten.mul.Tensor)).args[0]
        assert (SizeEvaluator(gm).samples(mask, (mask.meta["val"].shape[0],)) is not None) == known


# ── random mixtures ─────────────────────────────────────────────────────────────────────────────────────────────

MIXTURES = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
        "scale": st.sampled_from(["q", "k", "both", "scores", "divided", "none"]),
        "mask": st.sampled_from(["none", "causal", "window", "padding", "padding lowest", "alibi", "added", "both"]),
        "cap": st.sampled_from([None, 2.0, 30.0]),
        "sinks": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "sizes": st.sampled_from([(1, 5), (5, 5), (3, 7)]),
        "view": st.sampled_from(["heads", "flat"]),
    }
)


def mixture(m, q, k, v, seen, bias, sinks):
    (h, kv), (s, t) = m["heads"], m["sizes"]
    k, v = repeat_kv(k, h // kv), repeat_kv(v, h // kv)
    if m["scale"] in ("q", "both"):
        q = q * 0.5
    if m["scale"] in ("k", "both"):
        k = k * 0.6
    x = q @ k.transpose(2, 3)
    x = x * 0.4 if m["scale"] == "scores" else x / 2.5 if m["scale"] == "divided" else x
    x = torch.tanh(x / m["cap"]) * m["cap"] if m["cap"] else x
    if m["mask"] in ("causal", "both", "alibi"):
        x = x.masked_fill(~positional("causal", s, t), INF)
    if m["mask"] == "window":
        x = x.masked_fill(~positional("window", s, t), lowest(x))
    if m["mask"] in ("padding", "both"):
        x = x.masked_fill(~seen[:, None, None, :], INF)
    if m["mask"] == "padding lowest":
        x = torch.where(seen[:, None, None, :], x, lowest(x))
    x = x + bias if m["mask"] in ("alibi", "added") else x
    if m["sinks"]:
        x = torch.cat([x, sinks.reshape(1, -1, 1, 1).expand(B, -1, s, -1)], -1)
        x = x - x.max(-1, keepdim=True).values
        out = F.softmax(x, -1, dtype=x.dtype)[..., :-1] @ v
    else:
        out = attend(x, v)
    return out if m["view"] == "heads" else out.transpose(1, 2).reshape(B, s, h * D)


@settings(max_examples=25, deadline=None)
@given(MIXTURES, st.integers(0, 1000))
def test_random_mixtures_keep_their_numbers_r17(m, seed):
    generator = torch.Generator().manual_seed(seed)
    (h, kv), (s, t) = m["heads"], m["sizes"]
    shapes = ((B, h, s, D), (B, kv, t, D), (B, kv, t, D))
    q, k, v = (torch.randn(shape, generator=generator).to(m["dtype"]) for shape in shapes)
    seen = torch.rand(B, t, generator=generator) > 0.4
    bias = torch.randn(h, s, t, generator=generator).to(m["dtype"])
    sinks = torch.randn(h, generator=generator).to(m["dtype"])
    inputs = (q, k, v, seen, bias, sinks)
    gm, record, _ = fuse(Fn(lambda *args: mixture(m, *args)), inputs)
    assert (len(record.matches), record.near_misses) == (1, ())
    close(gm(*inputs), mixture(m, *inputs), m["dtype"])


WRONG = {
    "window off by one": lambda a: {**a, "window": a["window"] + 1},
    "not causal": lambda a: {**a, "is_causal": False},
    "scale": lambda a: {**a, "scale": a["scale"] * 1.02},
    "another cap": lambda a: {**a, "softcap": 2.2},
    "mask dropped": lambda a: {**a, "mask": None},
    "keys and values of other heads": lambda a: {**a, "k": a["k"].flip(1), "v": a["v"].flip(1)},
}


@pytest.mark.parametrize("name", ["right", *WRONG])
def test_the_comparison_sees_planted_mistakes(name):
    q, k, v = tensors(kv=2, s=9, t=9)
    i = torch.arange(9)
    mask = torch.where(torch.arange(9) % 4 > 0, 0.0, -2.0)[None, None, None, :]
    x = torch.tanh(q @ repeat_kv(k, 2).transpose(2, 3) / 2 / 2.0) * 2.0 + mask
    x = x.masked_fill((i[None, :] > i[:, None]) | (i[None, :] <= i[:, None] - 4), INF)
    expected = attend(x, repeat_kv(v, 2)).transpose(1, 2)
    arguments = {"q": q, "k": k, "v": v, "mask": mask, "scale": 0.5, "is_causal": True, "window": 4, "softcap": 2.0}
    if name == "right":
        close(attention(**arguments), expected)
        return
    with pytest.raises(AssertionError):
        close(attention(**WRONG[name](arguments)), expected)


# ── sinks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sink(q, k, v, sinks, *, first=False, drop=True, shift=False, spread=None, late=False):
    x = scores(q, k)
    sinks = sinks.clone() if late else sinks
    column = sinks.view(1, H, 1, 1).expand(B, H, S, 1) if spread is None else spread(sinks)
    x = torch.cat([column, x] if first else [x, column], -1)
    if late:
        sinks.add_(1)
    x = x - x.amax(-1, keepdim=True) if shift else x
    weights = F.softmax(x, -1)
    if not drop:
        return weights @ F.pad(v, (0, 0, 0, 1))
    return (weights[..., 1:] if first else weights[..., :-1]) @ v


@pytest.mark.parametrize("how", [{}, {"first": True}, {"shift": True}, {"shift": True, "first": True}])
def test_sinks_before_and_behind_the_scores_r17(how):
    inputs = (*tensors(), torch.randn(H))
    gm, record, _ = fuse(Fn(lambda *args: sink(*args, **how)), inputs)
    assert len(record.matches) == 1 and options(gm)["sinks"].meta["val"].shape == (H,)
    close(gm(*inputs), sink(*inputs, **how))


def test_sinks_that_the_op_has_not():
    inputs, narrow = (*tensors(), torch.randn(H)), (*tensors(torch.bfloat16), torch.randn(H).bfloat16())
    square = (*tensors(s=H, t=H), torch.randn(H))
    table = [
        (inputs, {"drop": False}, "is not dropped"),
        (
            inputs,
            {"spread": lambda x: x.view(1, H, 1, 1) * torch.arange(S).view(1, 1, S, 1).expand(B, H, S, 1)},
            "one logit",
        ),
        (narrow, {}, "takes the row's maximum away"),
        (square, {"spread": lambda x: x.reshape(1, 1, -1, 1).expand(B, H, H, 1)}, "one logit"),
        (inputs, {"late": True}, "writes to"),
    ]
    for given_inputs, how, reason in table:
        _, record, _ = fuse(Fn(lambda *args, h=how: sink(*args, **h)), given_inputs)
        assert record.matches == () and reason in record.reason, reason
