"""Attention of prompts on Hopper's asynchronous tensor cores, after FlashAttention-3 (Shah et al., 2024).

Keys and values lie in contiguous memory (gather/). A program takes 128 rows, tokens with all queries of one key-value
head's group: two warpgroups of 64 rows, and a warp that has the copy engine bring tiles of keys and values ahead of
them. A warpgroup multiplies the next tile's keys while it weighs the values of this one, and takes the softmax of the
next under that product:

    scores(j) = q k(j)        launched
    result += w(j - 1) v(j - 1)        launched
    wait for scores(j); w(j), and by how much the result shrinks
    wait for the result; shrink it

Exponentials are to base 2, and scores are scaled in the same multiply-add that takes their maximum away.
Gluon, not Triton: which warps load, what is in flight and what waits for what is written down here, where Triton's
compiler lets a warpgroup wait for each of its products (H200, 8,192 tokens of 32 / 8 heads of 128 in bfloat16: 621
TFLOP/s; the same tiles in Triton 471, tables read in the loop 380, cuDNN 613).
"""

from __future__ import annotations

import math

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOWEST = gl.constexpr(-1.0e30)  # a maximum before the first key; -inf would have no difference with itself
HALF_ROWS = gl.constexpr(64)  # of a warpgroup
STAGES = 2  # tiles of keys, and of values, in shared memory


