"""RMSNorm and LayerNorm in the spellings that models use: which fuse, to what numbers, and why the others do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from marks import crossed

load_all()
OPS = torch.ops.graft
NAMES = ("fuse_rms_norm", "fuse_layer_norm", "fuse_add_rms_norm")
CONFIG = load_config({"transforms": {n: {"enabled": n in NAMES} for n in TransformRegistry.names()}})
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
D = 16


class Norm(nn.Module):
    """A function of x, weight and bias, the latter two parameters."""

    def __init__(self, function, dtype=torch.float32, weight_dtype=None):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        make = lambda: nn.Parameter(torch.randn(D, generator=generator).to(weight_dtype or dtype))  # noqa: E731
        self.function, self.w, self.b = function, make(), make()

    def forward(self, *xs):
        return self.function(*xs, self.w, self.b)


def data(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fuse(module, *args, dynamic_shapes=None):
    """The graph before as text, the graph after, and the report."""
    gm = export_graph(module, args, dynamic_shapes=dynamic_shapes)
    before = graph_text(gm.graph)
    return before, gm, run_pipeline(gm, CONFIG).transforms


def square(h):
    return h.pow(2).mean(-1, keepdim=True)


RMS = {
    "llama": lambda x, w, _: w * (x.float() * torch.rsqrt(square(x.float()) + 1e-5)).to(x.dtype),
    "weight right": lambda x, w, _: (x.float() * torch.rsqrt(square(x.float()) + 1e-5)).to(x.dtype) * w,
    "eps left": lambda x, w, _: w * (x.float() * torch.rsqrt(1e-5 + square(x.float()))).to(x.dtype),
    "x times x": lambda x, w, _: (
        w * (x.float() * ((x.float() * x.float()).mean(-1, True) + 1e-5).rsqrt()).to(x.dtype)
    ),
    "square": lambda x, w, _: w * (x.float() * (x.float().square().mean(-1, True) + 1e-5).rsqrt()).to(x.dtype),
    "factor left": lambda x, w, _: w * (torch.rsqrt(square(x.float()) + 1e-5) * x.float()).to(x.dtype),
    "pow -0.5": lambda x, w, _: w * (x.float() * (square(x.float()) + 1e-5).pow(-0.5)).to(x.dtype),
    "** -0.5": lambda x, w, _: w * (x.float() * (square(x.float()) + 1e-5) ** -0.5).to(x.dtype),
    "cast last": lambda x, w, _: (w * (x.float() * torch.rsqrt(square(x.float()) + 1e-5))).to(x.dtype),
    "float weight": lambda x, w, _: (w.float() * (x.float() * torch.rsqrt(square(x.float()) + 1e-5))).to(x.dtype),
    "t5": lambda x, w, _: w * (x * torch.rsqrt(square(x.float()) + 1e-5)).to(w.dtype),
    "gemma": lambda x, w, _: (x.float() * torch.rsqrt(square(x.float()) + 1e-5) * (1.0 + w.float())).type_as(x),
    "gemma w + 1": lambda x, w, _: ((w.float() + 1) * (x.float() * torch.rsqrt(square(x.float()) + 1e-5))).type_as(x),
    "eps 0": lambda x, w, _: w * (x.float() * torch.rsqrt(square(x.float()) + 0.0)).to(x.dtype),
    "no eps": lambda x, w, _: (w * (x.float() * torch.rsqrt(square(x.float())))).to(x.dtype),
    "gemma eps 0": lambda x, w, _: (x.float() * torch.rsqrt(square(x.float()) + 0) * (1.0 + w.float())).type_as(x),
    "torch.rms_norm": lambda x, w, _: torch.rms_norm(x, (D,), w, 1e-6),
    "F.rms_norm": lambda x, w, _: F.rms_norm(x, [D], weight=w, eps=1e-6),
    "torch.rms_norm, eps of the dtype": lambda x, w, _: torch.rms_norm(x, (D,), w),
}
ROUNDED = {
    "1 / sqrt": lambda x, w, _: w * (x.float() * (1 / torch.sqrt(square(x.float()) + 1e-5))).to(x.dtype),
    "reciprocal": lambda x, w, _: w * (x.float() * (square(x.float()) + 1e-5).sqrt().reciprocal()).to(x.dtype),
    "x / sqrt": lambda x, w, _: w * (x.float() / torch.sqrt(square(x.float()) + 1e-5)).to(x.dtype),
    "x / sqrt, gemma": lambda x, w, _: (x.float() / (square(x.float()) + 1e-5) ** 0.5 * (1 + w.float())).to(x.dtype),
    "true_divide": lambda x, w, _: w * torch.true_divide(x.float(), (square(x.float()) + 1e-5).sqrt()).to(x.dtype),
    "sum / d": lambda x, w, _: w * (x.float() * (x.float().pow(2).sum(-1, True) / D + 1e-5).rsqrt()).to(x.dtype),
    "x / sqrt(sum / d)": lambda x, w, _: (
        w * (x.float() / (x.float().pow(2).sum(-1, True) / x.shape[-1] + 1e-5).sqrt())
    ).to(x.dtype),
}


@pytest.mark.some(10)
@crossed("spelling", RMS, DTYPES)
def test_rms_norm_fuses_to_the_same_bits(spelling, dtype):
    module, x = Norm(RMS[spelling], DTYPES[dtype]), data(2, 3, D, dtype=DTYPES[dtype])
    _, gm, report = fuse(module, x)
    assert len(report["fuse_rms_norm"].matches) == 1, report["fuse_rms_norm"].reason
    assert [n.target for n in calls(gm.graph)] == [OPS.rms_norm.default]
    assert torch.equal(gm(x), module(x))


@crossed("spelling", ROUNDED, DTYPES)
def test_rms_norm_by_square_root_or_sum_fuses_to_a_rounding(spelling, dtype):
    module, x = Norm(ROUNDED[spelling], DTYPES[dtype]), data(2, 3, D, dtype=DTYPES[dtype])
    _, gm, report = fuse(module, x)
    assert len(report["fuse_rms_norm"].matches) == 1, report["fuse_rms_norm"].reason
    bound = 2 * torch.finfo(DTYPES[dtype]).eps
    torch.testing.assert_close(gm(x), module(x), rtol=bound, atol=bound)
    wrong = Norm(lambda x, w, b: ROUNDED[spelling](x, w, b) * (1 + 6 * bound), DTYPES[dtype])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(gm(x), wrong(x), rtol=bound, atol=bound)


@pytest.mark.parametrize("spelling", ["llama", "torch.rms_norm", "gemma"])
@pytest.mark.parametrize("shape", [(D,), (5, D), (2, 3, 4, D)])
def test_rms_norm_of_any_rank(spelling, shape):
    module, x = Norm(RMS[spelling]), data(*shape)
    _, gm, report = fuse(module, x)
    assert len(report["fuse_rms_norm"].matches) == 1, report["fuse_rms_norm"].reason
    assert torch.equal(gm(x), module(x))


@pytest.mark.parametrize("spelling", ["llama", "torch.rms_norm", "gemma", "t5"])
def test_rms_norm_with_dynamic_sizes(spelling):
    module = Norm(RMS[spelling], torch.bfloat16)
    dims = ({0: torch.export.Dim("b"), 1: torch.export.Dim("s")},)
    _, gm, report = fuse(module, data(2, 3, D, dtype=torch.bfloat16), dynamic_shapes=(dims,))
    assert len(report["fuse_rms_norm"].matches) == 1, report["fuse_rms_norm"].reason
    x = data(4, 7, D, dtype=torch.bfloat16)
    assert torch.equal(gm(x), module(x))


@pytest.mark.parametrize("spelling", ["llama", "cast last", "float weight", "gemma", "torch.rms_norm"])
def test_float32_weight_on_bfloat16_keeps_the_result_dtype(spelling):
    module, x = Norm(RMS[spelling], weight_dtype=torch.float32), data(2, 3, D, dtype=torch.bfloat16)
    _, gm, report = fuse(module, x)
    assert len(report["fuse_rms_norm"].matches) == 1, report["fuse_rms_norm"].reason
    assert gm(x).dtype == module(x).dtype
    assert torch.equal(gm(x), module(x))


def test_nn_rms_norm_fuses():
    for module in (nn.RMSNorm(D), nn.RMSNorm(D, eps=1e-6)):
        x = data(2, D)
        _, gm, report = fuse(module, x)
        assert len(report["fuse_rms_norm"].matches) == 1 and torch.equal(gm(x), module(x))


def spelled_norm(x, w, dim=-1, mean_of=None):
    h = x.float()
    return w * (h * torch.rsqrt((mean_of or h.pow(2)).mean(dim, keepdim=True) + 1e-5)).to(x.dtype)


def with_inner(x, w, _):
    r = torch.rsqrt(square(x) + 1e-5)
    return w * (x * r), r


RMS_NEGATIVES = {
    "no weight": (lambda x, w, _: torch.rms_norm(x, (D,), None, 1e-6), "the norm has no weight"),
    "no weight, no eps": (lambda x, w, _: torch.rms_norm(x, (D,)), "the norm has no weight"),
    "two dims": (lambda x, w, _: torch.rms_norm(x, (3, D), (w + x * 0)[0]), "found [3, 16]"),
    "computed weight": (lambda x, w, _: torch.rms_norm(x, (D,), w.exp(), 1e-6), "is computed in the graph"),
    "weight first": (lambda x, w, _: (w * x) * torch.rsqrt(square(x) + 1e-5), "before the row is normalized"),
    "another dim": (lambda x, w, _: spelled_norm(x, w, dim=-2), "expected the value -1, found -2"),
    "inner value returned": (with_inner, "second reader"),
    "dropout in training": (
        lambda x, w, _: w * F.dropout(x * torch.rsqrt(square(x) + 1e-5), 0.5, True),
        "is aten.dropout, expected aten.mul.Tensor",
    ),
    "weight for each token": (
        lambda x, w, _: (x * 0 + w) * (x * torch.rsqrt(square(x) + 1e-5)),
        "one value a channel",
    ),
    "another divisor": (
        lambda x, w, _: w * (x * (x.pow(2).sum(-1, True) / 15 + 1e-5).rsqrt()),
        "expected the value 16, found 15",
    ),
}


@pytest.mark.parametrize("name", RMS_NEGATIVES)
def test_what_is_no_rms_norm_is_left_alone(name):
    function, reason = RMS_NEGATIVES[name]
    before, gm, report = fuse(Norm(function), data(2, 3, D))
    record = report["fuse_rms_norm"]
    assert not record.matches and record.near_misses
    assert reason in record.reason, record.reason
    assert graph_text(gm.graph) == before


def test_statistics_in_bfloat16_are_not_those_of_the_op():
    module = Norm(lambda x, w, _: w * (x * torch.rsqrt(square(x) + 1e-5)), torch.bfloat16)
    before, gm, report = fuse(module, data(2, 3, D, dtype=torch.bfloat16))
    assert "is not cast to torch.float32" in report["fuse_rms_norm"].reason
    assert graph_text(gm.graph) == before


def test_float64_is_refused():
    _, _, report = fuse(Norm(RMS["torch.rms_norm"], torch.float64), data(2, D, dtype=torch.float64))
    assert "float64" in report["fuse_rms_norm"].reason


# ── LayerNorm ───────────────────────────────────────────────────────────────────────────────────────────────────


def cohere(x, w, _):
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt(variance + 1e-5)
    return (w.to(torch.float32) * h).to(x.dtype)


def in_float(x, w, b):
    h = x.float()
    c = h - h.mean(-1, keepdim=True)
    return (c / torch.sqrt(c.square().mean(-1, keepdim=True) + 1e-6) * w.float() + b.float()).to(x.dtype)


def classic(variance, by_rsqrt=False, bias=True):
    def norm(x, w, b):
        c, v = x - x.mean(-1, keepdim=True), variance(x) + 1e-6
        y = c * torch.rsqrt(v) * w if by_rsqrt else c / torch.sqrt(v) * w
        return y + b if bias else y

    return norm


def centred_square(x):
    return (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)


LAYER = {
    "F.layer_norm": lambda x, w, b: F.layer_norm(x, (D,), w, b),
    "F.layer_norm, eps": lambda x, w, b: F.layer_norm(x, (D,), w, b, 1e-6),
    "no bias": lambda x, w, b: F.layer_norm(x, (D,), w),
    "no bias, eps": lambda x, w, b: F.layer_norm(x, (D,), w, None, 1e-6),
    "neither": lambda x, w, b: F.layer_norm(x, (D,)),
    "neither, eps": lambda x, w, b: F.layer_norm(x, (D,), eps=1e-6),
    "nemotron's w + 1": lambda x, w, b: F.layer_norm(x, (D,), w + 1, b),
    "cohere": cohere,
    "in float32, with bias": in_float,
    "pow and mean": classic(centred_square),
    "pow and mean, rsqrt": classic(centred_square, True),
    "pow and mean, no bias": classic(centred_square, True, False),
    "var": classic(lambda x: x.var(-1, unbiased=False, keepdim=True)),
    "var, correction": classic(lambda x: torch.var(x, -1, correction=0, keepdim=True), True),
    "var, no bias": classic(lambda x: x.var(-1, unbiased=False, keepdim=True), False, False),
}


@pytest.mark.some(8)
@crossed("spelling", LAYER, DTYPES)
def test_layer_norm_fuses_to_the_same_bits(spelling, dtype):
    module, x = Norm(LAYER[spelling], DTYPES[dtype]), data(2, 3, D, dtype=DTYPES[dtype])
    _, gm, report = fuse(module, x)
    assert len(report["fuse_layer_norm"].matches) == 1, report["fuse_layer_norm"].reason
    assert not report["fuse_rms_norm"].matches
    assert sum(is_op(n, OPS.layer_norm.default) for n in calls(gm.graph)) == 1
    assert torch.equal(gm(x), module(x))


@pytest.mark.parametrize("spelling", ["F.layer_norm", "cohere", "var"])
def test_layer_norm_with_dynamic_sizes_and_any_rank(spelling):
    module = Norm(LAYER[spelling])
    dims = ({0: torch.export.Dim("b"), 1: torch.export.Dim("s")},)
    _, gm, report = fuse(module, data(2, 3, D), dynamic_shapes=(dims,))
    assert len(report["fuse_layer_norm"].matches) == 1, report["fuse_layer_norm"].reason
    x = data(4, 7, D)
    assert torch.equal(gm(x), module(x))
    _, gm, report = fuse(module, data(D))
    assert len(report["fuse_layer_norm"].matches) == 1, report["fuse_layer_norm"].reason


def test_nn_layer_norm_fuses():
    for module in (nn.LayerNorm(D), nn.LayerNorm(D, bias=False, eps=1e-6), nn.LayerNorm(D, elementwise_affine=False)):
        x = data(2, D)
        _, gm, report = fuse(module, x)
        assert len(report["fuse_layer_norm"].matches) == 1 and torch.equal(gm(x), module(x))


def std_norm(x, w, b):
    return w * ((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)) + b


LAYER_NEGATIVES = {
    "unbiased": (classic(lambda x: x.var(-1, keepdim=True)), "the variance is unbiased"),
    "unbiased, rsqrt": (classic(lambda x: x.var(-1, keepdim=True), True), "the variance is unbiased"),
    "annotated transformer": (std_norm, "the variance is unbiased"),
    "two dims": (lambda x, w, b: F.layer_norm(x, (3, D)), "found [3, 16]"),
    "another mean": (classic(lambda x: x.pow(2).mean(-1, keepdim=True)), "expected %sub again, found"),
    "another dim": (classic(lambda x: x.var(-2, unbiased=False, keepdim=True)), "expected the value -1, found -2"),
    "computed weight": (lambda x, w, b: classic(centred_square)(x, w.exp(), b), "is computed in the graph"),
}


@pytest.mark.parametrize("name", LAYER_NEGATIVES)
def test_what_is_no_layer_norm_is_left_alone(name):
    function, reason = LAYER_NEGATIVES[name]
    before, gm, report = fuse(Norm(function), data(2, 3, D))
    record = report["fuse_layer_norm"]
    assert not record.matches and record.near_misses, record.reason
    assert reason in record.reason, record.reason
    assert graph_text(gm.graph) == before


# ── residual add ────────────────────────────────────────────────────────────────────────────────────────────────


def rms(x, w):
    return w * (x.float() * torch.rsqrt(square(x.float()) + 1e-5)).to(x.dtype)


def two_blocks(x, w, b):
    for _ in range(2):
        x = x + rms(x, w).sin()
        x = rms(x, b).cos() + x
    return rms(x, w)


ADDS = {  # function of two inputs, weight, bias; how many adds fuse
    "x + residual": (lambda x, r, w, _: rms(x + r, w), 1),
    "residual + x": (lambda x, r, w, _: rms(r + x, w), 1),
    "sum read later": (lambda x, r, w, _: rms(x + r, w).sin() + (x + r), 1),
    "sum returned": (lambda x, r, w, _: (rms(x + r, w), x + r), 1),
    "two blocks": (lambda x, r, w, b: two_blocks(x + r, w, b), 5),
    "two norms of one sum": (
        lambda x, r, w, b: torch.rms_norm(x + r, (D,), w, 1e-6) * torch.rms_norm(x + r, (D,), b, 1e-6).sin(),
        1,
    ),
    "torch.rms_norm": (lambda x, r, w, _: torch.rms_norm(x + r, (D,), w, 1e-6), 1),
}


@crossed("name", ADDS, ["float32", "bfloat16"])
def test_the_add_goes_into_the_norm(name, dtype):
    function, count = ADDS[name]
    args = [data(2, 3, D, dtype=DTYPES[dtype], seed=s) for s in (0, 1)]
    module = Norm(function, DTYPES[dtype])
    _, gm, report = fuse(module, *args)
    record = report["fuse_add_rms_norm"]
    assert len(record.matches) == count, record.reason
    torch.testing.assert_close(gm(*args), module(*args), rtol=0, atol=0)
    if name == "two norms of one sum":
        assert ["is part of an earlier match" in miss.reason for miss in record.near_misses] == [True]


def test_two_norms_that_share_their_row_are_refused():
    """Both read the row before the weight, which no op gives."""
    module, x = Norm(lambda x, w, b: rms(x, w) * rms(x, b)), data(2, 3, D)
    before, gm, report = fuse(module, x)
    assert "has a second reader" in report["fuse_rms_norm"].reason
    assert graph_text(gm.graph) == before


@pytest.mark.parametrize(
    ("residual", "reason"),
    [(data(D), "one is broadcast"), (data(1, 3, D), "one is broadcast"), (data(2, 3, D).half(), "the summands are")],
)
def test_unlike_summands_stay_apart(residual, reason):
    module, x = Norm(lambda x, r, w, _: rms(x + r, w)), data(2, 3, D)
    _, gm, report = fuse(module, x, residual)
    record = report["fuse_add_rms_norm"]
    assert not record.matches and reason in record.reason, record.reason
    assert torch.equal(gm(x, residual), module(x, residual))
