"""torch.compile with graft as the backend: counts, numbers, and what Dynamo promises."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch import nn
from transformers import StaticCache

import graft
from conftest import tiny
from marks import left_out, short
from torch_compile_cases import (
    FUSED,
    Block,
    counts,
    eager_backend,
    pytestmark,  # noqa: F401  (every test starts with nothing compiled)
    run,
)


@pytest.mark.parametrize(
    ("family", "dtype", "lengths"),
    [
        left_out(("llama", "float32", (9, 14))),
        ("llama", "bfloat16", (9,)),
        left_out(("qwen3", "float32", (9,))),
        left_out(("gemma-2", "float32", (9,))),
        left_out(("gpt2", "float32", (9,))),
    ],
)
def test_fusions_on_hugging_face_models(family, dtype, lengths):
    """Counts of the registry, numbers of eager, one graph for every length, every match checked.

    In bfloat16 a CPU may round less often than eager (attention in float32): the mean distance from float64 counts.
    """
    model = tiny(family, dtype)
    exact = copy.deepcopy(model.module).double()
    backend = eager_backend(config={"verify": "matches"})
    compiled = torch.compile(model.module, backend=backend)
    for length in lengths:
        ids = torch.randint(3, 128, (2, length), generator=torch.Generator().manual_seed(length))
        if len(lengths) > 1:
            torch._dynamo.mark_dynamic(ids, 1)
        with torch.no_grad():
            got = compiled(input_ids=ids, use_cache=False).logits
            wanted = model.module(input_ids=ids, use_cache=False).logits
            right = exact(input_ids=ids, use_cache=False).logits
        if dtype == "float32":
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        limit = 1.1 * (wanted - right).abs().mean() + 1e-6
        assert (got - right).abs().mean() <= limit
        assert (got * 1.06 - right).abs().mean() > limit, "a wrong result would pass"
    assert len(backend.reports) == 1, "another length compiled another graph"
    (report,) = backend.reports
    expected = model.family.expected_matches(model.layers)
    fusions = ("fuse_layer_norm", "fuse_rms_norm", "fuse_swiglu", "fuse_rope", "fuse_add_rms_norm")
    found = {name: expected[name] for name in fusions if expected[name]}
    widened = {"widen_linear": n} if (n := len(report.transforms["widen_linear"].matches)) else {}  # as the CPU needs
    assert counts(report) == {**found, "fuse_attention": model.layers, **widened}
    assert not widened or dtype == "bfloat16"
    assert all(r.matches or r.reason or r.status == "disabled" for r in report.transforms.values())
    assert all(match.numeric_check for r in report.transforms.values() for match in r.matches)
    if family != "gpt2":
        assert "stays the model's" in report.transforms["merge_gate_up"].reason
        match = report.transforms["fuse_rms_norm"].matches[0]
        assert match.module == "model.layers.0.input_layernorm" and "modeling_" in match.anchor


def test_sizes_become_dynamic_without_a_graph_for_each():
    module, backend = Block(), eager_backend()
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad():
        for rows in (2, 3, 4, 5):
            x = torch.randn(rows, 8)
            assert torch.equal(compiled(x), module(x))
    assert [counts(report) for report in backend.reports] == [FUSED, FUSED]  # the second for every size


def test_a_whole_number_as_input():
    def step(x, n):
        return (x * torch.sigmoid(x))[:n] + n, n + 1

    for n in (3, 4, 5):
        x = torch.randn(8, 4)
        (got, count), backend = run(step, x, n, dynamic=True)
        assert torch.equal(got, step(x, n)[0]) and count == n + 1
    assert backend.reports


def test_near_misses_name_module_and_line():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            z = x * 2
            h = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
            return self.block(x), self.block.first * h, h

    _, backend = run(Outer(), torch.randn(3, 8))
    record = backend.reports[0].transforms["fuse_rms_norm"]
    assert len(record.matches) == 2 and {match.module for match in record.matches} == {"block"}
    assert any(
        "second reader" in miss.reason and "test_torch_compile.py" in miss.anchor for miss in record.near_misses
    )


def test_a_buffer_is_a_weight_and_a_computed_one_is_not():
    class Owned(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.rand(8))

        def forward(self, x):
            return self.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    class Computed(Owned):
        def forward(self, x):
            return (self.w * 2) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    x = torch.randn(3, 8)
    assert counts(run(Owned(), x)[1].reports[0]) == {"fuse_rms_norm": 1}
    record = run(Computed(), x)[1].reports[0].transforms["fuse_rms_norm"]
    assert record.matches == () and "is computed in the graph" in record.reason


# ── state and aliasing ──────────────────────────────────────────────────────────────────────────────────────────


def test_inputs_and_buffers_are_written_in_place():
    class Stateful(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(4, 8))

        def forward(self, x, cache, position):
            self.calls.add_(1)
            y = super().forward(x)
            cache.index_copy_(0, position, y)
            self.seen[1:3] = y
            return y + cache.sum(), self.seen.mean()

    module, other = Stateful(), Stateful()
    other.load_state_dict(module.state_dict())
    backend = eager_backend()
    compiled = torch.compile(module, backend=backend)
    caches = [torch.zeros(6, 8), torch.zeros(6, 8)]
    address = caches[0].data_ptr()
    for step in range(3):
        x, position = torch.randn(2, 8), torch.tensor([step, step + 3])
        with torch.no_grad():
            got, wanted = compiled(x, caches[0], position), other(x, caches[1], position)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert torch.equal(caches[0], caches[1]) and caches[0].data_ptr() == address
    assert module.calls.item() == 3 and torch.equal(module.seen, other.seen)
    assert len(backend.reports) == 1 and counts(backend.reports[0]) == FUSED


def test_results_alias_inputs_as_in_eager():
    def views(x):
        y = x * 2
        return x.view(-1), x.detach(), y, y.view(y.shape), x + 0

    x = torch.randn(4, 3)
    got, backend = run(views, x)
    wanted = views(x)
    assert backend.reports[0].notes == ()
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) and a is not x
    first, second, third, fourth, fifth = (t.untyped_storage().data_ptr() for t in got)
    assert first == second == x.untyped_storage().data_ptr() != fifth
    assert third == fourth != first and got[2] is not got[3]


def test_inputs_that_share_memory_and_are_written_are_left_to_inductor():
    def shift(a, b):
        a.add_(1)
        return a * 2, b * 2

    def fresh():
        base = torch.arange(6.0)
        return base[:4], base[2:]

    with pytest.warns(UserWarning, match="shares its memory"):
        got, backend = run(shift, *fresh())
    for a, b in zip(got, shift(*fresh()), strict=True):
        assert torch.equal(a, b)
    assert "shares its memory with another input" in backend.reports[0].notes[0]


def test_a_change_of_shape_in_place_is_left_to_inductor():
    def turn(x):
        y = x + 1
        y.t_()
        return y * 2

    x = torch.arange(6.0).reshape(2, 3)
    with pytest.warns(UserWarning, match="changes the shape"):
        got, _ = run(turn, x)
    assert torch.equal(got, turn(x))


def decode_steps(model, step):
    """Four tokens through a static cache of Hugging Face, one at a time; the logits, and the cache at the end."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    logits = []
    with torch.no_grad():
        for position, token in enumerate((5, 17, 3, 9)):
            place = torch.tensor([position])
            ids = torch.tensor([[token]])
            call = step if position else model  # the first call makes the cache; later ones share one graph
            out = call(input_ids=ids, past_key_values=cache, position_ids=place[None], use_cache=True)
            logits.append(out.logits)
    return torch.cat(logits), [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


@pytest.mark.exhaustive
@pytest.mark.parametrize("inductor", short([False, True], False), ids=["graph", "inductor"])
def test_decoding_with_a_static_cache(inductor):
    """index_copy_ into the caller's cache: same logits and same cache as eager."""
    model = tiny("llama").module
    backend = graft.Backend(inductor=inductor)
    got, caches = decode_steps(model, torch.compile(model, backend=backend))
    wanted, eager_caches = decode_steps(model, model)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got.roll(1, 0), wanted, rtol=1e-5, atol=1e-5)
    for layer, eager in zip(caches, eager_caches, strict=True):
        torch.testing.assert_close(layer, eager, rtol=1e-5, atol=1e-5)
        assert layer[0][:, :, :4].any() and not layer[0][:, :, 4:].any()
    (report,) = backend.reports
    found = {"fuse_rms_norm": 5, "fuse_swiglu": 2, "fuse_rope": 4, "fuse_add_rms_norm": 4, "fuse_attention": 2}
    assert counts(report) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_give_the_strides_that_inductor_plans_with(dtype):
    x = torch.randn(2, 3, 4, 8).to(dtype).transpose(1, 2)
    weight, angle = torch.rand(8).to(dtype), x[:, :1]
    ops = torch.ops.graft
    calls = [
        (ops.rms_norm, (x, weight, 1e-5)),
        (ops.rms_norm, (x, weight, 1e-5, 1.0, True)),
        (ops.add_rms_norm, (x, x, weight, 1e-5)),
        (ops.swiglu, (x, x)),
        (ops.rope, (x, angle, angle)),
    ]
    for op, args in calls:
        real = op(*args)
        planned = op(*(arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args))
        pairs = zip(real, planned, strict=True) if isinstance(real, tuple) else [(real, planned)]
        assert all(a.stride() == b.stride() for a, b in pairs), op
