"""Linear layers that are not Llama's: activations without a gate, scaled residuals, norms behind a block, [k, n]
weights, what weights alone give; and plain ones, whose kernel is chosen by measurement."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decode_cases import D, norm, only, run_transforms, targets, transformed, x_of
from graft.base.errors import TransformError
from graft.ir.edit import second_module
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op
from graft.ir.trace import export_graph
from graft.passes.base import Context
from graft.passes.library.last_token_logits import norm_before
from graft.passes.library.matvec import fuse_residual_into_matvec
from graft.passes.pipeline import run_pipeline
from graft.weights.lazy import LazyWeights

ACTIVATION, NORM, DISPATCH = "fuse_activation_into_matvec", "fuse_residual_into_norm", "dispatch_linear"


class Function(nn.Module):
    """A function of inputs, a weight [n, D], one [D, n], two vectors and a bias."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(2)
        self.function = function
        self.w, self.columns = (nn.Parameter(torch.randn(D, D).to(dtype) / 4) for _ in range(2))
        self.g, self.h = (nn.Parameter(torch.rand(D).to(dtype) + 0.5) for _ in range(2))
        self.b = nn.Parameter(torch.randn(D).to(dtype))

    def forward(self, *xs):
        return self.function(self, *xs)


def gelu_of_gpt2(y):
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


def refused(function, name, text, *first, inputs=2):
    module, args = Function(function), tuple(x_of(2, 3, D, seed=seed) for seed in range(inputs))
    captured = export_graph(module, args)
    plain, _ = run_transforms(second_module(captured), *first)
    gm, report = run_transforms(captured, *first, name)
    record = report.transforms[name]
    reasons = [record.reason, *(miss.reason for miss in record.near_misses)]
    assert not record.matches and any(text in reason for reason in reasons), reasons
    assert graph_text(gm.graph) == graph_text(plain.graph)


# ── activations without a gate ──────────────────────────────────────────────────────────────────────────────────


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda y: F.relu(y).pow(2),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_becomes_the_epilogue(name, bias):
    module = Function(lambda m, x: ACTIVATIONS[name](F.linear(x, m.w, m.b if bias else None)))
    x = x_of(2, 3, D)
    gm, report = transformed(module, (x,), ACTIVATION)
    (fused,) = calls(gm.graph)
    assert fused.args[8] == name and fused.args[13] is False  # glu
    torch.testing.assert_close(gm(x), module(x))
    assert report.transforms[ACTIVATION].matches[0].numeric_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_as_gpt2_spells_it(dtype):
    """In 16 bits the model rounds eight times: what is rounded once is nearer to float64, and the check knows."""
    module, x = Function(lambda m, x: gelu_of_gpt2(F.linear(x, m.w, m.b)), dtype), x_of(2, 3, D, dtype=dtype)
    gm, _ = transformed(module, (x,), ACTIVATION)
    assert targets(gm) == ["graft.fused_linear"]
    exact = gelu_of_gpt2(F.linear(x.double(), module.w.double(), module.b.double()))
    own, ours = ((found.double() - exact).abs().max() for found in (module(x), gm(x)))
    assert ours <= 1.1 * own + 1e-6


def test_after_a_norm_that_went_in_first():
    module = Function(lambda m, x: F.gelu(F.linear(norm(x, m.g), m.w)))
    x = x_of(2, 3, D)
    gm, _ = transformed(module, (x,), "fuse_rms_norm", "fuse_norm_into_matvec", ACTIVATION)
    assert targets(gm) == ["graft.fused_linear"]
    torch.testing.assert_close(gm(x), module(x))


NO_EPILOGUE = {
    "and would be computed twice": lambda m, x, r: F.gelu(y := F.linear(x, m.w)) + y,
    "computed in the graph": lambda m, x, r: F.gelu(F.linear(x, m.w.exp())),
    "no linear layer of the graph is followed by an activation": lambda m, x, r: F.linear(F.gelu(x), m.w) + r,
}


@pytest.mark.parametrize("reason", NO_EPILOGUE)
def test_activations_that_stay(reason):
    refused(NO_EPILOGUE[reason], ACTIVATION, reason)


def test_an_activation_of_a_sum_stays():
    first = ("fuse_residual_into_matvec",)
    refused(lambda m, x, r: F.gelu(F.linear(x, m.w) + r), ACTIVATION, "adds a residual, which comes after", *first)


# ── scaled residuals ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_residual_becomes_alpha(dtype):
    def layer(m, x, r):
        total = r + F.linear(x, m.w) * 0.22
        return total, norm(total, m.g)

    module, args = Function(layer, dtype), tuple(x_of(2, 3, D, seed=seed, dtype=dtype) for seed in (0, 1))
    captured = export_graph(module, args)
    named = ("fuse_rms_norm", "fuse_add_rms_norm")
    plain, _ = run_transforms(second_module(captured), *named)
    gm, _ = run_transforms(captured, *named, "fuse_residual_into_matvec")
    fused = next(calls(gm.graph))
    assert fused.kwargs.get("alpha", fused.args[-1]) == 0.22 and targets(gm)[1] == "graft.rms_norm"
    for found, expected in zip(gm(*args), plain(*args), strict=True):
        assert torch.equal(found, expected)  # the reference rounds the multiple, then the sum


