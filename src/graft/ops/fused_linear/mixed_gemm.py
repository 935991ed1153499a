"""fused_linear of int8 and int4 weights for many tokens on Hopper: widened in registers, ahead of the tensor cores.

The weight is the left operand, which asynchronous tensor cores (wgmma) take out of registers: what is read, and kept
in shared memory, are its words. A program takes a tile of rows and tokens; two warpgroups have half of the rows each,
and a warp has the copy engine bring words and values of x ahead of them. A warpgroup widens the next words while its
product runs:

    words [rows, 32] ──▶ part 0 · x [32, tokens] + part 1 · x [32, tokens] + …        (weights/packing.py)

Parts of a word belong to values of x that lie apart, each a tile of its own; so nothing moves between threads.

int8 becomes 16 bits exactly and is scaled at the end, in float32; a nibble is multiplied by the scale of its group
and rounded, as where weights are widened for torch's GEMM (dequantize.py). Llama-3.1-8B on an H200, TFLOP/s of int8
and int4 for 1,024 tokens: gate and up 737 and 718 (bfloat16 by torch 800), down 777 and 718 (819); all four shapes
for 128, 256 and 512 tokens in 141, 204 and 335 us (bfloat16 141, 184 and 292; integer_gemm 154, 245 and 469).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
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

from graft.ops.fused_linear.mixed_sizes import shares, sizes_for
from graft.ops.launch import counters, pdl_supported, processors

if TYPE_CHECKING:
    from graft.ops.fused_linear.triton import LinearCall

WORDS = gl.constexpr(32)  # of a row in a tile of the weight; values in a tile of x. A unit has four tiles of x, and
# so 128 values: two tiles of int8, or one of nibbles. It is multiplied in two steps.

# What precedes the kernel on the device may still run when it begins; x is what that writes.
DEPENDENTS = gl.constexpr("griddepcontrol.launch_dependents; mov.u32 $0, $1;")
WAIT = gl.constexpr("griddepcontrol.wait; mov.u32 $0, $1;")

# Two words, one byte of each, as bfloat16. A byte stands for its number + 128: 128 + its lower seven bits, less 128
# where the eighth is set, or else 256.
BYTE = (
    " lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, t, 0x00800080, 0x43004300, 0xAE;"  # (~t & 80) | 43
    " sub.rn.bf16x2 $0, a, b; }"
)
BYTE_0 = gl.constexpr("{ .reg .b32 t, a, b; mov.b32 t, $1;" + BYTE)
BYTE_1 = gl.constexpr("{ .reg .b32 t, a, b; shr.u32 t, $1, 8;" + BYTE)
# A nibble stands for its number + 8; in the mantissa of 128 that makes 136 too much.
NIBBLE = (
    " lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; mov.b32 m, 0xC308C308; add.rn.bf16x2 t, t, m;"
    " mul.rn.bf16x2 $0, t, $2; }"
)
NIBBLE_0 = gl.constexpr("{ .reg .b32 t, m; mov.b32 t, $1;" + NIBBLE)
NIBBLE_1 = gl.constexpr("{ .reg .b32 t, m; shr.u32 t, $1, 4;" + NIBBLE)
NIBBLE_2 = gl.constexpr("{ .reg .b32 t, m; shr.u32 t, $1, 8;" + NIBBLE)
NIBBLE_3 = gl.constexpr("{ .reg .b32 t, m; shr.u32 t, $1, 12;" + NIBBLE)


@gluon.jit
def widened(words, factor, PART: gl.constexpr, KIND: gl.constexpr):
    """One part of each word in bfloat16; of nibbles times `factor`, the scales of their group."""
    if KIND == "int8":
        code: gl.constexpr = BYTE_0 if PART == 0 else BYTE_1
        return gl.inline_asm_elementwise(code, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        code: gl.constexpr = NIBBLE_0 if PART == 0 else NIBBLE_1 if PART == 1 else NIBBLE_2 if PART == 2 else NIBBLE_3
        return gl.inline_asm_elementwise(code, "=r,r,r", [words, factor], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def load_words(
    w_desc, weights, w_full, w_empty, row, unit, i,
    HALF_ROWS: gl.constexpr, AHEAD: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    slot = i % AHEAD
    mbarrier.wait(w_empty.index(slot), (i // AHEAD + 1) & 1)  # at the first round every slot is
    mbarrier.expect(w_full.index(slot), 2 * EACH * w_desc.block_type.nbytes)
    for j in gl.static_range(2 * EACH):
        begin = [row + j // EACH * HALF_ROWS, (unit * EACH + j % EACH) * WORDS]
        place = (j // EACH * AHEAD + slot) * EACH + j % EACH
        tma.async_copy_global_to_shared(w_desc, begin, w_full.index(slot), weights.index(place))


@gluon.jit
def load_units(
    w_desc, x_desc, weights, tokens, w_full, w_empty, x_full, x_empty, row, token, first, stop,
    HALF_ROWS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Brings the units first…stop-1: words of a unit at once, values of x in two steps. The first words do not wait
    for the kernel ahead of this one."""
    EACH: gl.constexpr = 2 if KIND == "int8" else 1  # tiles of the weight
    early = gl.minimum(stop, first + AHEAD)
    for unit in range(first, early):
        load_words(w_desc, weights, w_full, w_empty, row, unit, unit - first, HALF_ROWS, AHEAD, EACH)
    if PDL:
        gl.inline_asm_elementwise(WAIT, "=r,r", [first], dtype=gl.int32, is_pure=False, pack=1)
    for unit in range(first, stop):
        i = unit - first
        if i >= AHEAD:
            load_words(w_desc, weights, w_full, w_empty, row, unit, i, HALF_ROWS, AHEAD, EACH)
        for step in gl.static_range(2):
            place = (2 * i + step) % STAGES
            mbarrier.wait(x_empty.index(place), ((2 * i + step) // STAGES + 1) & 1)
            mbarrier.expect(x_full.index(place), 2 * x_desc.block_type.nbytes)
            for j in gl.static_range(2):
                column = unit * 128 + (step * 2 + j) * WORDS
                if KIND == "int4":  # a word has one value of each group of a span
                    column = unit // 4 * 512 + (step * 2 + j) * 128 + unit % 4 * WORDS
                begin, tile = [token, column], tokens.index(place * 2 + j)
                tma.async_copy_global_to_shared(x_desc, begin, x_full.index(place), tile)


@gluon.jit
def add_parts(
    acc, parts, arrived, tile, split, splits,
    HALF: gl.constexpr, HALF_ROWS: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Leaves this split's sums; the last to arrive adds them all up, in a fixed order, and sets the counter back."""
    SIZE: gl.constexpr = HALF_ROWS * TOKENS
    row = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))[None, :]
    # 8 x 8 numbers lie together, which a warp has in a register pair each
    place = (row // 8 * (TOKENS // 8) + token // 8) * 64 + row % 8 * 8 + token % 8
    tile = tile * 2 + HALF
    begin = parts + tile.to(gl.int64) * splits * SIZE
    gl.store(begin + split * SIZE + place, acc)
    gl.thread_barrier()  # every thread has stored before one of them says so
    last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
    if last:
        acc = gl.zeros([HALF_ROWS, TOKENS], gl.float32, layout=layout)
        for other in range(splits):
            acc += gl.load(begin + other * SIZE + place, cache_modifier=".cg")
        gl.store(arrived + tile, 0)
    return acc, last


@gluon.jit
def finish(
    acc, room, arrival, bias, scale, r_desc, out_desc, row, token, n, alpha,
    HALF_ROWS: gl.constexpr, KIND: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scale, bias and residual in float32, rounded once. The copy engine brings and takes rows [tokens, HALF_ROWS] by
    way of `room`: threads hold columns of them, two bytes that lie apart."""
    rows = row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
    if RESIDUAL:
        mbarrier.expect(arrival, r_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(r_desc, [token, row], arrival, room)
    if KIND == "int8":
        acc *= gl.load(scale + rows, mask=rows < n, other=0.0).to(gl.float32)[:, None]
    if BIAS:
        acc += gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)[:, None]
    if RESIDUAL:
        mbarrier.wait(arrival, 0)
        acc = acc * alpha + room.permute((1, 0)).load(layout).to(gl.float32)
        gl.thread_barrier()  # all have read it
    room.permute((1, 0)).store(acc.to(room.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [token, row], room)
    tma.store_wait(0)


@gluon.jit
def widened_pair(words, own, unit, groups, STEP: gl.constexpr, KIND: gl.constexpr):
    """Words [rows, WORDS] as the weights of two tiles of tokens. own: the scales of the rows' nibbles."""
    if KIND == "int8":
        return widened(words, words, 0, KIND), widened(words, words, 1, KIND)
    else:
        group = unit // 4 * 4 + STEP * 2
        some, _ = gl.broadcast(gl.load(own + gl.minimum(group, groups - 1))[:, None], words)
        others, _ = gl.broadcast(gl.load(own + gl.minimum(group + 1, groups - 1))[:, None], words)
        return widened(words, some, STEP * 2, KIND), widened(words, others, STEP * 2 + 1, KIND)


@gluon.jit
def multiply_units(
    weights, tokens, w_full, w_empty, x_full, x_empty, own, first, stop, groups,
    HALF_ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    HALF: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The sums of a warpgroup's rows. While a step's product runs, the weights of the next one are widened: into
    registers of their own, so two steps are a round, and between the product and a wait for a barrier, or the
    compiler would move it behind the wait for the product."""
    w_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    EACH: gl.constexpr = 2 if KIND == "int8" else 1
    acc = gl.full([HALF_ROWS, TOKENS], 0.0, gl.float32, layout=layout)
    mbarrier.wait(w_full.index(0), 0)
    words = weights.index(HALF * AHEAD * EACH).load(w_layout)
    more = weights.index(HALF * AHEAD * EACH + EACH - 1).load(w_layout)
    one, other = widened_pair(words, own, first, groups, 0, KIND)
    mbarrier.arrive(w_empty.index(0), count=1)
    mbarrier.wait(x_full.index(0), 0)
    for unit in range(first, stop):
        i = unit - first
        here, there, following = 2 * i % STAGES, (2 * i + 1) % STAGES, (2 * i + 2) % STAGES
        slot = (i + 1) % AHEAD
        flying = warpgroup_mma(one, tokens.index(here * 2).permute((1, 0)), acc, is_async=True)
        flying = warpgroup_mma(other, tokens.index(here * 2 + 1).permute((1, 0)), flying, is_async=True)
        third, fourth = widened_pair(more, own, unit, groups, 1, KIND)
        mbarrier.wait(x_full.index(there), ((2 * i + 1) // STAGES) & 1)
        # behind the last unit there is none: what is read then is multiplied with nothing
        mbarrier.wait(w_full.index(slot), ((i + 1) // AHEAD) & 1, pred=unit + 1 < stop)
        words = weights.index((HALF * AHEAD + slot) * EACH).load(w_layout)
        more = weights.index((HALF * AHEAD + slot) * EACH + EACH - 1).load(w_layout)
        acc, _, _, third, fourth = warpgroup_mma_wait(0, deps=(flying, one, other, third, fourth))
        mbarrier.arrive(x_empty.index(here), count=1)
        flying = warpgroup_mma(third, tokens.index(there * 2).permute((1, 0)), acc, is_async=True)
        flying = warpgroup_mma(fourth, tokens.index(there * 2 + 1).permute((1, 0)), flying, is_async=True)
        one, other = widened_pair(words, own, unit + 1, groups, 0, KIND)
        mbarrier.wait(x_full.index(following), ((2 * i + 2) // STAGES) & 1, pred=unit + 1 < stop)
        acc, _, _, one, other = warpgroup_mma_wait(0, deps=(flying, third, fourth, one, other))
        mbarrier.arrive(x_empty.index(there), count=1)
        mbarrier.arrive(w_empty.index(slot), count=1, pred=unit + 1 < stop)
    return acc


@gluon.jit
def multiply(
    weights, tokens, w_full, w_empty, x_full, x_empty, arrivals, scale, bias, r_desc, out_desc, parts, arrived,
    row, token, tile, split, splits, first, stop, n, groups, alpha,
    HALF_ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the first or the second half of a program's rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    row += HALF * HALF_ROWS
    rows = row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, w_layout))
    own = scale + gl.minimum(rows, n - 1) * groups
    acc = multiply_units(
        weights, tokens, w_full, w_empty, x_full, x_empty, own, first, stop, groups,
        HALF_ROWS, TOKENS, AHEAD, STAGES, KIND, HALF, layout,
    )  # fmt: skip
    last = True
    if splits > 1:
        acc, last = add_parts(acc, parts, arrived, tile, split, splits, HALF, HALF_ROWS, TOKENS, layout)
    if last:
        # where this warpgroup's words were, all of which it has read; each has FIT times the room
        FIT: gl.constexpr = AHEAD * (2 if KIND == "int8" else 1) * WORDS // TOKENS
        rooms = weights._reinterpret(out_desc.dtype, [2 * FIT, TOKENS, HALF_ROWS], out_desc.layout)
        finish(
            acc, rooms.index(HALF * FIT), arrivals.index(HALF), bias, scale, r_desc, out_desc, row, token, n, alpha,
            HALF_ROWS, KIND, BIAS, RESIDUAL, layout,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["units", "spread", "whole", "splits"])
def mixed_gemm_kernel(
    w_desc, x_desc, scale, bias, r_desc, out_desc, parts, arrived, n, units, groups, spread, whole, splits, alpha,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A tile a program, of the first `whole`; the depth of the others is shared by `splits` programs each. spread:
    tiles of the same rows, which follow each other, so that words come from memory once."""
    HALF_ROWS: gl.constexpr = ROWS // 2
    EACH: gl.constexpr = 2 if KIND == "int8" else 1
    if PDL:
        gl.inline_asm_elementwise(DEPENDENTS, "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)
    tile, split, share = gl.program_id(0), 0, 1
    if tile >= whole:
        split, tile, share = (tile - whole) % splits, whole + (tile - whole) // splits, splits
    row, token = tile // spread * ROWS, tile % spread * TOKENS
    first, stop = split * units // share, (split + 1) * units // share
    weights = gl.allocate_shared_memory(gl.int16, [2 * AHEAD * EACH, HALF_ROWS, WORDS], w_desc.layout)
    tokens = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, TOKENS, WORDS], x_desc.layout)
    w_full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrivals = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(AHEAD):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=2)  # both warpgroups have read it
    for i in gl.static_range(STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(arrivals.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (weights, tokens, w_full, w_empty, x_full, x_empty, arrivals, scale, bias, r_desc, out_desc,
                        parts, arrived, row, token, tile - whole, split, share, first, stop, n, groups, alpha,
                        HALF_ROWS, TOKENS, AHEAD, STAGES, KIND, BIAS, RESIDUAL, 0)),
            (multiply, (weights, tokens, w_full, w_empty, x_full, x_empty, arrivals, scale, bias, r_desc, out_desc,
                        parts, arrived, row, token, tile - whole, split, share, first, stop, n, groups, alpha,
                        HALF_ROWS, TOKENS, AHEAD, STAGES, KIND, BIAS, RESIDUAL, 1)),
            (load_units, (w_desc, x_desc, weights, tokens, w_full, w_empty, x_full, x_empty, row, token, first, stop,
                          HALF_ROWS, AHEAD, STAGES, KIND, PDL)),
        ],
        [4, 1],  # warps
        [240, 24],  # registers of a thread; what is left, 240 as well, is the first's
    )  # fmt: skip


def mixed_gemm(call: LinearCall) -> Tensor:
    """[tokens, n]: the product, with the bias; and with the residual, where nothing comes between."""
    x, weight, scale, residual = call.x, call.weight.view(torch.int16), call.scale, call.residual
    assert scale is not None
    n, kind, how = weight.shape[0], call.kind, sizes_for(x.shape[0], call.kind)
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    w_desc, x_desc = described(weight, how.rows // 2, 32), described(x, how.tokens, 32)
    out_desc = described(out, how.tokens, how.rows // 2)
    r_desc = out_desc if residual is None else described(residual, how.tokens, how.rows // 2)
    units, spread = triton.cdiv(weight.shape[1], 64 if kind == "int8" else 32), triton.cdiv(x.shape[0], how.tokens)
    tiles = triton.cdiv(n, how.rows) * spread
    whole, splits = shares(tiles, units, processors(x.device))
    rest = (tiles - whole) * (splits > 1)
    parts = torch.empty(max(1, rest * splits * how.rows * how.tokens), dtype=torch.float32, device=x.device)
    pdl = pdl_supported(x.device)
    mixed_gemm_kernel[(whole + (tiles - whole) * splits,)](
        w_desc, x_desc, scale, x if call.bias is None else call.bias, r_desc, out_desc, parts,
        counters(max(1, 2 * rest), x.device), n, units, scale.shape[-1] if kind == "int4" else 1, spread,
        whole, splits, call.alpha, ROWS=how.rows, TOKENS=how.tokens, AHEAD=how.ahead, STAGES=how.stages, KIND=kind,
        BIAS=call.bias is not None, RESIDUAL=residual is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For the copy engine, tiles of so many rows and columns."""
    dtype = gl.int16 if tensor.dtype is torch.int16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)
