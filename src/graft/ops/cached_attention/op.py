"""graft::cached_attention: attention over a paged cache that holds the new keys and values already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.base.device_memory import size_text
from graft.ops.cached_attention.reference import cached_attention
from graft.ops.call import Call
from graft.ops.launch import counted_on_device, float8_missing, gluon_missing
from graft.ops.paged_cache import scattered
from graft.ops.spec import Kernel, OpSpec, define, native, needs_triton
from graft.weights.quantize import FP8

# Tokens of a prompt from which torch's kernel, with keys gathered first, is quicker than graft's. bfloat16 on an
# H200: 152 to 234 against 241 to 249 TFLOP/s for 2,048 tokens, 492 against 368 for 8,192, about 317 behind a prefix
# (flash); 64 prompts of 128 tokens took 583 ms with a call each, of which the host needed more than half.
LONG = 4096
# Of graft's own for Hopper, which gathers too, but all prompts at once.
FLASH_HEADS = (64, 128, 256)
FLASH_GROUP = 64  # rows of a warpgroup
FLASH_TOKENS = 64  # a prompt: gathering a key takes as long as 50 queries gain
FLASH_BYTES = 1 << 30  # a layer


def fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, lens_cpu: Tensor, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v_cache.shape[3])


def triton_problem(call: Call) -> str | None:
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, FP8) or q.dtype is torch.float64:
        return (
            f"queries are {q.dtype} and the cache is {k_cache.dtype}; it takes 16 and 32 bits, all alike, and float8"
            " caches"
        )
    return needs_triton(q, k_cache, v_cache) or float8_problem(k_cache)


def float8_problem(cache: Tensor) -> str | None:
    """Why kernels on its device cannot read or write this cache, or None."""
    return float8_missing(cache.device) if cache.dtype is FP8 else None


def caches_problem(call: Call) -> str | None:
    k_cache, v_cache = call.k_cache, call.v_cache
    if problem := scattered(k_cache):
        return problem
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        return "the caches must have equal shapes and strides, the last one 1"
    return None


def decode_problem(call: Call) -> str | None:
    if call.q.shape[2] != call.seq_lens.shape[0]:
        return "not every sequence brings a single token"
    return caches_problem(call)


def sdpa_problem(call: Call) -> str | None:
    if call.softcap is not None or call.sinks is not None:
        return f"scaled_dot_product_attention has no {'soft cap' if call.softcap is not None else 'sinks'}"
    problem = triton_problem(call)
    if problem is not None:
        return problem
    d = call.q.shape[-1]
    return f"the fast kernels take heads of a multiple of 8 up to 256; these have {d}" if d > 256 or d % 8 else None


def sdpa_call_problem(call: Call) -> str | None:
    q, lens_cpu, window = call.q, call.lens_cpu, call.window
    problem = caches_problem(call)
    if problem is not None:
        return problem
    if counted_on_device(q, lens_cpu):
        return "sizes from the CPU would be the same at every replay of a capture"
    if window is not None and bool((lens_cpu[:, 1] > window).any()):
        return f"a sequence is longer than the window of {window}"
    if q.element_size() == 2 and any(1 < new < LONG or 1 < new < total for new, total in lens_cpu.tolist()):
        return f"one launch for all is quicker than a call each, but for whole prompts of {LONG:,} tokens and more"
    return None


def flash_problem(call: Call) -> str | None:
    """Prompts on Hopper's tensor cores."""
    q, kv, d = call.q, call.k_cache.shape[2], call.q.shape[-1]
    if call.softcap is not None or call.sinks is not None:
        return f"it has no {'soft cap' if call.softcap is not None else 'sinks'}"
    if q.element_size() != 2 or d not in FLASH_HEADS or q.shape[1] // kv > FLASH_GROUP or not call.scale > 0:
        return (
            f"it takes 16 bits, heads of {', '.join(map(str, FLASH_HEADS))}, up to {FLASH_GROUP} query heads to a"
            f" key-value head and a positive scale, not {q.dtype}, {d}, {q.shape[1] // kv} and {call.scale}"
        )
    return gluon_missing(q.device) or triton_problem(call)


def flash_call_problem(call: Call) -> str | None:
    if problem := caches_problem(call):
        return problem
    if counted_on_device(call.q, call.lens_cpu):
        return "sizes from the CPU would be the same at every replay of a capture"
    lens = call.lens_cpu[
        int((call.lens_cpu[:, 0] != 1).int().argmax()) :
    ]  # what is gathered: behind those that decode
    total, cache = int(lens[:, 1].sum()), call.k_cache
    if int(lens[:, 0].sum()) < FLASH_TOKENS * max(len(lens), 1):
        return f"prompts bring fewer than {FLASH_TOKENS} tokens each: gathering their keys would take longer"
    size = 2 * total * cache.shape[2] * cache.shape[3] * call.q.element_size()
    return f"{size_text(size)} of keys and values would be gathered" if size > FLASH_BYTES else None


def native_problem(call: Call) -> str | None:
    """Of every op that reads or writes the paged cache."""
    kinds = {call.k_cache.dtype, call.v_cache.dtype}
    if len(kinds) == 1 and kinds <= {torch.float32, torch.bfloat16, torch.float16}:
        return None
    return f"the caches are {', '.join(sorted(map(str, kinds)))}"


def run_split_kv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, token_to_seq: Tensor, block_tables: Tensor, cu_seqlens: Tensor,
    seq_lens: Tensor, lens_cpu: Tensor, *options: Any,
) -> Tensor:  # fmt: skip
    from graft.ops.cached_attention.decode.triton import split_kv

    return split_kv(q, k_cache, v_cache, block_tables, seq_lens, *options)


def run_sdpa(*args: Any) -> Tensor:
    from graft.ops.cached_attention.existing import cached_attention_sdpa

    return cached_attention_sdpa(*args)


def run_flash(*args: Any) -> Tensor:
    from graft.ops.cached_attention.triton import cached_attention_flash

    return cached_attention_flash(*args)


def run_triton(*args: Any) -> Tensor:
    from graft.ops.cached_attention.triton import cached_attention_triton

    return cached_attention_triton(*args)


SPEC = define(
    OpSpec(
        name="cached_attention",
        schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor token_to_seq, Tensor block_tables,"
        " Tensor cu_seqlens, Tensor seq_lens, Tensor lens_cpu, float scale, int? window=None, float? softcap=None,"
        " Tensor? sinks=None) -> Tensor",
        reference=cached_attention,
        fake=fake,
        kernels=(
            Kernel("split_kv", "triton", triton_problem, run_split_kv, varies=decode_problem),
            Kernel("flash", "triton", flash_problem, run_flash, varies=flash_call_problem),
            Kernel("sdpa", "existing", sdpa_problem, run_sdpa, varies=sdpa_call_problem),
            Kernel("triton", "triton", triton_problem, run_triton, varies=caches_problem),
            native(native_problem),
        ),
    )
)
