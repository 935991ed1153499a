"""A LayerNorm becomes the prologue of the linear layers that read it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_linear_layers_of_a_step import ACTIVATION, Function, refused

from decode_cases import D, targets, transformed, x_of

LAYER_NORM = "fuse_layer_norm_into_matvec"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [False, True])
def test_a_layer_norm_goes_into_its_linear_layers(dtype, biases):
    """One of them with an activation that went in first; the reference rounds where eager does."""

    def layer(m, x):
        b = m.b if biases else None
        n = F.layer_norm(x, (D,), m.g, b, 1e-5)
        return F.linear(n, m.w, b), F.gelu(F.linear(n, m.columns))

    module, x = Function(layer, dtype), x_of(2, 3, D, dtype=dtype)
    gm, report = transformed(module, (x,), "fuse_layer_norm", ACTIVATION, LAYER_NORM)
    assert targets(gm) == ["graft.fused_linear"] * 2 and len(report.transforms[LAYER_NORM].matches) == 2
    for found, expected in zip(gm(x), module(x), strict=True):
        assert torch.equal(found, expected)


def test_as_cohere_spells_it():
    def spelled(m, x):
        h = x.to(torch.float32)
        centred = h - h.mean(-1, keepdim=True)
        h = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return F.linear((m.g.to(torch.float32) * h).to(x.dtype), m.w)

    module, x = Function(spelled, torch.bfloat16), x_of(2, 3, D, dtype=torch.bfloat16)
    gm, _ = transformed(module, (x,), "fuse_layer_norm", LAYER_NORM)
    assert targets(gm) == ["graft.fused_linear"]
    torch.testing.assert_close(gm(x), module(x))


def test_one_that_rounds_after_every_step_stays():
    def spelled(m, x):
        centred = x - x.mean(-1, keepdim=True)
        return F.linear(m.g * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)), m.w)

    module, x = Function(spelled, torch.bfloat16), x_of(2, 3, D, dtype=torch.bfloat16)
    _, report = transformed(module, (x,), "fuse_layer_norm", LAYER_NORM)
    record = report.transforms[LAYER_NORM]
    assert not record.matches and "rounds after every step, and a prologue once" in record.reason


def four_times(m, x, r):
    n = F.layer_norm(x, (D,), m.g, m.b)
    return F.linear(n, m.w) + F.linear(n, m.columns) + F.linear(n, m.w, m.b) + F.linear(n, m.columns, m.b)


LAYER_NORMS = {
    "aten.sin": lambda m, x, r: F.linear(n := F.layer_norm(x, (D,), m.g, m.b), m.w) + n.sin(),
    "the graph has no graft::layer_norm": lambda m, x, r: F.linear(x, m.w),
    "would be computed that often": four_times,
}


@pytest.mark.parametrize("reason", LAYER_NORMS)
def test_layer_norms_that_stay(reason):
    refused(LAYER_NORMS[reason], LAYER_NORM, reason, "fuse_layer_norm")
