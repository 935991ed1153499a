"""The generated negatives for transforms that walk over the graph: each starts from a spelling they take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graft.ir.io.text import graph_text
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.patterns import Rewrite
from graft.passes.pipeline import run_one
from graft.passes.registry import TransformRegistry
from graft.testing.negatives import negatives, positive

CONFIG = load_config()
ops = torch.ops.graft


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    d = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., d:], x[..., :d]), -1) * sin


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def experts(x: Tensor, logits: Tensor, weight_up: Tensor, weight_down: Tensor) -> Tensor:
    """Hugging Face's batched experts: top two of eight, a matrix gathered for every row."""
    chosen, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), 2, dim=-1)
    chosen = (chosen / chosen.sum(-1, keepdim=True)).to(x.dtype)
    rows, expert = x.repeat_interleave(2, 0), ids.reshape(-1).clamp(0, 7)
    gate, up = torch.bmm(weight_up[expert], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    out = torch.bmm(weight_down[expert], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * chosen.reshape(-1).unsqueeze(-1)).view(x.shape[0], 2, -1).sum(1)


TURN = {"x": "b h s d", "cos": "b 1 s d", "sin": "b 1 s d"}
HEADS = {"q": "b h s d", "k": "b h s d", "v": "b h s d"}
SPELLINGS = {
    half: ("fuse_rope", TURN),
    pairs: ("fuse_rope", TURN),
    softmax_attention: ("fuse_attention", {**HEADS, "mask": "b 1 s s"}),
    sdpa: ("fuse_attention", HEADS),
    experts: ("fuse_moe", {"x": "n d", "logits": "n e", "weight_up": "e d+8 d", "weight_down": "e d f"}),
}
READERS = ("second reader", "returned")


def attempt(transform, case):
    text, expected = graph_text(case.module.graph), case.run()
    record = run_one(case.module, transform, replace(transform.config, enabled=True), Context())
    if not record.matches:
        assert record.reason, f"{case.name}: refused without a reason"
        assert graph_text(case.module.graph) == text, f"{case.name}: refused, and yet the graph changed"
        return record
    for got, wanted in zip(case.run(), expected, strict=True):
        # one rounding of each of two results, on top of sums in another order
        bound = 4 * torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound, msg=lambda m: f"{case.name}: {m}")
    return record


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_changed_spellings_are_refused_or_harmless(spelling):
    name, shapes = SPELLINGS[spelling]
    transform = TransformRegistry.get(name)(CONFIG.transforms[name])
    example = Rewrite(spelling, spelling, shapes)
    (match,) = attempt(transform, positive(example)).matches
    assert match.replaced
    tried, refused = Counter(), Counter()
    for case in negatives(example):
        record = attempt(transform, case)
        tried[case.kind] += 1
        refused[case.kind] += not record.matches
        if case.kind in READERS:
            told = record.near_misses or record.matches
            assert told, f"{case.name}: refused without a near miss: {record.reason}"
    assert spelling is sdpa or all(refused[kind] for kind in READERS), refused
    assert tried["dtype"] or spelling is sdpa, "SDPA takes no mixed dtypes; the others must be tried with them"
