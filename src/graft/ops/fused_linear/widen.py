"""16-bit words of quantized weights as numbers: in float32 for matvec, in the dtype of x for tensor cores.

A word holds two 8-bit or four 4-bit weights (packing.py), its parts. On a GPU a part costs about one instruction:
laid into the mantissa of a power of 2 it makes that power plus itself, and what is too much is taken off the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graft.weights.packing import GROUP, RUN

RUN_8, RUN_4 = tl.constexpr(RUN), tl.constexpr(GROUP)

# Two words: parts 0 of both, then parts 1. A byte stands for its number + 128; in the mantissa of 32768 that makes
# 32896 too much.
BYTES = tl.constexpr(
    "prmt.b32 $0, $4, 0x47000000, 0x7404; prmt.b32 $1, $4, 0x47000000, 0x7424;"
    " prmt.b32 $2, $4, 0x47000000, 0x7414; prmt.b32 $3, $4, 0x47000000, 0x7434;"
)
FLOATS = tl.constexpr(
    "{ .reg .b16 a, b, c, d; .reg .b32 p, q; mov.b32 {a, b}, $4;"
    " cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; mov.b32 {a, b}, p; mov.b32 {c, d}, q;"
    " cvt.f32.f16 $0, a; cvt.f32.f16 $1, c; cvt.f32.f16 $2, b; cvt.f32.f16 $3, d; }"
)
# A nibble stands for its number + 8; in the mantissa of 128 that makes 136 too much.
NIBBLES = tl.constexpr(
    "{ .reg .b32 u, v; and.b32 u, $8, 0x0F0F0F0F; shr.u32 v, $8, 4; and.b32 v, v, 0x0F0F0F0F;"
    " prmt.b32 $0, u, 0x43000000, 0x7044; prmt.b32 $1, u, 0x43000000, 0x7244;"
    " prmt.b32 $2, v, 0x43000000, 0x7044; prmt.b32 $3, v, 0x43000000, 0x7244;"
    " prmt.b32 $4, u, 0x43000000, 0x7144; prmt.b32 $5, u, 0x43000000, 0x7344;"
    " prmt.b32 $6, v, 0x43000000, 0x7144; prmt.b32 $7, v, 0x43000000, 0x7344; }"
)
# Two bfloat16 values: the upper halves of two floats. Triton takes the second apart first, an instruction more.
HALVES = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
TOO_MUCH = {"int8": 32896.0, "int4": 136.0}
PARTS = {"plain": 1, "int8": 2, "fp8": 2, "int4": 4}

# One part of two words as two bfloat16 values: 136 is taken off at once, exactly.
NIBBLE = "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; mov.b32 m, 0xC308C308; add.rn.bf16x2 $0, t, m; }"
NIBBLE_0 = tl.constexpr("{ .reg .b32 t, m; mov.b32 t, $1; " + NIBBLE)
NIBBLE_1 = tl.constexpr("{ .reg .b32 t, m; shr.u32 t, $1, 4; " + NIBBLE)
NIBBLE_2 = tl.constexpr("{ .reg .b32 t, m; shr.u32 t, $1, 8; " + NIBBLE)
NIBBLE_3 = tl.constexpr("{ .reg .b32 t, m; shr.u32 t, $1, 12; " + NIBBLE)


@triton.jit
def columns_of(first, lane, PART: tl.constexpr, KIND: tl.constexpr):
    """The values of x that part PART of the words first + lane is multiplied with."""
    word = first + lane
    if KIND == "plain":
        return word
    elif KIND == "int4":
        return word // RUN_4 * (4 * RUN_4) + PART * RUN_4 + word % RUN_4
    else:
        return word // RUN_8 * (2 * RUN_8) + PART * RUN_8 + word % RUN_8


@triton.jit
def take_part(words, PART: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr):
    """One part of each word, in `dtype`."""
    if KIND == "int4":
        return (((words.to(tl.int32) >> (4 * PART)) & 0xF) - 8).to(dtype)
    elif KIND == "int8":
        return ((words >> (8 * PART)) ^ 0x80).to(tl.int8).to(dtype)
    elif KIND == "fp8":
        return (words >> (8 * PART)).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return words.to(dtype)


@triton.jit
def take_pair(words, PART: tl.constexpr):
    """One part of 4-bit words in bfloat16, two words at a time."""
    if PART == 0:
        q = tl.inline_asm_elementwise(NIBBLE_0, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PART == 1:
        q = tl.inline_asm_elementwise(NIBBLE_1, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PART == 2:
        q = tl.inline_asm_elementwise(NIBBLE_2, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        q = tl.inline_asm_elementwise(NIBBLE_3, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return q


@triton.jit
def as_float(x, FAST: tl.constexpr):
    if FAST and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(HALVES, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return x.to(tl.float32)


@triton.jit
def widen(w, KIND: tl.constexpr, FAST: tl.constexpr):
    """All parts of the words in float32; FAST: too large by TOO_MUCH."""
    if KIND == "plain":
        return (as_float(w, FAST),)
    elif not FAST:
        if KIND == "int4":
            return (
                take_part(w, 0, tl.float32, KIND),
                take_part(w, 1, tl.float32, KIND),
                take_part(w, 2, tl.float32, KIND),
                take_part(w, 3, tl.float32, KIND),
            )
        else:
            return take_part(w, 0, tl.float32, KIND), take_part(w, 1, tl.float32, KIND)
    elif KIND == "int4":
        return tl.inline_asm_elementwise(
            NIBBLES,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [w],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=2,
        )
    elif KIND == "int8":
        return tl.inline_asm_elementwise(
            BYTES, "=f,=f,=f,=f,r", [w], dtype=(tl.float32, tl.float32), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            FLOATS, "=f,=f,=f,=f,r", [w], dtype=(tl.float32, tl.float32), is_pure=True, pack=2
        )
