"""fuse_attention: masks that follow from sizes are proven, or stay."""

from __future__ import annotations

import pytest
import torch

from attention_cases import (
    INF,
    Fn,
    S,
    attend,
    causal,
    close,
    fuse,
    lowest,
    options,
    tensors,
)
from attention_masks import positional, scores
from graft.ir.nodes import calls, is_op
from graft.ir.sizes.follow import SizeEvaluator
from graft.ir.trace import export_graph
from marks import left_out

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


@pytest.mark.some(4)
@pytest.mark.parametrize(("dynamic", "more"), [(True, 0), (True, 3), left_out((False, 0)), left_out((False, 3))])
@pytest.mark.parametrize("kind", POSITIONAL)
def test_masks_that_follow_from_sizes_are_proven_or_stay(kind, more, dynamic):
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


@pytest.mark.some(6)
@pytest.mark.parametrize("kind", FAR_OFF)
@pytest.mark.parametrize("apart", [False, True])
def test_masks_of_dynamic_sizes_are_right_at_every_size(kind, apart):
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
