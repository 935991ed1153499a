"""Layers in vLLM's layouts, as its `forward_native` methods spell them: packed tokens, flat heads, one table."""

from __future__ import annotations

import torch
from torch import nn

T, H, KV, D, SLOTS = 5, 4, 2, 16, 12


def turned(x, cos, sin, neox):
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    x1, x2 = torch.chunk(x, 2, dim=-1) if neox else (x[..., ::2], x[..., 1::2])
    o1, o2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return torch.cat((o1, o2), dim=-1) if neox else torch.stack((o1, o2), dim=-1).flatten(-2)


class Rotary(nn.Module):
    """positions [t], q [t, h * d], k [t, kv * d] → q and k turned, in the same shapes."""

    def __init__(self, neox=True, rotary_dim=D, dtype=torch.float32, table=None):
        super().__init__()
        angles = torch.outer(torch.arange(32.0), 1e4 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1).to(table or dtype))
        self.neox, self.rotary_dim = neox, rotary_dim

    def forward(self, positions, q, k):
        positions = positions.flatten()
        cos, sin = self.cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
        return tuple(self.turn(x, positions.shape[0], cos, sin) for x in (q, k))

    def turn(self, x, tokens, cos, sin):
        heads = x.view(tokens, -1, D)
        rotated = turned(heads[..., : self.rotary_dim], cos, sin, self.neox)
        return torch.cat((rotated, heads[..., self.rotary_dim :]), dim=-1).reshape(x.shape)


class RMSNorm(nn.Module):
    """With a residual the sum is float32, is normed as such, and only then rounded."""

    def __init__(self, d=D, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, generator=torch.Generator().manual_seed(d)).to(dtype))
        self.eps = 1e-6

    def forward(self, x, residual=None):
        dtype = x.dtype
        x = x.to(torch.float32)
        if residual is not None:
            x = x + residual.to(torch.float32)
            residual = x.to(dtype)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        x = x.to(dtype) * self.weight
        return x if residual is None else (x, residual)


class QKNormRotary(Rotary):
    """Qwen3: every head is normed before it turns."""

    def __init__(self, neox=True, rotary_dim=D, dtype=torch.float32):
        super().__init__(neox, rotary_dim, dtype)
        self.q_norm, self.k_norm = RMSNorm(D, dtype), RMSNorm(D, dtype)

    def forward(self, positions, q, k):
        q = self.q_norm(q.view(*q.shape[:-1], q.shape[-1] // D, D)).view(q.shape)
        k = self.k_norm(k.view(*k.shape[:-1], k.shape[-1] // D, D)).view(k.shape)
        return super().forward(positions, q, k)


class CachedRotary(Rotary):
    """The turned keys are written to a cache that the module owns."""

    def __init__(self, neox=True, rotary_dim=D, dtype=torch.float32):
        super().__init__(neox, rotary_dim, dtype)
        self.register_buffer("k_cache", torch.zeros(SLOTS, KV, D, dtype=dtype))

    def forward(self, positions, q, k, slots):
        q, k = super().forward(positions, q, k)
        self.k_cache.index_put_((slots,), k.view(-1, KV, D))
        return q, k


class QKNormCachedRotary(CachedRotary):
    def __init__(self, neox=True, rotary_dim=D, dtype=torch.float32):
        super().__init__(neox, rotary_dim, dtype)
        self.q_norm, self.k_norm = RMSNorm(D, dtype), RMSNorm(D, dtype)

    def forward(self, positions, q, k, slots):
        q = self.q_norm(q.view(*q.shape[:-1], q.shape[-1] // D, D)).view(q.shape)
        k = self.k_norm(k.view(*k.shape[:-1], k.shape[-1] // D, D)).view(k.shape)
        return super().forward(positions, q, k, slots)


def heads(dtype=torch.float32, tokens=T, seed=0):
    """positions, q, k and the slots of a cache."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, n * D, generator=generator).to(dtype) for n in (H, KV))
    return (
        torch.randint(0, 32, (tokens,), generator=generator),
        q,
        k,
        torch.randperm(SLOTS, generator=generator)[:tokens],
    )


class Block(nn.Module):
    """A plain first norm, then two that add: the stream of residuals goes through all of them."""

    def __init__(self, dtype=torch.float32, norm=RMSNorm):
        super().__init__()
        self.norms = nn.ModuleList(norm(D, dtype) for _ in range(3))
        self.a, self.b = (nn.Linear(D, D, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x):
        residual = x
        x = self.a(self.norms[0](x))
        x, residual = self.norms[1](x, residual)
        x, residual = self.norms[2](self.b(x), residual)
        return x


class RoundedFirst(RMSNorm):
    """The sum is made in float32, rounded, and the norm reads what was rounded."""

    def forward(self, x, residual=None):
        if residual is not None:
            x = residual = (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype)
        normed = super().forward(x)
        return normed if residual is None else (normed, residual)


class Gated(nn.Module):
    """Mamba 2: the row is gated in float32, normed, rounded, weighted."""

    def __init__(self, d=D, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, generator=torch.Generator().manual_seed(d)).to(dtype))

    def forward(self, x, gate):
        dtype = x.dtype
        x = x.to(torch.float32) * torch.nn.functional.silu(gate.to(torch.float32))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * x.to(dtype)


class GatedAfter(Gated):
    """Qwen3-Next: normed and weighted first, then gated in float32."""

    def forward(self, x, gate):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = self.weight * x.to(dtype)
        return (x * torch.nn.functional.silu(gate.to(torch.float32))).to(dtype)
