"""widen_linear and graft::linear: what is widened, what is left alone and why, and how exact the result is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graft
from conftest import graph_of
from graft.base.errors import KernelUnavailable
from graft.ir.nodes import calls, is_op
from graft.models.load import load_model
from graft.ops import OPS, choose, half_precision
from graft.ops.attention.reference import attention, sdpa
from graft.ops.linear import reference
from graft.ops.linear.cases import CASES
from graft.ops.linear.reference import linear, linear_float32
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from linear_cases import Products

LINEAR = OPS["linear"]

NARROW = [torch.bfloat16, torch.float16]
WIDE = torch.ops.graft.linear.default


@pytest.fixture(params=[True, False], ids=["slow CPU", "fast CPU"])
def slow(request, monkeypatch):
    """Both kinds of CPU, whatever this one is."""
    monkeypatch.setattr(half_precision, "slowdown", lambda _: 50.0 if request.param else 0.5)
    return request.param


@pytest.fixture
def slow_cpu(monkeypatch):
    monkeypatch.setattr(half_precision, "slowdown", lambda _: 50.0)


class MLP(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40, bias=bias), nn.Linear(40, 24, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def widened(module: nn.Module, *inputs, **settings):
    """The record of widen_linear, and the compiled module."""
    with torch.no_grad():
        compiled = graft.compile(module, inputs, backend="eager", config=settings or None)
    return compiled.report.transforms["widen_linear"], compiled


def error(result, exact) -> float:
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()


# ── the op ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_as_exact_as_eager(case, dtype):
    """No further from float64 than torch's own 16-bit product; a product that sums in 16 bits is further."""
    x, w, b = case.make("cpu", dtype, torch.Generator().manual_seed(0))
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    unit = torch.finfo(dtype).eps
    result = linear_float32(x, w, b)
    assert result.dtype is dtype and result.shape == exact.shape
    assert error(result, exact) <= max(error(linear(x, w, b), exact), unit / 2)
    assert error(in_16_bits(x, w, b), exact) > max(error(linear(x, w, b), exact), unit / 2)


def in_16_bits(x, w, b):
    """24 partial sums, each rounded: what must not pass for exact."""
    parts = [F.linear(x[..., i::24].float(), w[:, i::24].float()).to(x.dtype) for i in range(24)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if b is None else total + b


@pytest.mark.parametrize("piece", [1, 24, 100, 24 * 40, 10**6])
def test_pieces_cover_the_weight(piece, monkeypatch):
    """Whole rows at a time, whatever fits: the last piece may be short, and one row is the least."""
    monkeypatch.setattr(reference, "PIECE", piece)
    g = torch.Generator().manual_seed(1)
    x, w, b = (torch.randn(*shape, generator=g).bfloat16() for shape in ((2, 3, 24), (40, 24), (40,)))
    torch.testing.assert_close(linear_float32(x, w, b), F.linear(x.float(), w.float(), b.float()).bfloat16())
    assert linear_float32(x[:0], w, b).shape == (0, 3, 40)


def test_the_kernel_is_taken_where_it_pays_and_says_why_not(slow):
    x, w = torch.ones(2, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    assert choose(LINEAR, LINEAR.call(x, w, None)).name == ("float32" if slow else "aten")
    assert choose(LINEAR, LINEAR.call(x.float(), w.float(), None)).name == "aten"
    if not slow:
        with pytest.raises(KernelUnavailable, match=r"this CPU multiplies torch\.bfloat16 itself"):
            choose(LINEAR, LINEAR.call(x, w, None), "float32")
    with pytest.raises(KernelUnavailable, match=r"the tensors are torch\.float32"):
        choose(LINEAR, LINEAR.call(x.float(), w.float(), None), "float32")
    with pytest.raises(KernelUnavailable, match="the dtypes differ"):
        choose(LINEAR, LINEAR.call(x, w.half(), None), "float32")
    with pytest.raises(KernelUnavailable, match="the tensors are on meta"):
        choose(LINEAR, LINEAR.call(x.to("meta"), w.to("meta"), None), "float32")


def test_the_cpu_is_measured_once_and_outside_the_callers_modes():
    """Under fake tensors a product takes no time of its own; the answer is kept for the process."""
    from torch._subclasses import FakeTensorMode

    half_precision.slowdown.cache_clear()
    with FakeTensorMode():
        first = half_precision.slowdown(torch.bfloat16)
        assert half_precision.slowdown(torch.bfloat16) == first > 0
    assert half_precision.slowdown.cache_info().misses == 1


@pytest.mark.parametrize("dtype", NARROW)
def test_attention_in_float32_is_as_exact_as_in_16_bits(dtype, slow):
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 21, 16, generator=g).to(dtype) for heads in (4, 2, 2))
    mask = torch.randn(1, 1, 21, 21, generator=g).to(dtype)
    exact = sdpa(*(t.double() for t in (q, k, v, mask)), 0.25, grouped=True)
    assert error(sdpa(q, k, v, mask, 0.25, grouped=True), exact) < 4 * torch.finfo(dtype).eps
    assert error(sdpa(q, k, v, mask, 0.3, grouped=True), exact) > 4 * torch.finfo(dtype).eps
    capped = attention(*(t.double() for t in (q, k, v)), None, 0.25, True, None, 5.0)
    assert error(attention(q, k, v, None, 0.25, True, None, 5.0), capped) < 4 * torch.finfo(dtype).eps
    assert error(attention(q, k, v, None, 0.25, True, None, 4.0), capped) > 4 * torch.finfo(dtype).eps


