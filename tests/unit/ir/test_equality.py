"""Proofs of equality: what gives the same bits is proved, and nothing that is only nearly the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from graft.ir.equality.proof import prove_equal
from graft.ir.equality.terms import NotProved
from graft.ir.evaluate import RecordedCall, Subprogram
from graft.ir.nodes import output_node, placeholders, val
from graft.ir.trace import export_graph, raw_trace
from marks import FULL

NAMES = ("x", "y", "z", "w", "half", "big")
F32, BF16 = torch.float32, torch.bfloat16


class Inputs(nn.Module):
    def forward(self, x, y, z, w, half, big):
        return x + y + z + w, half + 1, big + 1


def examples(batch=3, tokens=5):
    torch.manual_seed(batch * 10 + tokens)
    shape = (batch, tokens, 8)
    return (*(torch.randn(shape) for _ in range(3)), torch.randn(8), torch.randn(shape).to(BF16), torch.randn(4, 4))


@pytest.fixture(scope="module")
def fakes():
    """x, y, z: [b, s, 8] with open b and s; w: [8]; half: bfloat16; big: [4, 4]."""
    open_sizes = {0: torch.export.Dim("b", max=64), 1: torch.export.Dim("s", max=64)}
    sizes = dict.fromkeys(NAMES, None) | dict.fromkeys(("x", "y", "z", "half"), open_sizes)
    gm = export_graph(Inputs(), examples(), dynamic_shapes=sizes)
    return [val(node) for node in placeholders(gm.graph)]


def piece(function, fakes, inputs):
    gm = raw_trace(lambda *given: function(*given), fakes)
    calls = {n: RecordedCall(n.op, n.target, n.args, n.kwargs, i) for i, n in enumerate(gm.graph.nodes)}
    names = dict(zip(placeholders(gm.graph), inputs, strict=True))
    result = output_node(gm.graph).args[0]
    outputs = tuple(result) if isinstance(result, (list, tuple)) else (result,)
    return Subprogram(outputs, calls, lambda name: getattr(gm, name), names.get)


def prove(first, second, fakes):
    inputs = [torch.fx.Graph().placeholder(name) for name in NAMES]
    prove_equal(*(piece(function, fakes, inputs) for function in (first, second)))


def rotate_half(x):
    return torch.cat((-x[..., 4:], x[..., :4]), -1)


EQUAL = {
    "commuted": (lambda x, y, z, *_: x * y + z, lambda x, y, z, *_: z + y * x),
    "a transpose inside": (
        lambda x, y, *_: (x * y).transpose(1, 2),
        lambda x, y, *_: x.transpose(1, 2) * y.transpose(1, 2),
    ),
    "permuted back": (lambda x, *_: x.permute(2, 0, 1).permute(1, 2, 0) + 1, lambda x, *_: x + 1),
    "split and merged": (
        lambda x, y, *_: x.reshape(x.shape[0], x.shape[1], 2, 4).flatten(2) * y,
        lambda x, y, *_: y * x,
    ),
    "heads": (
        lambda x, y, *_: (x.unflatten(-1, (2, 4)) + y.unflatten(-1, (2, 4))).flatten(0, 1),
        lambda x, y, *_: (x + y).reshape(-1, 2, 4),
    ),
    "tokens merged and split": (
        lambda x, y, *_: (x.flatten(0, 1) - y.flatten(0, 1)).view(x.shape),
        lambda x, y, *_: (x - y).flatten(0, 1).view(x.shape),
    ),
    "a slice of a cat": (lambda x, y, *_: torch.cat((x, y), -1)[..., 8:12] * 2, lambda x, y, *_: y[..., :4] * 2),
    "a slice of a slice": (lambda x, *_: x[..., 2:][..., 1:4] + 1, lambda x, *_: x[..., 3:6] + 1),
    "expanded": (lambda x, y, z, w, *_: w.expand(x.shape) * x, lambda x, y, z, w, *_: x * w),
    "a cast twice": (lambda x, *_: x.to(BF16).to(BF16).to(F32) * 2, lambda x, *_: x.to(BF16).to(F32) * 2),
    "rotated": (
        lambda x, y, z, *_: x * y + rotate_half(x) * z,
        lambda x, y, z, *_: z * torch.cat((x[..., 4:].neg(), x[..., 0:4]), 2) + y * x,
    ),
    "norm": (
        lambda x, y, z, w, *_: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        lambda x, y, z, w, *_: (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * x) * w,
    ),
    "unsqueezed": (lambda x, *_: (x.unsqueeze(1) * 3).squeeze(1), lambda x, *_: x * 3),
    "two results": (lambda x, y, *_: (x + y, x * y), lambda x, y, *_: (y + x, y * x)),
    "a view of the input": (lambda x, *_: x.transpose(0, 1).transpose(1, 2), lambda x, *_: x.permute(1, 2, 0)),
}

UNEQUAL = {
    "reassociated": (lambda x, y, z, *_: (x + y) + z, lambda x, y, z, *_: x + (y + z)),
    "distributed": (lambda x, y, z, *_: x * (y + z), lambda x, y, z, *_: x * y + x * z),
    "a cast dropped": (lambda x, y, *_: x.to(BF16).to(F32) * y, lambda x, y, *_: x * y),
    "a cast after instead of before": (
        lambda x, y, *_: (x * y).to(BF16),
        lambda x, y, *_: x.to(BF16) * y.to(BF16),
    ),
    "an accumulation in 16 bits": (
        lambda x, y, z, w, half, *_: half.to(F32).sum(-1).to(BF16),
        lambda x, y, z, w, half, *_: half.sum(-1),
    ),
    "a difference swapped": (lambda x, y, *_: x - y, lambda x, y, *_: y - x),
    "a quotient swapped": (lambda x, y, *_: x / y, lambda x, y, *_: y / x),
    "a reciprocal": (lambda x, y, *_: x / y, lambda x, y, *_: x * y.reciprocal()),
    "another axis": (lambda *a: a[5].sum(0), lambda *a: a[5].sum(1)),
    "another softmax": (lambda *a: a[5].softmax(0), lambda *a: a[5].softmax(1)),
    "broadcast along the other axis": (
        lambda *a: a[5] * a[5][0].unsqueeze(0),
        lambda *a: a[5] * a[5][0].unsqueeze(1),
    ),
    "a transpose left out": (lambda *a: a[5].t() + 1.0, lambda *a: a[5] + 1.0),
    "a view in place of a transpose": (
        lambda x, *_: x.reshape(x.shape[0], x.shape[1], 2, 4).transpose(1, 2) + 1,
        lambda x, *_: x.reshape(x.shape[0], 2, x.shape[1], 4) + 1,
    ),
    "another slice": (lambda x, *_: x[..., 1:5] + 1, lambda x, *_: x[..., 0:4] + 1),
    "a longer slice": (lambda x, *_: x[..., :5] + 1, lambda x, *_: x[..., :4] + 1),
    "another step": (lambda x, *_: x[..., 0:8:2] + 1, lambda x, *_: x[..., 0:4] + 1),
    "the other piece": (lambda x, y, *_: torch.cat((x, y), -1)[..., 8:] + 1, lambda x, y, *_: x + 1),
    "across two pieces": (lambda x, y, *_: torch.cat((x, y), -1)[..., 4:12] + 1, lambda x, y, *_: x + 1),
    "pieces swapped": (lambda x, y, *_: torch.cat((x, y), -1), lambda x, y, *_: torch.cat((y, x), -1)),
    "the other half negated": (lambda x, *_: rotate_half(x), lambda x, *_: -rotate_half(x)),
    "another index": (lambda x, *_: x[..., 1] + 1, lambda x, *_: x[..., 2] + 1),
    "another literal": (lambda x, *_: x + 1e-5, lambda x, *_: x + 1e-6),
    "a factor": (lambda x, y, *_: torch.add(x, y, alpha=2), lambda x, y, *_: torch.add(x, y)),
    "eps outside of the root": (lambda x, *_: (x + 1e-5).rsqrt(), lambda x, *_: x.rsqrt() + 1e-5),
    "another function": (lambda x, *_: F.gelu(x), lambda x, *_: F.gelu(x, approximate="tanh")),
    "another layout of the result": (lambda x, *_: x.transpose(1, 2) + 1, lambda x, *_: (x + 1).mT.contiguous()),
    "a function of another layout": (lambda x, *_: F.silu(x)[..., :4] + 1, lambda x, *_: F.silu(x[..., :4]) + 1),
    "a view in place of a copy": (lambda x, *_: x.clone(), lambda x, *_: x),
    "a copy in place of a view": (lambda x, *_: x[..., :4], lambda x, *_: torch.cat((x, x), -1)[..., :4]),
    "results that share memory": (
        lambda x, y, *_: [(t := x + y), t[0]],
        lambda x, y, *_: [x + y, (x + y)[0]],
    ),
    "written to": (lambda x, y, *_: x.clone().add_(y), lambda x, y, *_: x + y),
    "random": (lambda x, *_: x * torch.rand_like(x), lambda x, *_: x * torch.rand_like(x)),
    "dropout": (lambda x, *_: F.dropout(x, 0.5, True), lambda x, *_: F.dropout(x, 0.5, True)),
    "not filled": (lambda x, *_: x * torch.empty_like(x), lambda x, *_: x * torch.empty_like(x)),
    "promotion of a tensor without dims": (
        lambda x, y, z, w, *_: x < w.double().sum(),
        lambda x, y, z, w, *_: x < w.double().sum().reshape(1),
    ),
    "bits read as another dtype": (lambda x, *_: x.view(torch.int32) + 1, lambda x, *_: x.to(torch.int32) + 1),
    "more memory than the tensor": (
        lambda *a: a[5].as_strided((2, 2), (1, 2)) + 1,
        lambda *a: a[5].as_strided((2, 2), (1, 2)) + 1,
    ),
    "fewer results are other results": (lambda x, y, *_: (x, y), lambda x, y, *_: (y, x)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_same_operations_are_proved(name, fakes):
    prove(*EQUAL[name], fakes)


@pytest.mark.some(20)
@pytest.mark.parametrize("name", UNEQUAL)
def test_what_is_nearly_the_same_is_not_proved(name, fakes):
    with pytest.raises(NotProved):
        prove(*UNEQUAL[name], fakes)


# ── whatever is proved gives the same bits ──────────────────────────────────────────────────────────────────────────

STEPS = {
    "add": lambda a, b: a + b,
    "dda": lambda a, b: b + a,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a, b: -a,
    "cast": lambda a, b: a.to(BF16).to(F32),
    "there and back": lambda a, b: a.transpose(-1, -2).transpose(-1, -2),
    "heads": lambda a, b: a.unflatten(-1, (2, 4)).flatten(-2),
    "heads apart": lambda a, b: a.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2),
    "halves": lambda a, b: torch.cat((a[..., 4:], a[..., :4]), -1),
    "halves again": lambda a, b: torch.cat((a, a), -1)[..., 4:12],
    "joined": lambda a, b: torch.cat((a, b), -1)[..., :8],
    "rows": lambda a, b: a.flatten(0, 1).view(a.shape),
    "scaled": lambda a, b: a * 0.5,
    "squared": lambda a, b: a * a,
    "silu": lambda a, b: F.silu(a),
    "mean": lambda a, b: a - a.mean(-1, keepdim=True),
}


def program(steps):
    def run(x, y, z, *_):
        made, others = x, (y, z)
        for index, step in enumerate(steps):
            made = STEPS[step](made, others[index % 2])
        return made + 0.25

    return run


names = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4)
# steps that may change places, or stand for each other; whether they may is what is asked
edits = st.sampled_from(
    [("add", "dda"), ("halves", "halves again"), ("heads", "rows"), ("sub", "add"), ("neg", "cast")]
)


@settings(max_examples=100 if FULL else 10, deadline=None)
@given(names, edits, st.booleans(), st.integers(0, 3))
def test_whatever_is_proved_gives_the_same_bits(fakes, steps, edit, swap, at):
    other = [edit[1] if step == edit[0] else step for step in steps]
    if swap and at + 1 < len(other):
        other[at], other[at + 1] = other[at + 1], other[at]
    assume(other != steps)
    first, second = program(steps), program(other)
    try:
        prove(first, second, fakes)
    except NotProved:
        return
    for sizes in ((3, 5), (1, 1), (2, 9), (4, 4)):
        given = examples(*sizes)
        one, two = first(*given), second(*given)
        assert torch.equal(one, two) and one.stride() == two.stride(), (steps, other)
