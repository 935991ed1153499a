"""The tensor-core instruction of int4_gemm.py on words in registers, and what it does in words of Triton (not FAST,
for the interpreter)."""

from __future__ import annotations

import triton
import triton.language as tl

MINUS_136 = tl.constexpr(0xC308C308 - (1 << 32))  # twice, in bfloat16
MULTIPLY_REGISTERS = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f")
SCALE_REGISTERS = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f,f,f,f,f")


def mma(result: str, rows: str, tokens: str, before: str) -> str:
    name = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    return f"{name} {{{result}}}, {{{rows}}}, {{{tokens}}}, {{{before}}}; "


# $4…7: words of row g; $8…11: of row g + 8; $12…15: of the token; $16…19: what is added to
TWICE = tl.constexpr(
    "{ .reg .f32 t<4>; "
    + mma("t0, t1, t2, t3", "$4, $8, $5, $9", "$12, $13", "$16, $17, $18, $19")
    + mma("$0, $1, $2, $3", "$6, $10, $7, $11", "$14, $15", "t0, t1, t2, t3")
    + "}"
)


def scaled(group: int) -> str:
    """$4…7, $8…11: scales of both rows, two groups a word; $12…15: products; $16…19: what is added to; $22, $23: of
    both tokens, what is taken off the products."""
    word = group // 2
    take = "and.b32 {}, {}, 0xFFFF0000; " if group % 2 else "shl.b32 {}, {}, 16; "
    text = "{ .reg .b32 p, q; .reg .f32 t<4>; " + take.format("p", f"${4 + word}") + take.format("q", f"${8 + word}")
    text += "".join(f"add.f32 t{i}, ${12 + i}, ${22 + i % 2}; " for i in range(4))
    return text + "".join(f"fma.rn.f32 ${i}, t{i}, {'p' if i < 2 else 'q'}, ${16 + i}; " for i in range(4)) + "}"


SCALED = tl.constexpr(tuple(scaled(group) for group in range(8)))


@triton.jit
def multiply(low, high, tokens, acc, FAST: tl.constexpr):
    """acc plus rows g (`low`) and g + 8 (`high`) times the tokens, all [32 W, 4]: two instructions."""
    if FAST:
        return tl.inline_asm_elementwise(
            TWICE, MULTIPLY_REGISTERS, [low, high, tokens, acc], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        both = tl.join(rows_by_tokens(low, tokens), rows_by_tokens(high, tokens))  # [32 W, token, row]
        return acc + tl.reshape(tl.permute(both, [0, 2, 1]), acc.shape)


@triton.jit
def rows_by_tokens(rows, tokens):
    """Words of row g and of token g → products of row g with tokens 2 c and 2 c + 1, [32 W, 2]."""
    WARPS: tl.constexpr = rows.shape[0] // 32
    low, high = values_of(rows)
    x_low, x_high = values_of(tokens)
    low = tl.reshape(low, [WARPS, 8, 1, 16]) * tl.reshape(x_low, [WARPS, 1, 8, 16])
    high = tl.reshape(high, [WARPS, 8, 1, 16]) * tl.reshape(x_high, [WARPS, 1, 8, 16])
    return tl.reshape(tl.sum(low + high, axis=3), [32 * WARPS, 2])


# a part of two words of 4-bit weights as two bfloat16 values, 136 too much; else `and` and `or` stay two
NIBBLES = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t; shr.u32 t, $1, {4 * part}; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }}"
        for part in range(4)
    )
)


@triton.jit
def nibbles_of(words, PART: tl.constexpr, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(NIBBLES[PART], "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return ((words >> (4 * PART)) & 0x000F000F) | 0x43004300


@triton.jit
def values_of(words):
    """Both bfloat16 values of each word, in float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def add_scaled(y, acc, taken, scales, GROUP: tl.constexpr, FAST: tl.constexpr):
    """y plus acc, less what is taken off (its last two), times the scales of one of 8 groups; all [32 W, 4]."""
    if FAST:
        return tl.inline_asm_elementwise(
            SCALED[GROUP], SCALE_REGISTERS, [scales[0], scales[1], acc, y, taken], dtype=tl.float32, is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        at = tl.arange(0, 4)[None, :]
        low, high = values_of(one_of(scales[0], GROUP // 2))
        low_up, high_up = values_of(one_of(scales[1], GROUP // 2))
        factor = tl.where(at < 2, high if GROUP % 2 else low, high_up if GROUP % 2 else low_up)
        return y + (acc + tl.where(at % 2 == 0, one_of(taken, 2), one_of(taken, 3))) * factor


@triton.jit
def one_of(values, at: tl.constexpr):
    """Column `at`, [32 W, 1]."""
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == at, values, 0), axis=1)[:, None]


@triton.jit
def weigh(x, norm, FAST: tl.constexpr):
    """Words of x times words of the norm's weight, each product rounded once to bfloat16."""
    if FAST:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, norm], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low, high = values_of(x)
        norm_low, norm_high = values_of(norm)
        low = (low * norm_low).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        high = (high * norm_high).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        return (high << 16) | low
