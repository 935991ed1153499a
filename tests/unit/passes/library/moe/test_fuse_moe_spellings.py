"""fuse_moe on mixtures as people write them: loops, lists, stacked weights, all experts at once, sigmoid routing."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graft
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls
from graft.ir.trace import export_graph
from graft.ops.cases import tolerance
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from marks import crossed, examples, short
from moe_spellings import (
    SPELLINGS,
    D,
    E,
    Einsum,
    GptOssDense,
    H,
    Llama4Dense,
    MixtralLoop,
    ScatterLoop,
    ShareLoop,
    StackedLoop,
    topk_softmax,
)

FUSED = {name: make for name, make in SPELLINGS.items() if make is not Einsum}
OPS = [torch.ops.graft.moe_route.default, torch.ops.graft.moe_experts.default]


def tokens(n=7, dtype=torch.float32, seed=1):
    return torch.randn(1, n, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fuse(module, x, dynamic=False, verify="structure"):
    gm = export_graph(module, (x,), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},) if dynamic else None)
    before = graph_text(gm.graph)
    known = {n: {"enabled": n == "fuse_moe"} for n in load_config().transforms}
    report = run_pipeline(gm, load_config({"verify": verify, "transforms": known}))
    return gm, report.transforms["fuse_moe"], before


def exact(module, x):
    """What the module computes in float64 of its own weights and tokens."""
    return copy.deepcopy(module).double()(x.double())


def two_ops_left(gm):
    targets = [n.target for n in calls(gm.graph)]
    assert [t for t in targets if t in OPS] == OPS
    names = " ".join(str(t) for t in targets)
    assert not re.search("topk|one_hot|where|index_add|scatter|bmm|silu|assert", names), names


@pytest.mark.some(2)
@crossed("name", FUSED, [torch.float32, torch.bfloat16])
def test_every_spelling_becomes_the_two_ops(name, dtype):
    module, x = FUSED[name]().to(dtype), tokens(dtype=dtype)
    right, state = exact(module, x), {k: v.clone() for k, v in module.state_dict().items()}
    places = {key: value.data_ptr() for key, value in module.named_parameters()}
    gm, record, _ = fuse(module, x, dynamic=True, verify="matches")
    assert len(record.matches) == 1 and not record.near_misses
    two_ops_left(gm)
    weights_lie_right(name, module, gm, places)
    bound = 4 * tolerance(dtype, H)
    torch.testing.assert_close(gm(x).double(), right, rtol=bound, atol=bound)
    assert not torch.allclose(gm(x.flip(-1)).double(), right, rtol=bound, atol=bound)
    for n in (1, 12):
        other = tokens(n, dtype, seed=n)
        torch.testing.assert_close(gm(other).double(), exact(module, other), rtol=bound, atol=bound)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", short(FUSED, "mixtral loop"))
def test_a_wrong_mixture_is_found_out(name):
    """The bound of the tests tells experts in another order and weights that are not the routing's apart."""
    module, x = FUSED[name](), tokens()
    gm, _, _ = fuse(module, x)
    node = next(n for n in calls(gm.graph) if n.target is OPS[1])
    for wrong in (lambda args: (args[0], args[2], args[2]), lambda args: (args[0], args[1], rolled(gm, args[2]))):
        args = node.args
        node.args = (*wrong(args), *args[3:])
        gm.recompile()
        bound = 4 * tolerance(torch.float32, H)
        assert not torch.allclose(gm(x).double(), exact(module, x), rtol=bound, atol=bound)
        node.args = args


def rolled(gm, ids):
    with gm.graph.inserting_after(ids):
        return gm.graph.call_function(torch.ops.aten.remainder.Scalar, (ids, 2))  # of three experts