def test_a_wrong_multiple_is_rolled_back(monkeypatch):
    right = fuse_residual_into_matvec.scaled_fused
    wrong = [
        one if one.replacement is not right else type(one)(**{**vars(one), "replacement": other_multiple})
        for one in fuse_residual_into_matvec.REWRITES
    ]
    monkeypatch.setattr(fuse_residual_into_matvec, "REWRITES", tuple(wrong))
    module, args = Function(lambda m, x, r: F.linear(x, m.w) * 0.22 + r), (x_of(2, 3, D), x_of(2, 3, D, seed=1))
    with pytest.raises(TransformError, match="rolled back"):
        transformed(module, args, "fuse_residual_into_matvec")


def other_multiple(x, weight, residual, alpha, bias):
    return torch.ops.graft.fused_linear(x, weight, bias, residual=residual, alpha=alpha / 2)


# ── norms behind a block ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_whose_result_is_normed(dtype):
    """Gemma: norm, sum, norm, linear layer are two kernels, bitwise what they were."""

    def layer(m, x, r):
        total = r + norm(F.linear(x, m.w), m.g)
        return total + F.linear(norm(total, m.h), m.columns)

    module, args = Function(layer, dtype), tuple(x_of(2, 3, D, seed=seed, dtype=dtype) for seed in (0, 1))
    captured = export_graph(module, args)
    named = ("fuse_rms_norm", "fuse_add_rms_norm")
    plain, _ = run_transforms(second_module(captured), *named)
    matvec = ("fuse_residual_into_matvec", NORM, "fuse_norm_into_matvec", DISPATCH)
    gm, report = run_transforms(captured, *named, *matvec)
    assert targets(gm) == ["graft.fused_linear", "graft.rms_norm", "graft.fused_linear"]
    assert torch.equal(gm(*args), plain(*args))
    assert [len(report.transforms[name].matches) for name in matvec] == [1, 1, 1, 1]


def test_a_plain_sum_after_a_norm():
    module, args = Function(lambda m, x, r: norm(x, m.g) + r), (x_of(2, 3, D), x_of(2, 3, D, seed=1))
    gm, _ = transformed(module, args, "fuse_rms_norm", NORM)
    assert targets(gm) == ["graft.rms_norm"] and torch.equal(gm(*args), module(*args))


NO_SUM = {
    "is broadcast": lambda m, x, r: norm(x, m.g) + r[:, :1],
    "the norm torch.float32": lambda m, x, r: norm(x, m.g) + r.to(torch.float64),
    "is the residual of the match, and a part of it": lambda m, x, r: (y := norm(x, m.g)) + y,
    "no norm of a block's result is followed by a sum": lambda m, x, r: F.linear(norm(x, m.g), m.w) + r,
}


@pytest.mark.parametrize("reason", NO_SUM)
def test_sums_that_stay(reason):
    refused(NO_SUM[reason], NORM, reason, "fuse_rms_norm")


def test_rows_are_not_chosen_before_a_norm_that_adds_a_residual():
    """Of the residual they would have to be chosen too."""
    module, args = Function(lambda m, x, r: F.linear(norm(x, m.g) + r, m.w)), (x_of(2, 3, D), x_of(2, 3, D, seed=1))
    gm, _ = transformed(module, args, "fuse_rms_norm", NORM)
    linear = list(calls(gm.graph))[-1]
    assert is_op(linear.args[0], torch.ops.graft.rms_norm.default) and norm_before(linear) == ()
    linear.args[0].args = linear.args[0].args[:-1]  # without the residual
    assert norm_before(linear) == (linear.args[0],)


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────


def strided(m, x):
    return by_columns(m, x) + m.columns.as_strided((D,), (2,))


def test_a_weight_that_is_read_as_it_lies_is_not_turned():
    module, x = Function(strided), x_of(2, 3, D)
    expected = module(x)
    gm, report = transformed(module, (x,), "transpose_weight")
    record = report.transforms["transpose_weight"]
    assert not record.matches and "reads the weight columns as it lies" in record.reason
    torch.testing.assert_close(gm(x), expected)


def test_a_weight_that_lies_in_its_file_is_not_turned():
    """Its memory was never written: turned, nobody would know what belongs there."""
    module = Function(by_columns)
    captured, lazy = export_graph(module, (x_of(2, 3, D),)), LazyWeights()
    lazy.put(captured.get_parameter("columns"))
    context = Context(route="decoder", context_length=64, lazy=lazy)
    report = run_pipeline(captured, only("transpose_weight", verify="structure"), context)
    record = report.transforms["transpose_weight"]
    assert not record.matches and "lies in its file" in record.reason


def by_columns(m, x):
    return torch.addmm(m.b, x.reshape(-1, D), m.columns).reshape(2, 3, D)


