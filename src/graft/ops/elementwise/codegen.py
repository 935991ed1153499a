"""Triton source for an elementwise program: one 1-D loop, every value rounded to the dtype that it has in eager.

16-bit values are held as float32 between two operations, after a round trip through their own dtype; so a chain in
bfloat16 gives eager's bits wherever its functions do. Integers and booleans stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from graft.ops.elementwise.program import Argument, Call, Ref, parse
from graft.ops.elementwise.reference import value_dtypes

Kinds = tuple[tuple[torch.dtype, bool], ...]
Pattern = tuple[tuple[bool, ...], ...]
HELD = {torch.float32: "float32", torch.float16: "float32", torch.bfloat16: "float32"}
HELD |= {torch.int64: "int64", torch.int32: "int32", torch.bool: "int1"}
# Names on the right are helpers of triton.py or Triton's own; arguments are held values of the op's compute dtype.
TEMPLATES = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "div": "tl.div_rn({0}, {1})",
    "reciprocal": "tl.div_rn({1}, {0})",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "silu": "silu({0})",
    "gelu": "gelu({0})",
    "gelu_tanh": "gelu_tanh({0})",
    "softplus": "softplus({0})",
    "relu": "tl.where({0} < 0, {1}, {0})",
    "minimum": "minimum({0}, {1})",
    "maximum": "maximum({0}, {1})",
    "clamp_min": "tl.where({0} < {1}, {1}, {0})",
    "clamp_max": "tl.where({0} > {1}, {1}, {0})",
    "clamp": "clamp({0}, {1}, {2})",
    "where": "tl.where({0}, {1}, {2})",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "{0} == 0",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_not": "~{0}",
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
TEMPLATES |= {name: f"{{0}} {sign} {{1}}" for name, sign in COMPARISONS.items()}
BOOLEAN = {*COMPARISONS, "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"}
BOOLEAN |= {"where", "to"}
# A constant that the template takes after the op's own arguments.
EXTRA = {"reciprocal": 1, "relu": 0}


def triton_problem(text: str, kinds: Kinds) -> str | None:
    """Why no kernel can be generated, or None."""
    dtypes = value_dtypes(text, kinds)
    odd = next((dtype for dtype in (*dtypes, *(dtype for dtype, _ in kinds)) if dtype not in HELD), None)
    if odd is not None:
        return f"generated kernels compute in float32, int32, int64 and bool, not in {odd}"
    for call, dtype in zip(parse(text).calls, dtypes, strict=True):
        if dtype is torch.bool and call.op not in BOOLEAN:
            return f"{call.op} of booleans is not generated"
    return None


@lru_cache(maxsize=1024)
def triton_source(text: str, kinds: Kinds, pattern: Pattern) -> str:
    """The kernel of a program, for inputs of these dtypes (and 0-d or not) that walk these dims of the loop."""
    program, dtypes = parse(text), value_dtypes(text, kinds)
    rank = len(pattern[0])
    sizes = [f"n{d}" for d in range(rank)]
    strides = [f"s{i}_{d}" for i, dims in enumerate(pattern) for d, walked in enumerate(dims) if walked]
    pointers = [f"p{i}" for i in range(len(kinds))] + [f"o{i}" for i in range(len(program.returns))]
    names = {Ref("i", i): dtype for i, (dtype, _) in enumerate(kinds)}
    body = [*position(rank), *(load(i, dtype, pattern[i]) for i, (dtype, _) in enumerate(kinds))]
    for index, call in enumerate(program.calls):
        flat = {Ref("i", i) for i, (_, zero) in enumerate(kinds) if zero and rank}
        body.append(f"t{index} = {expression(call, names, dtypes[index], flat)}")
        names[Ref("t", index)] = dtypes[index]
    for place, index in enumerate(program.returns):
        value = f"tl.broadcast_to(t{index}, (BLOCK,)).to(o{place}.dtype.element_ty)"
        body.append(f"tl.store(o{place} + at, {value}, mask=mask)")
    head = ", ".join([*pointers, "count", *sizes[1:], *strides, "WIDE: tl.constexpr", "BLOCK: tl.constexpr"])
    lines = [f"# {text}", "@triton.jit", f"def elementwise_kernel({head}):", *(f"    {line}" for line in body)]
    return "\n".join(lines) + "\n"


def position(rank: int) -> list[str]:
    """`at`: the place in the results; `x0`… : the place along each dim of the loop, the last the fastest."""
    lines = [
        "block = tl.program_id(0)",
        "if WIDE:",
        "    block = block.to(tl.int64)",
        "at = block * BLOCK + tl.arange(0, BLOCK)",
        "mask = at < count",
    ]
    rest = "at"
    for dim in reversed(range(1, rank)):
        lines.append(f"x{dim} = {rest} % n{dim}")
        lines.append(f"r{dim} = {rest} // n{dim}")
        rest = f"r{dim}"
    return [*lines, f"x0 = {rest}"]


def load(index: int, dtype: torch.dtype, dims: Sequence[bool]) -> str:
    terms = [f"x{d} * s{index}_{d}" for d, walked in enumerate(dims) if walked]
    if not terms:
        return f"i{index} = tl.load(p{index}).to(tl.{HELD[dtype]})"
    return f"i{index} = tl.load(p{index} + {' + '.join(terms)}, mask=mask).to(tl.{HELD[dtype]})"


def expression(call: Call, names: dict[Ref, torch.dtype], result: torch.dtype, flat: set[Ref]) -> str:
    """The call's text: arguments brought to the dtype it computes in, the result rounded to its own."""
    compute = compute_dtype(call, names, result, flat)
    given: list[Any] = [*call.args, *([EXTRA[call.op]] if call.op in EXTRA else [])]
    if call.op == "div" and not isinstance(call.args[1], Ref):  # so does ATen on a GPU
        given[1] = float(torch.tensor(1.0).div(torch.tensor(given[1], dtype=torch.float32)).item())
        return rounded(f"{operand(call, given[0], names, compute)} * {literal(given[1], compute, False)}", result)
    if call.op == "to":
        return operand(call, given[0], names, compute)
    args = [operand(call, argument, names, compute) for argument in given]
    if call.op == "where":
        args[0] = str(given[0])
        if result is torch.bool:  # a number beside it makes it an integer
            return f"{TEMPLATES['where'].format(*args)} != 0"
    return rounded(TEMPLATES[call.op].format(*args), result)


