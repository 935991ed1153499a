"""The kernels of fused_linear with their sizes, and the shapes of GEMMs that they are chosen for."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Matvec:
    """`rows` of the weight a program."""

    rows: int = 1
    warps: int = 4


@dataclass(frozen=True)
class Gemm:
    """A block of rows, tokens and depth a program; `splits` programs share the depth of one. `early` blocks of the
    weight are fetched before the wait; `norm_inside`: or in a kernel of its own, before."""

    rows: int = 64
    tokens: int = 16
    depth: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    early: int = 0
    norm_inside: bool = False


@dataclass(frozen=True)
class BalancedGemm:
    """All tokens and `rows` of the weight a program, any multiple of 16 up to 496; the rest as for Gemm. Plain
    weights; a norm goes before, in a kernel of its own."""

    rows: int = 112
    tokens: int = 64
    depth: int = 64
    splits: int = 1
    warps: int = 4
    stages: int = 4
    early: int = 0


@dataclass(frozen=True)
class Int4Gemm:
    """4-bit weights, up to 8 tokens in bfloat16, 16 rows of the weight at once. `warps` share the depth; a thread has
    `ahead` pieces of 16 bytes of two rows on their way, and 8 / ahead warps share a span. each: programs a
    multiprocessor, which walk over the rows; 0: one for every 16 rows. registers: at most so many a thread; 0: as
    many as the compiler takes."""

    warps: int = 4
    ahead: int = 8
    each: int = 0
    registers: int = 0


@dataclass(frozen=True)
class IntegerGemm:
    """int8 and int4 weights times rows of x in two rows of int8, a block of rows and tokens a program; `depth` of
    int8 at a time, of int4 a span. The rest as for Gemm; a norm goes before, into the rounding of x."""

    rows: int = 64
    tokens: int = 64
    depth: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 3
    early: int = 0


# None: torch's own GEMM, or for quantized weights the default of a tensor-core kernel
How = Matvec | Gemm | BalancedGemm | Int4Gemm | IntegerGemm | None
KINDS: dict[str, type[Matvec] | type[Gemm] | type[BalancedGemm] | type[Int4Gemm] | type[IntegerGemm]] = {
    "matvec": Matvec,
    "gemm": Gemm,
    "balanced_gemm": BalancedGemm,
    "int4_gemm": Int4Gemm,
    "integer_gemm": IntegerGemm,
}
EXTRAS = ("early", "norm_inside", "each", "registers")  # not shown where they have their defaults
WEIGHTS = ("plain", "int8", "fp8", "int4")
INTEGERS = ("int8", "int4")
# Tokens from which torch's GEMM is quicker, with the weights widened for it before (dequantize.py), once for all of
# them. By its own times and 4.2 TB/s (8B, H200): of 4-bit weights qkv 41 us instead of 61 for 256 tokens, 35 and 38
# for 128; of 8 bits gate-up 704 and 774 for 2,048, 396 and 387 for 1,024.
WIDENED_FROM = {"int4": 129, "int8": 2048}
# Tokens for which weights widened ahead of Hopper's tensor cores (mixed_gemm.py) are quicker than integers, and than
# weights widened before. All four shapes of 8B on an H200, us, integers and mixed: int8 of 32, 48, 64, 96, 128 and
# 256 tokens 92 and 114, 138 and 115, 100 and 115, 253 and 147, 144 and 145, 244 and 223; int4 of 32, 64 and 128
# 99 and 125, 167 and 126, 282 and 146. Widened before and mixed, 2,048 and 4,096 tokens: int8 1,413 and 1,339,
# 2,751 and 2,759; int4 1,407 and 1,351, 2,767 and 2,975.
MIXED = {"int4": frozenset(range(33, 2049)), "int8": frozenset(range(33, 2049)) - {64}}
MOST_INT4_GEMM_TOKENS = 8  # columns of its instruction
INT4_GEMM_DEPTH = 1024  # weights of a row, whose scales are 16 bytes
MOST_MATVEC_TOKENS = 4  # each has an accumulator of its own; beyond that tensor cores are faster
KEY = re.compile(rf"({'|'.join(WEIGHTS)}) ([1-9]\d*)x([1-9]\d*)( gated)?( norm)?", re.ASCII)


@dataclass(frozen=True)
class LinearShape:
    """What a choice depends on beside the tokens. n: rows of the result."""

    n: int
    k: int
    format: str  # plain, int8, fp8, int4
    gated: bool
    norm: bool

    def key(self) -> str:
        return f"{self.format} {self.n}x{self.k}{' gated' * self.gated}{' norm' * self.norm}"

    @staticmethod
    def parse(key: str) -> LinearShape | None:
        found = KEY.fullmatch(key)
        if found is None:
            return None
        format, n, k, gated, norm = found.groups()
        return LinearShape(int(n), int(k), format, gated is not None, norm is not None)

    def distance(self, other: LinearShape) -> float:
        """How unlike two shapes are: factors between sizes, and much for what is not the same kind."""
        apart = abs(math.log2(self.n / other.n)) + abs(math.log2(self.k / other.k))
        return (
            apart + 100 * (self.format != other.format) + 10 * (self.gated != other.gated) + (self.norm != other.norm)
        )


def count_text(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens != 1)}"


def how_text(how: How, format: str = "plain") -> str:
    """`matvec(rows=2, warps=4)`, `library`, `default`."""
    if how is None:
        return kind_of(how, format)
    usual = type(how)()
    options = {k: v for k, v in asdict(how).items() if k not in EXTRAS or v != getattr(usual, k)}
    return f"{kind_of(how, format)}({', '.join(f'{key}={value}' for key, value in options.items())})"


def kind_of(how: How, format: str) -> str:
    if how is None:
        return "library" if format == "plain" else "default"
    return next(name for name, cls in KINDS.items() if isinstance(how, cls))


def how_problem(how: How, shape: LinearShape, tokens: int) -> str | None:
    """Why a kernel cannot run this many tokens of a shape, or None."""
    if isinstance(how, BalancedGemm):
        if shape.format != "plain":
            return f"balanced_gemm takes plain weights, not {shape.format}"
        return (
            None
            if how.rows % 16 == 0 and how.rows < 512
            else f"balanced_gemm takes 16, 32 … 496 rows, not {how.rows}"
        )
    if isinstance(how, Int4Gemm):
        return int4_gemm_problem(how, shape, tokens)
    if isinstance(how, IntegerGemm):
        return None if shape.format in INTEGERS else f"integer_gemm takes int8 and int4 weights, not {shape.format}"
    if not isinstance(how, Matvec):
        return None
    if tokens > MOST_MATVEC_TOKENS:
        return f"matvec takes up to {MOST_MATVEC_TOKENS} tokens"
    cut = shape.format == "plain" and shape.k % 8
    return f"matvec needs a depth that is a multiple of 8, not {shape.k}" if cut else None


def int4_gemm_problem(how: Int4Gemm, shape: LinearShape, tokens: int) -> str | None:
    if shape.format != "int4":
        return f"int4_gemm takes int4 weights, not {shape.format}"
    if tokens > MOST_INT4_GEMM_TOKENS:
        return f"int4_gemm takes up to {MOST_INT4_GEMM_TOKENS} tokens"
    if shape.k % INT4_GEMM_DEPTH:
        return f"int4_gemm needs a depth that is a multiple of {INT4_GEMM_DEPTH}, not {shape.k}"
    if how.ahead not in (2, 4, 8) or how.warps not in (1, 2, 4, 8, 16) or how.warps * how.ahead < 8:
        return f"int4_gemm takes 2, 4 or 8 ahead and 8 / ahead … 16 warps, not {how.ahead} and {how.warps}"
    whole = how.warps * how.ahead * (INT4_GEMM_DEPTH // 8)
    return f"int4_gemm walks over rows of up to {whole}, not {shape.k}" if how.each and shape.k > whole else None