# ── the transform ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bias", [False, True])
def test_every_linear_layer_is_widened_and_checked(dtype, bias, slow_cpu):
    torch.manual_seed(3)
    module, x = MLP(bias).to(dtype), torch.randn(2, 5, 24).to(dtype)
    record, compiled = widened(module, x, verify="matches")
    assert record.status == "applied" and len(record.matches) == 2
    assert all(match.numeric_check.error <= match.numeric_check.limit for match in record.matches)
    assert compiled.report.kernels["graft::linear"].names == ("float32",)
    with torch.no_grad():
        exact = MLP(bias).double().requires_grad_(False)
        exact.load_state_dict({name: t.double() for name, t in module.state_dict().items()})
        assert error(compiled(x), exact(x.double())) <= 2 * max(
            error(module(x), exact(x.double())), torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("kind", ["mm", "addmm", "computed"])
def test_products_of_any_spelling_are_widened(kind, slow_cpu):
    torch.manual_seed(4)
    module, x = Products(kind).bfloat16(), torch.randn(3, 24).bfloat16()
    record, compiled = widened(module, x, verify="matches")
    assert len(record.matches) == 1, record.reason
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize(("kind", "reason"), [("beta", "beta or alpha"), ("rows", "not one row")])
def test_what_is_no_linear_layer_stays(kind, reason, slow_cpu):
    torch.manual_seed(5)
    module, x = Products(kind).bfloat16(), torch.randn(3, 24).bfloat16()
    record, compiled = widened(module, x)
    assert not record.matches and reason in record.reason
    with torch.no_grad():
        assert torch.equal(compiled(x), module(x))


def test_elsewhere_it_is_skipped_with_the_reason(slow):
    x = torch.randn(2, 24)
    record, compiled = widened(MLP(), x)
    assert record.status == "skipped" and record.reason == "the tensors are torch.float32"
    assert not any(is_op(node, WIDE) for node in calls(compiled.graph_module.graph))
    record, _ = widened(MLP().bfloat16(), x.bfloat16())
    assert record.status == ("applied" if slow else "skipped")
    assert slow or record.reason == "this CPU multiplies torch.bfloat16 itself"
    record, _ = widened(nn.ReLU(), x)
    assert record.status == "no_match" and record.reason == "the graph has no linear, mm or addmm"


def test_a_graph_elsewhere_is_left_alone(slow_cpu):
    model = load_model("tiny-llama", dtype="bfloat16", device="meta")
    record = run_pipeline(graph_of(model.module), load_config()).transforms["widen_linear"]
    assert record.status == "skipped" and record.reason == "the tensors are on meta"


@pytest.mark.exhaustive
def test_the_engine_runs_every_linear_layer_widened(slow_cpu):
    """qkv, output, gate and up, down in each layer, and the head; the merges ran before. The tokens stay the same."""
    llm = graft.LLM("tiny-llama", dtype="bfloat16", device="cpu", backend="eager")
    record = llm.report.transforms["widen_linear"]
    assert len(record.matches) == 4 * llm.model.layers + 1
    assert len(llm.report.transforms["merge_qkv"].matches) == llm.model.layers
    off = {"transforms": {"widen_linear": {"enabled": False}}}
    plain = graft.LLM("tiny-llama", dtype="bfloat16", device="cpu", backend="eager", config=off)
    assert plain.report.transforms["widen_linear"].status == "disabled"
    params = graft.SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = [[5, 9, 77, 31], [8, 3]]
    assert [o.token_ids for o in llm.generate(prompt, params)] == [
        o.token_ids for o in plain.generate(prompt, params)
    ]