@given(
    st.sampled_from(sorted(FUSED)), st.sampled_from([2, 3, 5]), st.integers(1, 9), st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
@settings(max_examples=examples(4), deadline=None)
def test_any_number_of_experts_and_tokens(name, e, n, dynamic, dtype):
    module, x = FUSED[name](e=e).to(dtype), tokens(max(n, 2), dtype, seed=n)
    right = exact(module, x)
    gm, record, _ = fuse(module, x, dynamic)
    assert len(record.matches) == 1
    bound = 4 * tolerance(dtype, H)
    torch.testing.assert_close(gm(x).double(), right, rtol=bound, atol=bound)


OWN_WEIGHTS = ("mixtral loop", "parameter lists", "shares by comparison")
STACKED = ("stacked weights", "transposed weights", "gpt-oss dense", "llama 4")


def weights_lie_right(name, module, gm, before):
    """Weights of their own become views of one tensor; stacked ones stay where they are."""
    if name in OWN_WEIGHTS:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        assert len(storages) == 3 and sum(storages.values()) == size  # the router, gate and up, down
        assert {p.untyped_storage().data_ptr() for p in gm.parameters()} == set(storages)
    elif name in STACKED:
        assert {key: value.data_ptr() for key, value in module.named_parameters()} == before
        assert {p.data_ptr() for p in gm.parameters()} == set(before.values())


@pytest.mark.parametrize("name", short(OWN_WEIGHTS, "mixtral loop"))
def test_a_second_graph_has_the_same_weights(name):
    module, x = FUSED[name](), tokens()
    gm, _, _ = fuse(module, x)
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    again, record, _ = fuse(module, x)
    assert len(record.matches) == 1
    assert {p.untyped_storage().data_ptr() for p in again.parameters()} == storages
    assert torch.equal(again(x), gm(x))


def test_experts_with_biases():
    module, x = MixtralLoop(bias=True), tokens()
    right = exact(module, x)
    gm, record, _ = fuse(module, x, verify="matches")
    assert len(record.matches) == 1
    torch.testing.assert_close(gm(x).double(), right, rtol=1e-5, atol=1e-5)
    node = next(n for n in calls(gm.graph) if n.target is OPS[1])
    node.args = (*node.args[:7], None, *node.args[8:])
    gm.recompile()
    assert not torch.allclose(gm(x).double(), right, rtol=1e-5, atol=1e-5)


def test_llama_4_with_two_experts_a_token():
    module, x = Llama4Dense(k=2), tokens()
    gm, record, _ = fuse(module, x, verify="matches")
    assert len(record.matches) == 1
    torch.testing.assert_close(gm(x).double(), exact(module, x), rtol=1e-5, atol=1e-5)


class PlusEquals(MixtralLoop):
    """`y[token] += rows`, with `ids == expert` for the one-hot."""

    def mix(self, x, weights, ids):
        out = torch.zeros_like(x)
        for index in range(self.e):
            token, slot = torch.where(ids == index)
            out[token] += self.expert(index, x[token]) * weights[token, slot].unsqueeze(-1)
        return out


class SeparateStacks(MixtralLoop):
    """Stacked weights of gate and up, each their own."""

    def build(self):
        self.gate_proj, self.up_proj = (nn.Parameter(torch.empty(self.e, H, D)) for _ in range(2))
        self.down_proj = nn.Parameter(torch.empty(self.e, D, H))

    def expert(self, index, x):
        hidden = F.gelu(F.linear(x, self.gate_proj[index])) * F.linear(x, self.up_proj[index])
        return F.linear(hidden, self.down_proj[index])


class SelectFirst(MixtralLoop):
    route = staticmethod(topk_softmax)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [PlusEquals, SeparateStacks, SelectFirst])
def test_more_loops(make):
    module, x = make(), tokens()
    right = exact(module, x)
    gm, record, _ = fuse(module, x, dynamic=True, verify="matches")
    assert len(record.matches) == 1, record.reason
    two_ops_left(gm)
    torch.testing.assert_close(gm(x).double(), right, rtol=1e-5, atol=1e-5)


def test_graft_compile_takes_a_loop():
    module, x = MixtralLoop(), tokens()
    expected = module(x)
    compiled = graft.compile(module, (x,), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},), backend="eager")
    assert len(compiled.report.transforms["fuse_moe"].matches) == 1
    torch.testing.assert_close(compiled(x), expected)
    assert compiled(tokens(3)).shape == (1, 3, D)


# ── what must stay ──────────────────────────────────────────────────────────────────────────────────────────────


class Crossed(StackedLoop):
    def expert(self, index, x):
        return super().expert((index + 1) % self.e, x)


