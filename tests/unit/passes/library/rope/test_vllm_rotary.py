"""Rotary embeddings on packed tokens, [t, heads, d]: neox and GPT-J style, partial, with norms, with a cache."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

import graft
from graft.ir.io.text import graph_text
from graft.ir.nodes import calls, is_op, tensor_of
from graft.ir.trace import export_graph
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.testing.fusion import AsModule
from marks import examples
from vllm_cases import CachedRotary, D, H, QKNormCachedRotary, QKNormRotary, Rotary, heads, turned

load_all()
OPS = torch.ops.graft
NAMES = ("fuse_rms_norm", "fuse_rope")
ENABLED = {n: {"enabled": n in NAMES} for n in TransformRegistry.names()}
CONFIG = load_config({"verify": "matches", "transforms": ENABLED})
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STYLES = {"neox": (True, D), "gptj": (False, D), "neox partial": (True, D // 2), "gptj partial": (False, D // 2)}
KINDS = {"plain": Rotary, "norm": QKNormRotary, "cache": CachedRotary, "norm and cache": QKNormCachedRotary}


def fuse(module, args, dynamic_shapes=None):
    gm = export_graph(module.eval(), args, dynamic_shapes=dynamic_shapes)
    before = graph_text(gm.graph)
    return gm, run_pipeline(gm, CONFIG).transforms, before


def arguments(module, dtype, tokens=5):
    given = heads(dtype, tokens)
    return given if isinstance(module, CachedRotary) else given[:3]


def check_numbers(got, wanted, exact):
    """No further from float64 than eager is, and a result that is off by a few percent would fail."""
    for one, two, right in zip(got, wanted, exact, strict=True):
        limit = 1.2 * (two.double() - right).abs().max() + 1e-6
        assert (one.double() - right).abs().max() <= limit
        assert (1.05 * one.double() - right).abs().max() > limit, "a wrong result would pass"


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations_of_packed_tokens_fuse(kind, style, dtype):
    module = KINDS[kind](*STYLES[style], DTYPES[dtype])
    args = arguments(module, DTYPES[dtype])
    other, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    gm, records, _ = fuse(module, args)
    normed = 2 if "norm" in kind else 0
    assert [len(records[name].matches) for name in NAMES] == [normed, 2]
    assert sum(is_op(n, OPS.rope.default) for n in calls(gm.graph)) == 2
    wide = [a.double() if a.is_floating_point() else a for a in args]
    with torch.no_grad():
        check_numbers(gm(*args), other(*args), exact(*wide))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_table_beside_narrow_heads(dtype):
    module = Rotary(True, D, DTYPES[dtype], table=torch.float32)
    gm, records, _ = fuse(module, heads(DTYPES[dtype])[:3])
    assert len(records["fuse_rope"].matches) == 2
    args = heads(DTYPES[dtype], seed=3)[:3]
    assert all(torch.equal(a, b) for a, b in zip(gm(*args), module(*args), strict=True))


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["plain", "norm"])
def test_any_number_of_tokens(kind):
    module, tokens = KINDS[kind](), Dim("t", min=2, max=64)
    gm, records, _ = fuse(module, heads()[:3], tuple({0: tokens} for _ in range(3)))
    assert len(records["fuse_rope"].matches) == 2
    for count in (2, 7):
        args = heads(tokens=count)[:3]
        for got, wanted in zip(gm(*args), module(*args), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_a_compiled_module_writes_its_cache():
    """The whole pipeline: rotation fused, cache written in place."""
    module = CachedRotary()
    args, other = heads(), copy.deepcopy(module)
    compiled = graft.compile(module, args, backend="eager")
    wanted, got = other(*args), compiled(*args)
    assert len(compiled.report.transforms["fuse_rope"].matches) == 2
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert torch.equal(module.k_cache, other.k_cache) and module.k_cache.any()


def test_the_angles_may_lie_along_either_dim():
    """[h, t, d] turns by [t, r] and [1, t, r]."""

    def first(x, cos, sin):
        return x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin

    x, angle = torch.randn(H, 5, D), torch.randn(5, D)
    for shape in ((5, D), (1, 5, D)):
        gm, records, _ = fuse(AsModule(first), (x, angle.cos().view(shape), angle.sin().view(shape)))
        assert len(records["fuse_rope"].matches) == 1
        (rope,) = (n for n in calls(gm.graph) if is_op(n, OPS.rope.default))
        assert tensor_of(rope).shape == (H, 5, D)


def angle_a_head(x, cos, sin):
    cos, sin = (a[:, None].expand(-1, H, -1).contiguous() for a in (cos, sin))
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def uneven(x, cos, sin):
    x1, x2 = x[..., : D // 2], x[..., D // 4 : 3 * D // 4]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def halves_as_pairs(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)


def second_reader(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    first = x1 * cos - x2 * sin
    return torch.cat((first, x2 * cos + x1 * sin), -1), first


REFUSED = {
    "an angle a head": (angle_a_head, "differ between heads"),
    "uneven halves": (uneven, ""),
    "halves as pairs": (halves_as_pairs, "joins halves as pairs"),
    "a second reader": (second_reader, "has a second reader"),
    "one head without its dim": (lambda x, c, s: turned(x[:, 0], c, s, True), "broadcast|x has 2 dims"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_rotation_stays(name):
    function, reason = REFUSED[name]
    angle = torch.randn(5, D // 2)
    args = (torch.randn(5, H, D), angle.cos(), angle.sin())
    gm, records, before = fuse(AsModule(function), args)
    assert not records["fuse_rope"].matches and records["fuse_rope"].reason
    assert any(part in records["fuse_rope"].reason for part in reason.split("|")), records["fuse_rope"].reason
    assert graph_text(gm.graph) == before


@settings(max_examples=examples(12), deadline=None)
@given(
    tokens=st.integers(1, 6),
    count=st.integers(1, 4),
    half=st.sampled_from([1, 2, 3, 4]),
    rest=st.sampled_from([0, 2, 5]),
    neox=st.booleans(),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_any_layout_of_packed_tokens_is_right(tokens, count, half, rest, neox, dtype):
    """Whatever the sizes, what fuses gives eager's bits."""

    def rotate(x, cos, sin):
        return torch.cat((turned(x[..., : 2 * half], cos, sin, neox), x[..., 2 * half :]), -1)

    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, count, 2 * half + rest, generator=generator).to(dtype)
    angle = torch.randn(tokens, half, generator=generator)
    args = (x, angle.cos().to(dtype), angle.sin().to(dtype))
    gm, records, _ = fuse(AsModule(rotate), args)
    assert len(records["fuse_rope"].matches) == 1, records["fuse_rope"].reason
    assert torch.equal(gm(*args), rotate(*args))
