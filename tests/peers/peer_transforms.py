"""Pieces of decoders in the spellings that AutoDeploy's transform tests have: norms, rotations, attention, experts.

A fused attention gives its result in a layout of its own, so that the reshape after it is a view.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from peer_programs import Table, noise
from torch import nn

TRANSFORMS = Table("transforms")


def add(inputs, fires, **expected):
    return TRANSFORMS.add(inputs, fires=fires, calls=1, close=True, **expected)


def rows():
    return (noise(2, 5, 16),)


def bfloat():
    return (noise(2, 5, 16, dtype=torch.bfloat16),)


class Norm(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(16).to(dtype))


@add(rows, {"fuse_rms_norm": 1})
class rms_norm(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@add(rows, {"fuse_rms_norm": 1})
class rms_norm_by_square_and_division(Norm):
    def forward(self, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


@add(bfloat, {"fuse_rms_norm": 1})
class rms_norm_of_hugging_face_in_bfloat16(Norm):
    def __init__(self):
        super().__init__(torch.bfloat16)

    def forward(self, x):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


@add(rows, {"fuse_rms_norm": 1})
class rms_norm_of_gemma(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


@add(rows, {"fuse_rms_norm": 1})
class rms_norm_of_torch(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-6)

    def forward(self, x):
        return self.norm(x)


@add(rows, {"fuse_rms_norm": 0, "fuse_layer_norm": 0})
class not_a_norm_without_a_mean(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6))


@add(rows, {"fuse_layer_norm": 1})
class layer_norm_written_out(Norm):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


@add(lambda: (noise(2, 5, 16), noise(2, 5, 16, seed=1)), {"fuse_add_rms_norm": 1})
class residual_and_norm(Norm):
    def forward(self, x, residual):
        h = x + residual
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)), h


class MLP(nn.Module):
    def __init__(self, activation=F.silu, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24, bias), nn.Linear(16, 24, bias)
        self.down = nn.Linear(24, 16, bias)
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


@add(rows, {"fuse_swiglu": 1, "merge_gate_up": 1})
class swiglu(MLP):
    pass


@add(rows, {"fuse_swiglu": 1, "merge_gate_up": 1})
class swiglu_with_biases(MLP):
    def __init__(self):
        super().__init__(bias=True)


@add(rows, {"fuse_swiglu": 1})
class swiglu_written_out(MLP):
    def forward(self, x):
        gate = self.gate(x)
        return self.down(self.up(x) * (gate * torch.sigmoid(gate)))


@add(rows, {"fuse_swiglu": 0})
class gate_by_tanh(MLP):
    def __init__(self):
        super().__init__(torch.tanh)


@add(lambda: (noise(2, 5, 48),), {"fuse_swiglu": 1})
def swiglu_of_packed_halves(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def half_turned(x):
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def angles(length=5, dim=8):
    rates = 1.0 / (10000.0 ** (torch.arange(0, dim, 2) / dim))
    table = torch.arange(length)[:, None] * rates
    return torch.cat([table, table], -1)


def heads():
    return noise(2, 4, 5, 8), noise(2, 2, 5, 8, seed=1), angles().cos(), angles().sin()


@add(heads, {"fuse_rope": 2})
def rope_by_halves(q, k, cos, sin):
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


@add(
    lambda: (noise(2, 5, 4, 8), noise(2, 5, 2, 8, seed=1), torch.polar(torch.ones(5, 4), angles()[:, :4])),
    {"fuse_rope": 2},
)
def rope_by_complex_numbers(q, k, turns):
    def turned(x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)

    return turned(q), turned(k)


@add(lambda: (noise(2, 4, 5, 8), angles()[:, :4].cos(), angles()[:, :4].sin()), {"fuse_rope": 1})
def rope_of_interleaved_pairs(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


@add(lambda: (noise(2, 4, 5, 12), angles().cos(), angles().sin()), {"fuse_rope": 1})
def rope_of_a_part(x, cos, sin):
    turned, rest = x[..., :8], x[..., 8:]
    return torch.cat([turned * cos + half_turned(turned) * sin, rest], -1)


def qkv():
    return noise(2, 4, 5, 8), noise(2, 4, 5, 8, seed=1), noise(2, 4, 5, 8, seed=2)


@add(qkv, {"fuse_attention": 1}, layouts=False)
def attention_written_out(q, k, v):
    return (q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v


@add(qkv, {"fuse_attention": 1}, layouts=False)
def attention_of_torch_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@add(qkv, {"fuse_attention": 1}, layouts=False)
def attention_with_a_causal_mask(q, k, v):
    scores = q @ k.transpose(-2, -1) * 8**-0.5
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


@add(qkv, {"fuse_attention": 1}, layouts=False)
def attention_with_an_added_mask(q, k, v):
    mask = torch.full((5, 5), float("-inf")).triu(1)
    return ((q @ k.transpose(-2, -1)) * 8**-0.5 + mask).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


@add(
    lambda: (noise(2, 4, 5, 8), noise(2, 2, 5, 8, seed=1), noise(2, 2, 5, 8, seed=2)),
    {"fuse_attention": 1},
    layouts=False,
)
def attention_of_grouped_queries(q, k, v):
    def repeated(x):
        return x[:, :, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8)

    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)


@add(qkv, {"fuse_attention": 1}, layouts=False)
def attention_with_a_soft_cap(q, k, v):
    scores = q @ k.transpose(-2, -1) * 8**-0.5
    return ((scores / 30.0).tanh() * 30.0).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, kv=16):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16, False), nn.Linear(16, kv, False), nn.Linear(16, kv, False)
        self.o = nn.Linear(16, 16, False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(y.transpose(1, 2).reshape(b, s, 16))


@add(rows, {"merge_qkv": 1, "fuse_attention": 1})
class three_projections_merge(Attention):
    pass


@add(rows, {"merge_qkv": 1, "fuse_attention": 1})
class three_projections_of_other_sizes_merge(Attention):
    def __init__(self):
        super().__init__(8)


@add(rows, {"merge_qkv": 0, "merge_gate_up": 0})
class projections_of_other_inputs_stay(MLP):
    def forward(self, x):
        return self.gate(x) + self.up(x * 2)


@add(rows, {})
def transposes_that_cancel(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2).contiguous() + 1


@add(rows, {})
def l2_norm(x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4, False)
        self.gate_up = nn.Parameter(torch.randn(4, 16, 48) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 24, 16) * 0.2)


@add(lambda: (noise(6, 16),), {})
class experts_computed_densely(Experts):
    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        share = torch.zeros(6, 4).scatter(1, chosen, weights / weights.sum(-1, keepdim=True))
        gate, up = torch.einsum("td,edf->etf", x, self.gate_up).chunk(2, -1)
        return (torch.bmm(F.silu(gate) * up, self.down) * share.t()[..., None]).sum(0)


@add(lambda: (noise(6, 16),), {})
class experts_one_after_another(Experts):
    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for expert in range(4):
            gate, up = (x @ self.gate_up[expert]).chunk(2, -1)
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            result.add_((F.silu(gate) * up) @ self.down[expert] * share)
        return result


@add(rows, {"fuse_rms_norm": 1, "fuse_swiglu": 1})
class block_of_a_decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(16, eps=1e-5), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))