class Short(MixtralLoop):
    def mix(self, x, weights, ids):
        self.e, e = self.e - 1, self.e
        try:
            return self.shorter(x, weights, ids, e)
        finally:
            self.e = e

    def shorter(self, x, weights, ids, e):
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=e).permute(2, 1, 0)
        for index in range(self.e):
            k, token = torch.where(mask[index])
            out.index_add_(0, token, self.expert(index, x[token]) * weights[token, k, None])
        return out


class Tied(MixtralLoop):
    def build(self):
        super().build()
        self.experts[1].w1.weight = self.experts[0].w1.weight


class OtherWeights(MixtralLoop):
    """Weighed by the place of the expert, not by its weight."""

    def mix(self, x, weights, ids):
        return super().mix(x, weights.flip(-1), ids)


class NotFromZero(ShareLoop):
    def mix(self, x, weights, ids):
        out = x
        for index in range(self.e):
            out = out + self.expert(index, x) * (weights * (ids == index)).sum(dim=-1, keepdim=True)
        return out


class Twice(ScatterLoop):
    """The first expert counts twice."""

    def mix(self, x, weights, ids):
        shares = torch.zeros(x.shape[0], self.e).scatter_(1, ids, weights)
        first = self.expert(0, x) * shares[:, 0:1]
        out = first + first
        for index in range(1, self.e):
            out = out + self.expert(index, x) * shares[:, index : index + 1]
        return out


class OtherLimit(GptOssDense):
    limit = 5.0


class OtherInput(MixtralLoop):
    def expert(self, index, x):
        expert = self.experts[index]
        return expert.w2(F.silu(expert.w1(x)) * expert.w3(x * 2))


class Relu(MixtralLoop):
    def expert(self, index, x):
        expert = self.experts[index]
        return expert.w2(F.relu(expert.w1(x)) * expert.w3(x))


class SomeBias(MixtralLoop):
    def build(self):
        super().build()
        self.experts[2].w2 = nn.Linear(H, D)


class Filled(ScatterLoop):
    """Experts that were not chosen count a little."""

    def mix(self, x, weights, ids):
        shares = torch.full((x.shape[0], self.e), 0.01).scatter_(1, ids, weights)
        return sum(self.expert(index, x) * shares[:, index : index + 1] for index in range(1, self.e)) + x


REFUSED = {
    Einsum: "%scatter_.* is read by aten.einsum",
    Crossed: "expert 0 reads the weight of expert 1 in gate_up",
    Short: f"of {E} experts that .* can name, the loop has {E - 1}",
    Tied: "is tied",
    OtherWeights: "does not weigh each row of expert 0 by %div",
    NotFromZero: "which is not zero",
    Twice: "which is not zero",
    OtherLimit: "is not bounded by 7.0",
    OtherInput: "read different inputs",
    Relu: "activation %relu.* is aten.relu, known are silu, gelu",
    SomeBias: "some experts .* have a bias and some have none",
    Filled: "does not put the weights of each token among 0",
}


@pytest.mark.some(4)
@pytest.mark.parametrize("make", REFUSED)
def test_what_is_another_mixture_stays_byte_for_byte_with_the_reason(make):
    module, x = make(), tokens()
    expected = module(x)
    gm, record, before = fuse(module, x)
    assert record.status == "no_match" and len(record.near_misses) == 1
    assert re.search(REFUSED[make], record.reason), record.reason
    assert graph_text(gm.graph) == before
    torch.testing.assert_close(gm(x), expected)


def test_a_second_reader_of_an_inner_value_is_refused_and_one_of_the_shares_is_not():
    class Returned(ScatterLoop):
        def mix(self, x, weights, ids):
            shares = torch.zeros(x.shape[0], self.e).scatter_(1, ids, weights)
            rows = [self.expert(index, x) * shares[:, index : index + 1] for index in range(self.e)]
            return sum(rows[1:], rows[0]), rows[0] if self.options.get("rows") else shares

        def forward(self, hidden):
            x = hidden.reshape(-1, D)
            return self.mix(x, *self.route(self.gate(x)))

    x = tokens()
    for rows in (True, False):
        module = Returned(rows=rows)
        expected = module(x)
        gm, record, _ = fuse(module, x)
        assert bool(record.matches) is not rows, record.reason
        torch.testing.assert_close(gm(x), expected)