@gluon.jit
def load_tiles(
    k_desc, v_desc, keys, values, k_full, k_empty, v_full, v_empty, row, column, first, stop,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Brings the tiles first…stop-1 of a sequence that begins at `row`."""
    for j in range(first, stop):
        slot = (j - first) % STAGES
        free = ((j - first) // STAGES + 1) & 1  # at the first round every slot is
        mbarrier.wait(k_empty.index(slot), free)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row + j * TILE, column], k_full.index(slot), keys.index(slot))
        mbarrier.wait(v_empty.index(slot), free)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [row + j * TILE, column], v_full.index(slot), values.index(slot))


@gluon.jit
def weigh(
    scores, position, at, full, window, best, total, factor,
    TILE: gl.constexpr, HAS_WINDOW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Weights [rows, TILE] of the keys from `at` on, by how much all before them shrinks, the maximum and the sum.
    full: keys below are seen by every row, but for the window."""
    key = at + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    if at + TILE > full:
        scores = gl.where(key[None, :] <= position[:, None], scores, -float("inf"))
    if HAS_WINDOW:
        scores = gl.where(key[None, :] > position[:, None] - window, scores, -float("inf"))
    higher = gl.maximum(best, gl.max(scores, axis=1))
    weights = gl.exp2(scores * factor - (higher * factor)[:, None])
    shrink = gl.exp2((best - higher) * factor)
    return weights, shrink, higher, total * shrink + gl.sum(weights, axis=1)


@gluon.jit
def load_queries(
    q, queries, low, stop, kv, sq_t, sq_h, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, D: gl.constexpr
):
    """The rows of a warpgroup, from token `low` on, into shared memory."""
    across: gl.constexpr = D // 8 if D < 256 else 32
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    row = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, flat))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, flat))
    token = low + row // GROUP_PAD
    real = (token < stop) & (row % GROUP_PAD < GROUP)
    source = (token.to(gl.int64) * sq_t + (kv * GROUP + row % GROUP_PAD).to(gl.int64) * sq_h)[:, None] + dims[None, :]
    queries.store(gl.load(q + source, mask=real[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_rows(
    out, result, low, stop, kv, heads,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
    token = low + row // GROUP_PAD
    target = (token.to(gl.int64) * heads + kv * GROUP + row % GROUP_PAD)[:, None] * D
    target += gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    kept = (token < stop) & (row % GROUP_PAD < GROUP)
    gl.store(out + target, result.to(out.dtype.element_ty), mask=kept[:, None])


@gluon.jit
def attend(
    q, out, queries, keys, values, k_full, k_empty, v_full, v_empty,
    low, stop, behind, kv, first, count, full, window, sq_t, sq_h, heads, factor,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 // GROUP_PAD tokens, of the first or the second half of a program's."""
    dtype: gl.constexpr = q.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    low += HALF * (HALF_ROWS // GROUP_PAD)
    load_queries(q, queries, low, stop, kv, sq_t, sq_h, GROUP, GROUP_PAD, D)
    position = low + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, s_layout)) // GROUP_PAD + behind
    best = gl.full([HALF_ROWS], LOWEST, gl.float32, layout=gl.SliceLayout(1, s_layout))
    total = gl.full([HALF_ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, s_layout))
    result = gl.full([HALF_ROWS, D], 0.0, gl.float32, layout=o_layout)
    nothing = gl.full([HALF_ROWS, TILE], 0.0, gl.float32, layout=s_layout)

    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(0), count=1)
    weights, shrink, best, total = weigh(
        scores, position, first * TILE, full, window, best, total, factor, TILE, HAS_WINDOW, s_layout
    )
    operand = gl.convert_layout(weights.to(dtype), w_layout)
    for i in range(1, count):
        slot, before = i % STAGES, (i - 1) % STAGES
        mbarrier.wait(k_full.index(slot), (i // STAGES) & 1)
        scores = warpgroup_mma(queries, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        flying = warpgroup_mma(operand, values.index(before), result, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        weights, shrink, best, total = weigh(
            scores, position, (first + i) * TILE, full, window, best, total, factor, TILE, HAS_WINDOW, s_layout
        )
        result, _ = warpgroup_mma_wait(0, deps=(flying, operand))
        mbarrier.arrive(v_empty.index(before), count=1)
        result = result * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        operand = gl.convert_layout(weights.to(dtype), w_layout)
    last = (count - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((count - 1) // STAGES) & 1)
    flying = warpgroup_mma(operand, values.index(last), result, is_async=True)
    result, _ = warpgroup_mma_wait(0, deps=(flying, operand))

    result = result / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
    store_rows(out, result, low, stop, kv, heads, GROUP, GROUP_PAD, D, o_layout)


@gluon.jit
def find_tile(cu_seqlens, n, TOKENS: gl.constexpr):
    """As prefill/ finds it: the sequence of this program, and its first token, at or behind the last if it has none;
    those with the most keys first."""
    index = gl.num_programs(0) - 1 - gl.program_id(0)
    base = gl.load(cu_seqlens).to(gl.int32)
    low = gl.program_id(0) * 0
    high = n
    while high - low > 1:
        middle = (low + high) // 2
        begins = (gl.load(cu_seqlens + middle).to(gl.int32) - base) // TOKENS + middle
        low, high = gl.where(begins <= index, middle, low), gl.where(begins <= index, high, middle)
    start = gl.load(cu_seqlens + low).to(gl.int32)
    return low, start + (index - ((start - base) // TOKENS + low)) * TOKENS


@gluon.jit(do_not_specialize=["n", "window"], do_not_specialize_on_alignment=["cu_seqlens", "seq_lens"])
def flash_kernel(
    q, k_desc, v_desc, out, cu_seqlens, starts, seq_lens, sq_t, sq_h, heads, factor, window, n,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = 2 * HALF_ROWS // GROUP_PAD
    dtype: gl.constexpr = q.dtype.element_ty
    kv = gl.program_id(1)
    sequence, low = find_tile(cu_seqlens, n, TOKENS)
    stop = gl.load(cu_seqlens + sequence + 1).to(gl.int32)
    if low < stop:
        behind = gl.load(seq_lens + sequence).to(gl.int32) - stop  # a token's position, less its place in the row
        end = gl.minimum(low + TOKENS, stop) + behind
        first = 0
        if HAS_WINDOW:
            first = gl.maximum(low + behind - window + 1, 0) // TILE
        last = (end + TILE - 1) // TILE
        row = gl.load(starts + sequence).to(gl.int32)
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_ROWS, D], dtype)
        upper = gl.allocate_shared_memory(dtype, [HALF_ROWS, D], q_layout)
        lower = gl.allocate_shared_memory(dtype, [HALF_ROWS, D], q_layout)
        keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], k_desc.layout)
        values = gl.allocate_shared_memory(dtype, [STAGES, TILE, D], v_desc.layout)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)  # both warpgroups have read it
            mbarrier.init(v_empty.index(i), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (q, out, upper, keys, values, k_full, k_empty, v_full, v_empty,
                          low, stop, behind, kv, first, last - first, low + behind + 1, window,
                          sq_t, sq_h, heads, factor, GROUP, GROUP_PAD, TILE, D, STAGES, HAS_WINDOW, 0)),
                (attend, (q, out, lower, keys, values, k_full, k_empty, v_full, v_empty,
                          low, stop, behind, kv, first, last - first, low + behind + 1, window,
                          sq_t, sq_h, heads, factor, GROUP, GROUP_PAD, TILE, D, STAGES, HAS_WINDOW, 1)),
                (load_tiles, (k_desc, v_desc, keys, values, k_full, k_empty, v_full, v_empty,
                              row, kv * D, first, last, TILE, STAGES)),
            ],
            [4, 1],  # warps
            [240, 24],  # registers of a thread; what is left, 240 as well, is the first's
        )  # fmt: skip


def flash(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, cu_seqlens: Tensor, seq_lens: Tensor,
    scale: float, window: int | None, out: Tensor,
) -> None:  # fmt: skip
    """Writes the rows cu_seqlens[0]:cu_seqlens[-1] of out [1, T, h, d]; q: [1, h, T, d]; keys, values: [rows, kv, d],
    of the same sequences, from the rows `starts` on."""
    _, h, tokens, d = q.shape
    kv, n = keys.shape[1], seq_lens.shape[0]
    tile = tile_of(d)
    layout = gl.NVMMASharedLayout.get_default_for([tile, d], gluon_type(q))
    k_desc, v_desc = (TensorDescriptor.from_tensor(one.view(-1, kv * d), [tile, d], layout) for one in (keys, values))
    group = triton.next_power_of_2(h // kv)
    flash_kernel[(tokens * group // 128 + n, kv)](
        q, k_desc, v_desc, out, cu_seqlens, starts, seq_lens, q.stride(2), q.stride(1), h, scale * math.log2(math.e),
        window or 0, n, GROUP=h // kv, GROUP_PAD=group, TILE=tile, D=d, STAGES=STAGES, HAS_WINDOW=window is not None,
        num_warps=4,
    )  # fmt: skip


def tile_of(d: int) -> int:
    """Keys at a time: what fits into the registers of 240 a thread, and twice into shared memory."""
    return 64 if d > 128 else 128


def gluon_type(tensor: Tensor) -> gl.dtype:
    return gl.bfloat16 if str(tensor.dtype) == "torch.bfloat16" else gl.float16
