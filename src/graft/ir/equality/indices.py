"""Which element of its source an element of a view is: indices as polynomials of loop variables and sizes.

    permute([b, h, s, d] → [b, s, h, d])      (i0, i1, i2, i3) reads (i0, i2, i1, i3)
    reshape([b, s, 32] → [b, s, 4, 8])        (i0, i1, i2, i3) reads (i0, i1, 8·i2 + i3)

A variable runs from 0 to below its extent; sizes and their symbols are whole numbers above 0 (an empty tensor has no
elements to differ in). A quotient or remainder that these facts do not settle stays as it is written, and equals only
itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

Expr = Any  # of sympy, whose operators have no types
Index = tuple[Expr, ...]
Extents = Mapping[Any, Expr]
QUOTIENT, REMAINDER = sympy.Function("quotient"), sympy.Function("remainder")


def expression(size: Any) -> Expr:
    """A product of numbers and symbols as it is; of any other (a sum) it is only known that it equals itself."""
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(int(size))
    found = sympy.expand(size.node.expr)
    factor, term = found.as_coeff_Mul()
    plain = factor.is_Integer and factor >= 0 and is_monomial(term)
    return found if plain else sympy.Symbol(f"size {found}", integer=True, positive=True)


def sizes_of(shape: Sequence[Any]) -> Index:
    return tuple(expression(size) for size in shape)


def variables(shape: Index) -> tuple[Index, Extents]:
    """One for each dim, and how far each runs; a dim of size 1 has the index 0."""
    names = [sympy.Symbol(f"i{dim}", integer=True, nonnegative=True) for dim in range(len(shape))]
    index = tuple(sympy.Integer(0) if size == 1 else name for name, size in zip(names, shape, strict=True))
    return index, dict(zip(names, shape, strict=True))


def reshaped(index: Index, given: Index, source: Index, extents: Extents) -> Index:
    """index: into a tensor of sizes `given`; what it is in one of sizes `source` with the same elements in order."""
    found: list[Expr] = []
    for ours, theirs, at in groups(index, given, source):
        position = sympy.expand(sum((i * rest for i, rest in zip(at, strides(ours), strict=True)), sympy.Integer(0)))
        position = rejoined(position)
        for dim, (size, rest) in enumerate(zip(theirs, strides(theirs), strict=True)):
            quotient = divided(position, rest, extents)
            found.append(quotient if dim == 0 else remainder(quotient, size, extents))
    return tuple(sympy.Integer(0) if size == 1 else i for i, size in zip(found, source, strict=True))


def rejoined(value: Expr) -> Expr:
    """b · quotient(e, b) + remainder(e, b) is e: what was taken apart is put together again."""
    parts: list[Expr] = sorted(value.atoms(REMAINDER), key=str)
    for part in parts:
        whole, by = part.args
        inner, step = whole.args if whole.func is QUOTIENT else (whole, 1)
        quotient = QUOTIENT(inner, step * by)
        factor = value.coeff(part)
        if factor != 0 and sympy.expand(value.coeff(quotient) - factor * by) == 0:
            value = sympy.expand(value - factor * by * quotient - factor * part + factor * whole)
    return value


def groups(index: Index, given: Index, source: Index) -> Iterator[tuple[Index, Index, Index]]:
    """Runs of dims that hold the same number of elements on both sides, as short as they come."""
    g = s = 0
    while g < len(given) or s < len(source):
        first, second = g, s
        g, s = min(g + 1, len(given)), min(s + 1, len(source))
        while volume(given[first:g]) != volume(source[second:s]):
            if g == len(given) and s == len(source):
                break  # the last run takes what is left
            left, right = volume(given[first:g]), volume(source[second:s])
            grows_given = s == len(source) or (g < len(given) and is_below(left, right))
            g, s = (g + 1, s) if grows_given else (g, s + 1)
        yield given[first:g], source[second:s], index[first:g]


def is_below(left: Expr, right: Expr) -> bool:
    """Which of two runs grows: any answer is right, this one finds short runs."""
    return never_negative(sympy.expand(right - left))


def volume(sizes: Index) -> Expr:
    return sympy.expand(sympy.prod(sizes))


def strides(sizes: Index) -> list[Expr]:
    return [volume(sizes[dim + 1 :]) for dim in range(len(sizes))]


def divided(value: Expr, by: Expr, extents: Extents) -> Expr:
    if by == 1:
        return value
    whole, rest = parted(value, by)
    return whole if lies_below(rest, by, extents) else QUOTIENT(value, by)


def remainder(value: Expr, by: Expr, extents: Extents) -> Expr:
    if by == 1:
        return sympy.Integer(0)
    _, rest = parted(value, by)
    return rest if lies_below(rest, by, extents) else REMAINDER(value, by)


def parted(value: Expr, by: Expr) -> tuple[Expr, Expr]:
    """value = whole · by + rest, term by term."""
    whole: Expr = sympy.Integer(0)
    rest: Expr = sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(value)):
        quotient = sympy.cancel(term / by)
        if sympy.denom(quotient) == 1:
            whole += quotient
        else:
            rest += term
    return sympy.expand(whole), sympy.expand(rest)


def lies_below(value: Expr, bound: Expr, extents: Extents) -> bool:
    """Whether 0 ≤ value < bound for every value of the variables."""
    if value == 0:
        return True
    if not nonnegative_terms(value) or value.atoms(QUOTIENT, REMAINDER):
        return False
    largest = value.xreplace({name: size - 1 for name, size in extents.items()})
    return never_negative(sympy.expand(bound - 1 - largest))


def nonnegative_terms(value: Expr) -> bool:
    """Sums of products of sizes and variables: then the largest variables give the largest value."""
    terms = sympy.expand(value).as_coefficients_dict()
    return all(factor >= 0 and is_monomial(term) for term, factor in terms.items())


def is_monomial(term: Expr) -> bool:
    powers = term.as_powers_dict().items()
    return all(base == 1 or (base.is_Symbol and power.is_Integer and power > 0) for base, power in powers)


def never_negative(value: Expr) -> bool:
    """For all sizes of 1 and more: written in sizes less one, no coefficient is negative."""
    shifted = sympy.expand(value.xreplace({name: name + 1 for name in value.free_symbols}))
    return nonnegative_terms(shifted)
