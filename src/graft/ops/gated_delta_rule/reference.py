"""The gated delta rule: token by token, which is its meaning, and in chunks, as Hugging Face's models compute it.

A head keeps a matrix S [d_k, d_v] that maps keys to values. Each token lets it fade by exp(g), moves what S gives
for its key towards its value, by the share beta, and reads S by its query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # of the length of queries and keys
CHUNK = 64


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2_norm: bool = False) -> Tensor:
    """q, k: [b, s, h, d_k], v: [b, s, h, d_v], g, beta: [b, s, h] → [b, s, h, d_v]."""
    return token_by_token((q, k, v, g, beta), first_state(q, v), l2_norm)[0]


def gated_delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2_norm: bool = False
) -> Tensor:
    return in_chunks((q, k, v, g, beta), first_state(q, v), l2_norm)[0]


def first_state(q: Tensor, v: Tensor) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros((q.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype=dtype, device=q.device)


def token_by_token(operands: Sequence[Tensor], state: Tensor, l2_norm: bool) -> tuple[Tensor, Tensor]:
    """The result, and the state after the last token. operands: q, k, v, g, beta; state: [b, h, d_k, d_v]."""
    dtype = operands[0].dtype
    q, k, v, g, beta = heads_first(operands, l2_norm)
    q = q / q.shape[-1] ** 0.5
    out = torch.zeros_like(v)
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None, None]
        known = (state * k[:, :, t].unsqueeze(-1)).sum(dim=-2)
        delta = (v[:, :, t] - known) * beta[:, :, t].unsqueeze(-1)
        state = state + k[:, :, t].unsqueeze(-1) * delta.unsqueeze(-2)
        out[:, :, t] = (state * q[:, :, t].unsqueeze(-1)).sum(dim=-2)
    return out.transpose(1, 2).contiguous().to(dtype), state


def in_chunks(operands: Sequence[Tensor], state: Tensor, l2_norm: bool) -> tuple[Tensor, Tensor]:
    """The same by products of matrices: what the tokens of a chunk do to each other is one triangular system."""
    dtype, length = operands[0].dtype, operands[0].shape[1]
    q, k, v, g, beta = heads_first(operands, l2_norm)
    q = q * q.shape[-1] ** -0.5
    more = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, more)) for x in (q, k, v))
    beta, g = (F.pad(x, (0, more)) for x in (beta, g))
    v_beta, k_beta = v * beta.unsqueeze(-1), k * beta.unsqueeze(-1)
    q, k, k_beta, v_beta = (x.reshape(*x.shape[:2], -1, CHUNK, x.shape[-1]) for x in (q, k, k_beta, v_beta))
    ahead = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    fade = g.reshape(*g.shape[:2], -1, CHUNK).cumsum(dim=3)
    between = (fade.unsqueeze(4) - fade.unsqueeze(3)).masked_fill(ahead, float("-inf")).exp()
    system = (k_beta @ k.transpose(-1, -2)) * between
    inside = (q @ k.transpose(-1, -2)) * between
    values = solved(system, v_beta)
    keys = solved(system, k_beta * fade.exp().unsqueeze(-1))
    q = q * fade.exp().unsqueeze(-1)
    k = k * (fade[..., -1:] - fade).exp().unsqueeze(-1)
    whole = fade[..., -1].exp()[..., None, None]
    out = torch.zeros_like(values)
    for i in range(out.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        out[:, :, i] = q[:, :, i] @ state + inside[:, :, i] @ new
        state = state * whole[:, :, i] + k[:, :, i].transpose(-1, -2) @ new
    out = out.reshape(*out.shape[:2], -1, out.shape[-1])[:, :, :length]
    return out.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format), state


def solved(system: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def heads_first(operands: Sequence[Tensor], l2_norm: bool) -> tuple[Tensor, ...]:
    """[b, h, s, …] in float32 at least, with queries and keys of length 1 where that is asked for."""
    wide = torch.promote_types(operands[0].dtype, torch.float32)
    q, k, v, g, beta = (x.transpose(1, 2).to(wide, memory_format=torch.contiguous_format) for x in operands)
    if l2_norm:
        q, k = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPS) for x in (q, k))
    return q, k, v, g, beta
