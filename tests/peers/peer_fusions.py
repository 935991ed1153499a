"""Layers as vLLM lays them out (packed tokens, in-place ops, caches by slot), as its fusion tests cover them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from peer_programs import Table, noise, ramp, whole
from peer_transforms import half_turned
from torch import nn

FUSIONS = Table("fusions")


def add(inputs, fires, **expected):
    return FUSIONS.add(inputs, fires=fires, **{"calls": 1, "close": True} | expected)


def tokens(dtype=torch.float32):
    return lambda: (noise(6, 16, dtype=dtype), noise(6, 16, seed=1, dtype=dtype))


def normed(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(16))
        self.linear = nn.Linear(16, 16, False)


@add(tokens(), {"fuse_add_rms_norm": 1})
class residual_stream(Weight):
    def forward(self, x, residual):
        residual = x + residual
        return self.linear(normed(residual, self.weight)), residual


@add(tokens(), {"fuse_rms_norm": 1})
class residual_written_in_place(Weight):
    def forward(self, x, residual):
        residual.add_(x)
        return normed(residual, self.weight)


@add(tokens(), {"fuse_rms_norm": 2})
class norm_read_by_two(Weight):
    def forward(self, x, y):
        return normed(x, self.weight), normed(x * y, self.weight) + self.linear(x)


@add(tokens(torch.bfloat16), {"fuse_rms_norm": 1})
class norm_in_float32_of_bfloat16(Weight):
    def forward(self, x, _):
        return normed(x.float(), self.weight).to(x.dtype)


@add(tokens(), {"fuse_rms_norm": 1})
class norm_then_quantized(Weight):
    def forward(self, x, _):
        y = normed(x, self.weight)
        scale = y.abs().amax(-1, keepdim=True) / 127
        return (y / scale).round().clamp(-128, 127).to(torch.int8), scale


@add(lambda: (noise(6, 32),), {"fuse_swiglu": 1})
def silu_and_mul(x):
    return F.silu(x[..., :16]) * x[..., 16:]


@add(lambda: (noise(6, 32),), {"fuse_swiglu": 1})
def silu_and_mul_into_a_buffer(x):
    out = x.new_empty(6, 16)
    out.copy_(F.silu(x[..., :16]) * x[..., 16:])
    return out


@add(lambda: (noise(6, 32),), {"fuse_swiglu": 1})
def silu_and_mul_then_quantized(x):
    y = F.silu(x[..., :16]) * x[..., 16:]
    return (y * 10).round().clamp(-128, 127).to(torch.int8)


@add(lambda: (noise(6, 32),), {"fuse_swiglu": 0})
def mul_and_silu_of_the_sum(x):
    return F.silu(x[..., :16] * x[..., 16:])


@add(lambda: (noise(6, 16),), {}, close=False)
def reshapes_that_do_nothing(x):
    y = x.view(-1, 16).reshape(6, 16).view(6, 16)
    return y[:, :16] + y.view(3, 2, 16).view(6, 16)


@add(lambda: (noise(6, 16),), {}, close=False)
def slices_that_do_nothing_and_one_that_does(x):
    return x[:6] + x[0:, :] + x[:, 0:16] * x[:1]


@add(lambda: (ramp(6, 4, 8), torch.zeros(16, 4, 8), whole(3, 9, 1, 15, 0, 7)), {}, close=False, calls=2)
def cache_write_by_slot(k, cache, slots):
    cache[slots] = k
    return cache.sum(0)


def turned():
    cos, sin = (noise(6, 8, seed=s) for s in (3, 4))
    return noise(6, 32), noise(6, 16, seed=1), cos, sin


@add(turned, {"fuse_rope": 2})
def rope_of_packed_tokens(q, k, cos, sin):
    q, k = q.view(6, 4, 8), k.view(6, 2, 8)
    cos, sin = cos[:, None], sin[:, None]
    return (q * cos + half_turned(q) * sin).flatten(1), (k * cos + half_turned(k) * sin).flatten(1)


@add(lambda: (*turned()[:1], noise(32, 4, seed=3), noise(32, 4, seed=4), whole(0, 1, 2, 7, 8, 30)), {})
def rope_by_position_from_tables(q, cos, sin, positions):
    q = q.view(6, 4, 8)
    c, s = cos[positions][:, None], sin[positions][:, None]
    left, right = q.chunk(2, -1)
    return torch.cat([left * c - right * s, right * c + left * s], -1).flatten(1)


@add(turned, {"fuse_rms_norm": 2})
class qk_norm_and_rope(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_weight, self.k_weight = (nn.Parameter(1 + 0.1 * torch.randn(8)) for _ in range(2))

    def forward(self, q, k, cos, sin):
        q, k = normed(q.view(6, 4, 8), self.q_weight), normed(k.view(6, 2, 8), self.k_weight)
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


@add(lambda: (noise(6, 16), torch.zeros(6, 16)), {"fuse_rms_norm": 1}, calls=2)
class norm_written_into_an_output(Weight):
    def forward(self, x, out):
        out.copy_(normed(x, self.weight))
        return out


@add(lambda: (noise(6, 16), torch.zeros(4, 6, 16), whole(2)), {"fuse_rms_norm": 1}, calls=2)
class norm_written_into_a_layer_of_a_cache(Weight):
    def forward(self, x, cache, place):
        cache.index_copy_(0, place, normed(x, self.weight)[None])
        return cache.sum(0)


@add(tokens(), {"fuse_rms_norm": 2})
class two_norms_with_a_write_between(Weight):
    def forward(self, x, y):
        first = normed(x, self.weight)
        x.add_(y)
        return first, normed(x, self.weight)


@add(tokens(), {"fuse_rms_norm": 0})
class the_square_is_read_elsewhere(Weight):
    def forward(self, x, _):
        square = x.pow(2)
        return x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6) * self.weight, square