def test_a_weight_is_turned_in_place():
    """The old parameter keeps its values and its shape, in the memory of the new one."""
    module, x = Function(by_columns), x_of(2, 3, D)
    values, expected = module.columns.detach().clone(), module(x)
    gm, _ = transformed(module, (x,), "transpose_weight", DISPATCH)
    assert targets(gm) == ["graft.fused_linear"]
    torch.testing.assert_close(gm(x), expected)
    rows = gm.get_parameter("columns_rows")
    assert torch.equal(rows.t(), values) and rows.is_contiguous()
    assert torch.equal(module.columns, values)
    assert rows.untyped_storage().data_ptr() == module.columns.untyped_storage().data_ptr()


def test_heads_that_lie_side_by_side_are_rows():
    module = Function(lambda m, x: torch.addmm(m.b, x.reshape(-1, D), m.columns).reshape(2, 3, D))
    x = x_of(2, 3, 4, D // 4)
    expected = module(x)
    gm, _ = transformed(module, (x,), "transpose_weight")
    assert targets(gm) == ["aten.reshape", "aten.linear"]
    torch.testing.assert_close(gm(x), expected)


TURNED = {
    "has beta or alpha": lambda m, x, r: torch.addmm(m.b, x.reshape(-1, D), m.columns, alpha=2).reshape(2, 3, D),
    "adds is no bias": lambda m, x, r: torch.addmm(r[0, :1], x.reshape(-1, D), m.columns).reshape(2, 3, D),
    "computed in the graph": lambda m, x, r: torch.addmm(m.b, x.reshape(-1, D), m.columns.exp()).reshape(2, 3, D),
    "does not read the rows of a larger tensor": lambda m, x, r: torch.addmm(m.b, x[0].exp(), m.columns),
    "divides the rows": lambda m, x, r: torch.addmm(m.b, x.reshape(-1, D), m.columns).reshape(2, 3, 2, D // 2),
    "no GEMM with a [k, n] weight": lambda m, x, r: F.linear(x, m.w),
}


@pytest.mark.parametrize("reason", TURNED)
def test_gemms_that_stay(reason):
    refused(TURNED[reason], "transpose_weight", reason)


def test_a_weight_whose_memory_others_have_is_not_turned():
    class Shares(Function):
        def __init__(self):
            super().__init__(lambda m, x: by_columns(m, x) + m.view[0])
            self.view = nn.Parameter(self.columns.data[:2])

    module, x = Shares(), x_of(2, 3, D)
    _, report = transformed(module, (x,), "transpose_weight")
    record = report.transforms["transpose_weight"]
    assert not record.matches and "shares its memory with view" in record.reason


def test_what_weights_alone_give_is_computed_once():
    module = Function(lambda m, x: F.layer_norm(x, (D,), (m.g + 1).clamp(max=2.0), m.b))
    x = x_of(2, 3, D)
    gm, report = transformed(module, (x,), "fold_constants")
    assert targets(gm) == ["aten.layer_norm"] and torch.equal(gm(x), module(x))
    (match,) = report.transforms["fold_constants"].matches  # both calls
    assert match.note.startswith("later changes of ") and match.note.endswith(" are not seen")


def test_a_matrix_is_not_kept_twice():
    refused(lambda m, x, r: F.linear(x, m.w * 2) + r, "fold_constants", "a second copy of its weights")
    refused(lambda m, x, r: F.linear(x, m.w) + r, "fold_constants", "no call of the graph reads weights alone")


def counted(m, x):
    before = m.steps + 1
    m.steps.add_(1)
    return x * before


def counted_by_copy(m, x):
    m.steps.copy_(m.steps + 1)
    return x * m.steps


def changed_by_the_input(m, x):
    gain = m.g * 2
    gain.add_(x[0, 0])
    return x * gain


def changed_in_place(m, x):
    gain = m.g + 1
    first = x * gain
    gain.mul_(3)
    return first + gain


def given_away(m, x):
    return x + 1, m.g + 1


NOT_CONSTANT = {counted: "the graph writes %steps", counted_by_copy: "the graph writes %steps"}
NOT_CONSTANT |= {changed_by_the_input: "in place", changed_in_place: "in place", given_away: "a result of the graph"}


@pytest.mark.parametrize("function", NOT_CONSTANT, ids=lambda function: function.__name__)
def test_what_is_written_or_given_away_is_computed_in_every_step(function):
    """A constant would be what the first step made of it, or be written by every step."""

    class Counts(Function):
        def __init__(self):
            super().__init__(function)
            self.register_buffer("steps", torch.zeros(D))

    module, other, x = Counts(), Counts(), x_of(2, 3, D)
    gm, report = transformed(module, (x,), "fold_constants")
    record = report.transforms["fold_constants"]
    assert not record.matches and NOT_CONSTANT[function] in record.reason
    for _ in range(3):
        torch.testing.assert_close(gm(x), other(x))


@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_linear_layer_is_dispatched(bias):
    module, x = Function(lambda m, x: F.linear(x, m.w, m.b if bias else None)), x_of(2, 3, D)
    gm, _ = transformed(module, (x,), DISPATCH)
    assert targets(gm) == ["graft.fused_linear"] and torch.equal(gm(x), module(x))
    refused(lambda m, x, r: F.linear(x, m.w.exp()), DISPATCH, "")