def compute_dtype(call: Call, names: dict[Ref, torch.dtype], result: torch.dtype, flat: set[Ref]) -> torch.dtype:
    """What the operands are brought to: their common dtype for comparisons, a boolean for logic, else the result."""
    if call.op.startswith("logical"):
        return torch.bool
    if call.op not in COMPARISONS:
        return result
    examples: list[Any] = [example(a, names, flat) if isinstance(a, Ref) else a for a in call.args]
    common = torch.result_type(examples[0], examples[1])
    return torch.int32 if common is torch.bool else common  # one bit has no order that Triton and torch share


def example(ref: Ref, names: dict[Ref, torch.dtype], flat: set[Ref]) -> torch.Tensor:
    return torch.empty(() if ref in flat else (1,), dtype=names[ref], device="meta")


def operand(call: Call, argument: Argument, names: dict[Ref, torch.dtype], compute: torch.dtype) -> str:
    if isinstance(argument, Ref):
        return convert(str(argument), names[argument], compute)
    assert not isinstance(argument, torch.dtype)
    return literal(argument, compute, exact=call.op in COMPARISONS)


def convert(name: str, source: torch.dtype, target: torch.dtype) -> str:
    """A held value of `source` as a held value of `target`; where it is not one already."""
    if target is torch.bool and source is not torch.bool:
        return f"({name} != 0)"
    if HELD[source] == HELD[target]:
        text = name
    else:
        text = f"{name}.to(tl.{HELD[target]})"
    narrower = target.is_floating_point and target is not torch.float32 and source is not target
    return f"{text}.to(tl.{short(target)}).to(tl.float32)" if narrower else text


def rounded(text: str, dtype: torch.dtype) -> str:
    if dtype in (torch.float16, torch.bfloat16):
        return f"({text}).to(tl.{short(dtype)}).to(tl.float32)"
    return text


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def literal(value: bool | int | float, dtype: torch.dtype, exact: bool) -> str:
    """A number in the op's dtype. Arithmetic takes it in float32, comparisons rounded to the tensors' dtype."""
    if dtype is torch.bool:
        return str(int(bool(value)))
    if not dtype.is_floating_point:
        return str(int(value))
    number = float(torch.tensor(value, dtype=dtype if exact else torch.float32).item())
    return f'float("{number}")' if number != number or number in (float("inf"), float("-inf")) else f"({number!r})"
