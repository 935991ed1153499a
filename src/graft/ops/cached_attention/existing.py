"""torch's attention kernels for prompts: keys and values are gathered from the cache, each sequence is one call.

`scaled_dot_product_attention` takes cuDNN's kernel where that applies, about twice as fast as flash on an H200 (407
and 613 against 211 and 317 TFLOP/s for 2,048 and 8,192 tokens). Behind a cached prefix a prompt needs the causal mask
aligned to the last key: `causal_lower_right`, which runs flash. Which calls come here says op.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from graft.ops.attention.reference import repeat_heads
from graft.ops.cached_attention.decode.triton import split_kv
from graft.ops.cached_attention.reference import gather
from graft.ops.cached_attention.triton import decoding

ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def cached_attention_sdpa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor,  # noqa: ARG001
    seq_lens: Tensor, lens_cpu: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _, h, tokens, d = q.shape
    sizes: list[list[int]] = lens_cpu.tolist()  # on the CPU
    n = decoding(lens_cpu)
    if len(sizes) == 1 and n == 0:
        found = attend_prompt(q, k_cache, v_cache, block_tables[0], sizes[0][1], scale)
        return found.transpose(1, 2).contiguous()
    out = torch.empty((1, tokens, h, d), dtype=q.dtype, device=q.device)
    if n:
        options = (scale, window, softcap, sinks)
        split_kv(q[:, :, :n], k_cache, v_cache, block_tables[:n], seq_lens[:n], *options, out=out[:, :n])
    first = n
    for row, (new, total) in enumerate(sizes[n:], n):
        some = q[:, :, first : first + new]
        found = attend_prompt(some, k_cache, v_cache, block_tables[row], total, scale)  # [1, h, new, d]
        out[:, first : first + new] = found.transpose(1, 2)
        first += new
    return out


def attend_prompt(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, total: int, scale: float) -> Tensor:
    """The last tokens of a sequence of `total`: q [1, h, new, d] → [1, h, new, d]."""
    new = q.shape[2]
    keys, values = (gather(cache, table, total, q.dtype) for cache in (k_cache, v_cache))
    groups = q.shape[1] // keys.shape[1]
    grouped = groups > 1 and q.element_size() == 2  # in float32 grouped heads would go to the slow MATH kernel
    if groups > 1 and not grouped:
        keys, values = repeat_heads(keys, groups), repeat_heads(values, groups)
    with sdpa_kernel(ORDER, set_priority=True):
        if new == total:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
        bias = causal_lower_right(new, total)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale, enable_gqa=grouped)
