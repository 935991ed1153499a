"""torch.compile(dynamic=True) makes every Python float an input: what a module holds is a constant all the same."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.symbolic_convert import TensorifyState

import graft
from conftest import tiny
from graft.backends.float_inputs import MOST_VALUES
from marks import examples, short
from torch_compile_cases import (
    counts,
    eager_backend,
    pytestmark,  # noqa: F401  (every test starts with nothing compiled)
)

GLOBAL_EPS = 1e-4


def norm(x, weight, eps):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class Norm(nn.Module):
    def __init__(self, eps=1e-5, d=8):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(d) + 0.5), eps

    def forward(self, x):
        return norm(x, self.weight, self.eps)


class LazyWeights(nn.Module):
    """Eps in a nested module, in a plain object, in a list, and in a global."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = Norm(1e-3), nn.Parameter(torch.rand(8))
        self.config = type("Config", (), {"eps": 1e-2})()
        self.many = [1e-1]

    def forward(self, x):
        x = norm(self.inner(x), self.weight, self.config.eps)
        return norm(norm(x, self.weight, self.many[0]), self.weight, GLOBAL_EPS)


class Temperature(Norm):
    """The argument stays an input, eps does not."""

    def forward(self, x, temperature):
        return super().forward(x) / temperature


def both(module, backend, *args):
    with torch.no_grad():
        got = torch.compile(module, backend=backend, dynamic=True)(*args)
        torch.testing.assert_close(got, module(*args), rtol=1e-6, atol=1e-6)
    return backend.reports


@pytest.mark.exhaustive  # the short run: Norm
def test_norms_of_a_hugging_face_model_fuse_at_dynamic_sizes():
    model = tiny("llama")
    exact, backend = copy.deepcopy(model.module).double(), eager_backend()
    compiled = torch.compile(model.module, backend=backend, dynamic=True)
    for length in (5, 9):
        ids = torch.randint(3, 128, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            got, wanted, right = (m(input_ids=ids, use_cache=False).logits for m in (compiled, model.module, exact))
        limit = 1.1 * (wanted - right).abs().mean() + 1e-6
        assert (got - right).abs().mean() <= limit < (got * 1.06 - right).abs().mean()
    (report,) = backend.reports
    expected = model.family.expected_matches(model.layers)
    for name in ("fuse_rms_norm", "fuse_add_rms_norm", "fuse_rope", "fuse_swiglu"):
        assert len(report.transforms[name].matches) == expected[name], name


@pytest.mark.parametrize("inductor", short([False, True], False))
def test_a_module_s_number_is_a_constant_until_it_keeps_changing(inductor):
    """Every value gives its own result; the number of graphs stays below Dynamo's limit; nothing is left behind."""
    module, backend = Norm(), graft.Backend(inductor=inductor)
    compiled, x = torch.compile(module, backend=backend, dynamic=True), torch.randn(3, 8)
    values = (1e-5, 1e-5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6) if not inductor else (1e-5, 0.1)
    with torch.no_grad():
        for module.eps in values:
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-6, atol=1e-6)
    fused = [{"fuse_rms_norm": 1}] * min(len(set(values)), MOST_VALUES)
    assert [counts(report) for report in backend.reports] == [*fused, {}][: len(set(values))]
    assert TensorifyState.empty()
    if not inductor:
        reason = backend.reports[-1].transforms["fuse_rms_norm"].reason
        assert "may differ from call to call" in reason and "counts as constant" in reason


def test_numbers_in_nested_objects_and_globals():
    (report,) = both(LazyWeights(), eager_backend(), torch.randn(3, 8))
    assert counts(report) == {"fuse_rms_norm": 4}


def test_models_of_one_class_each_have_their_own_number():
    backend = eager_backend()
    for eps in (1e-5, 1e-1):
        reports = both(Norm(eps), backend, torch.randn(3, 8))
    assert [counts(report) for report in reports] == [{"fuse_rms_norm": 1}] * 2


def test_after_a_reset_nothing_counts_as_changed():
    backend = eager_backend()
    for index in range(MOST_VALUES + 2):
        torch._dynamo.reset()
        reports = both(Norm(0.1 * (index + 1)), backend, torch.randn(3, 8))
    assert counts(reports[-1]) == {"fuse_rms_norm": 1}


def test_an_argument_stays_an_input():
    """One graph for every temperature, as the user asked for; a norm whose eps is an argument says why it stays."""
    module, backend = Temperature(), eager_backend()
    compiled, x = torch.compile(module, backend=backend, dynamic=True), torch.randn(3, 8)
    loose, other = eager_backend(), torch.rand(8)
    function = torch.compile(norm, backend=loose, dynamic=True)
    with torch.no_grad():
        for value in (0.3, 0.7, 1.5, 2.5):
            assert torch.equal(compiled(x, value), module(x, value))
            assert torch.equal(function(x, other, value), norm(x, other, value))
    (report,), (stays,) = backend.reports, loose.reports
    assert counts(report) == {"fuse_rms_norm": 1} and counts(stays) == {}
    assert "an argument under dynamic=True does not" in stays.transforms["fuse_rms_norm"].reason


def test_gradients_keep_their_inputs():
    """A graph that goes to stock Inductor is not traced anew for our sake."""
    backend = eager_backend()
    with pytest.warns(UserWarning, match="needs gradients"):
        torch.compile(Norm(), backend=backend, dynamic=True)(torch.randn(3, 8)).sum().backward()
    assert backend._constants.values == {}


@settings(max_examples=examples(4), deadline=None)
@given(st.lists(st.sampled_from([1e-5, 1e-2, 0.5, 2.0, 7.0, 9.0]), min_size=1, max_size=6), st.booleans())
def test_any_sequence_of_numbers_is_right(values, twice):
    """Whatever changes between calls, in one model or in two, the result is eager's."""
    torch._dynamo.reset()
    backend, modules = eager_backend(), [Norm(), Norm()]
    compiled = [torch.compile(module, backend=backend, dynamic=True) for module in modules]
    with torch.no_grad():
        for index, eps in enumerate(values):
            chosen = index % 2 if twice else 0
            modules[chosen].eps = eps
            x = torch.randn(index + 2, 8)
            assert torch.equal(compiled[chosen](x), modules[chosen](x))
    assert len(backend.reports) <= MOST_VALUES + 1
