"""absorb_latent_attention: keys and values out of one latent row are found by what the graph does, and checked."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graft.base.errors import TransformError
from graft.ir.nodes import calls, is_op, options_of, tensor_of
from graft.ir.trace import export_graph
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.passes.registry import TransformRegistry, load_all
from graft.weights.quantize import FP8

load_all()
ops = torch.ops.graft
H, NOPE, ROPE, WIDE, RANK, HIDDEN = 3, 8, 4, 6, 10, 16


class Latent(nn.Module):
    """The attention of DeepSeek, each step a method that a test may spell otherwise."""

    latent_dims = 4
    values_first = False
    bias = False
    more = ()  # arguments of attention behind the scale

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, H * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.norm = nn.Parameter(torch.rand(RANK) + 0.5)
        self.kv_b = nn.Linear(RANK, H * (NOPE + WIDE), bias=self.bias)
        self.head_norm = nn.Parameter(torch.rand(NOPE) + 0.5)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, H, NOPE + ROPE).transpose(1, 2)
        row, rope = self.kv_a(x).split([RANK, ROPE], dim=-1)
        latent = self.latent(F.rms_norm(row, (RANK,), self.norm, 1e-6))
        latent = latent.view(b, 1, s, RANK) if self.latent_dims == 4 else latent
        kv = self.kv_b(latent).view(b, s, H, NOPE + WIDE).transpose(1, 2)
        own, values = self.parts(kv)
        keys = torch.cat([own, self.shared(rope.view(b, 1, s, ROPE), b, s)], dim=-1)
        out = ops.attention(q, keys, values, None, 0.3, *self.more)
        return self.result(out.flatten(2), latent, kv)

    def latent(self, row):
        return row

    def parts(self, kv):
        return kv.split([NOPE, WIDE], dim=-1)

    def shared(self, rope, b, s):
        return rope.cos().expand(b, H, s, ROPE)

    def result(self, out, latent, kv):
        return out


class ThreeDims(Latent):
    latent_dims = 3


class ReadElsewhere(Latent):
    def result(self, out, latent, kv):
        return out + latent.sum()


class ProjectionReadElsewhere(Latent):
    def result(self, out, latent, kv):
        return out + kv.sum()


class NormBetween(Latent):
    def parts(self, kv):
        own, values = kv.split([NOPE, WIDE], dim=-1)
        return F.rms_norm(own, (NOPE,), self.head_norm, 1e-6), values


class NormOfAll(Latent):
    def parts(self, kv):
        return (kv * 1.5).split([NOPE, WIDE], dim=-1)


class OwnRotatedParts(Latent):
    def shared(self, rope, b, s):
        return rope.cos().expand(b, H, s, ROPE) * torch.arange(H).view(H, 1, 1)


class OtherValues(Latent):
    def parts(self, kv):
        return kv[..., :NOPE], kv[..., NOPE - 1 :]


class ValuesFirst(Latent):
    def parts(self, kv):
        return kv[..., WIDE:], kv[..., :WIDE]


class WithBias(Latent):
    bias = True


class Windowed(Latent):
    more = (True, 5)


class Ahead(Latent):
    more = (False,)


def run(kind, *, context=None, device="cpu", **options):
    torch.manual_seed(0)
    module = kind().eval()
    with torch.device(device):
        x = torch.randn(2, 7, HIDDEN)
    gm = export_graph(module.to(device), (x,))
    known = {name: {"enabled": name == "absorb_latent_attention"} for name in TransformRegistry.names()}
    known["absorb_latent_attention"] |= options
    settings = load_config({"verify": "structure" if device == "meta" else "matches", "transforms": known})
    context = context or Context(route="decoder", context_length=64)
    report = run_pipeline(gm, settings, context)
    if device == "cpu":
        assert torch.allclose(gm(x), module(x), atol=1e-5)
    return gm, report.transforms["absorb_latent_attention"], context


@pytest.mark.parametrize("kind", [Latent, ThreeDims])
def test_keys_and_values_of_a_latent_row_become_one_op(kind):
    gm, record, context = run(kind)
    (match,) = record.matches
    assert match.numeric_check is not None
    (call,) = [node for node in calls(gm.graph) if is_op(node, ops.latent_attention.default)]
    given = options_of(call)
    assert tuple(tensor_of(given["latent"]).shape)[1::2] == (1, RANK) and given["scale"] == 0.3
    assert given["weight"].target == "kv_b.weight" and tuple(tensor_of(given["rope"]).shape)[1::2] == (1, ROPE)
    assert not any(is_op(node, ops.attention.default, torch.ops.aten.cat.default) for node in calls(gm.graph))
    kept, instead_of = RANK + ROPE, 2 * H * (NOPE + ROPE)
    assert context.notes[0].startswith(f"key-value cache: 1 layers keep latent rows, {kept} numbers")
    assert f"not {instead_of};" in context.notes[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ReadElsewhere, r"the latent row %\S+ .*is read by %sum_1 .*too"),
        (ProjectionReadElsewhere, "has a second reader %sum_1"),
        (NormBetween, "is aten.rms_norm, expected aten.slice.Tensor"),
        (NormOfAll, "does not put heads before tokens"),
        (OwnRotatedParts, "the second part of the keys, is not shared by all heads"),
        (OtherValues, "are not the first part of each head, and the rest"),
        (ValuesFirst, "are not the first part of each head, and the rest"),
        (WithBias, "has a bias"),
        (Windowed, "has a window"),
        (Ahead, "looks ahead"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_something_else_is_left_alone_with_the_reason(kind, reason):
    gm, record, context = run(kind)
    assert record.status == "no_match" and not context.notes
    assert any(is_op(node, ops.attention.default) for node in calls(gm.graph))
    (miss,) = record.near_misses
    assert re.search(reason, miss.reason)


def test_a_row_that_is_no_shorter_than_keys_and_values_is_left_alone():
    with mock.patch.multiple(f"{__name__}", RANK=2 * H * (NOPE + ROPE)):
        _, record, _ = run(Latent)
    assert "is no less than keys and values" in record.near_misses[0].reason


@pytest.mark.parametrize("wrong", ["rope", "values"])
def test_the_numeric_check_tells_a_wrong_variant(wrong):
    """The rotated part left out of the keys; values that begin one row too early."""
    from graft.ops.latent_attention import reference

    right = reference.expand

    def expand(latent, rope, weight, sizes):
        if wrong == "rope":
            return right(latent, torch.zeros_like(rope), weight, sizes)
        return right(latent, rope, weight.roll(1, 0), sizes)

    with mock.patch.object(reference, "expand", expand), pytest.raises(TransformError, match="latent_attention"):
        run(Latent)


def test_on_a_gpu_it_is_off_until_it_was_measured_and_reads_no_float8():
    _, record, _ = run(Latent, device="meta")
    assert record.status == "no_match"
    assert "has not been measured yet; --set transforms.absorb_latent_attention.gpu=true" in record.reason
    assert run(Latent, device="meta", gpu=True)[1].status == "applied"
    float8 = Context(route="decoder", context_length=64, kv_cache_dtype=FP8)
    assert "reads no float8 cache" in run(Latent, device="meta", gpu=True, context=float8)[1].reason


def test_a_module_of_its_own_keeps_its_caches():
    _, record, _ = run(Latent, context=Context(route="module"))
    assert record.status == "skipped"
