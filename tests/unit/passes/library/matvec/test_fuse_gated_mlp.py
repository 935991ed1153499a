"""fuse_gated_mlp: two layers with rows rounded between them become one op; what must not, and why not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decode_cases import targets, transformed
from graft.ops.gated_mlp.cases import MlpCase, make

OPS = torch.ops.graft


class Mlp(nn.Module):
    """The two layers as quantize_linear leaves them. `options`: of the second, or `between`, on the way to it."""

    def __init__(self, shape: MlpCase, between=None, **second):
        super().__init__()
        (self.x, gate_up, gate_up_scale, down, down_scale, self.activation, self.up_bias, self.down_bias, norm, eps,
         offset, cast_last, upcast, self.residual, normed, self.fp8_from) = make(
            shape, "cpu", torch.float32, torch.Generator().manual_seed(0)
        )  # fmt: skip
        for name, value in {"w": gate_up, "s": gate_up_scale, "v": down, "t": down_scale, "g": norm}.items():
            self.register_buffer(name, value)
        self.rest = (eps, offset, cast_last)
        self.last = (upcast, None, normed)
        self.between, self.second = between, {"fp8_from": self.fp8_from, **second}

    def forward(self, x, residual):
        h = OPS.fused_linear(
            x, self.w, self.up_bias, self.s, self.g, *self.rest, self.activation, *self.last, self.fp8_from
        )
        y = OPS.fused_linear(h if self.between is None else self.between(h), self.v, None, self.t, residual=residual,
                             **self.second)  # fmt: skip
        return (y, h) if self.between is returned else y


def returned(h):
    """A second reader of the rows."""
    return h


def args_of(module):
    return module.x, module.residual


SHAPES = [
    MlpCase(9, 96, 576, norm="normed", fp8_from=2),
    MlpCase(3, 72, 200, norm="plain", fp8_from=2),  # rows of weights are padded
    MlpCase(1, 64, 256, activation="gelu_tanh", norm="cast_last", fp8_from=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.rows}-{shape.norm}")
def test_two_layers_become_one_op_with_the_same_numbers(shape):
    module = Mlp(shape).eval()
    args = args_of(module)
    gm, report = transformed(module, args, "fuse_gated_mlp")
    assert len(report.transforms["fuse_gated_mlp"].matches) == 1
    assert targets(gm) == ["graft.gated_mlp"]
    assert torch.equal(gm(*args), module(*args))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Mlp(MlpCase(4, 64, 256)), "not rounded to float8"),
        (Mlp(SHAPES[0], between=torch.sin), "no two layers"),
        (Mlp(SHAPES[0], between=returned), ""),
        (Mlp(SHAPES[0], fp8_from=3), ""),
        (Mlp(SHAPES[0], normed=True, eps=1e-5), ""),
    ],
    ids=["not rounded", "something between", "a second reader", "rounded from elsewhere", "a norm between"],
)
def test_what_stays_two_layers(module, why):
    args = args_of(module)
    gm, report = transformed(module, args, "fuse_gated_mlp")
    record = report.transforms["fuse_gated_mlp"]
    assert not record.matches and targets(gm).count("graft.fused_linear") == 2
    told = [record.reason, *(miss.reason for miss in record.near_misses)]
    assert any(why in reason for reason in told if reason), told
