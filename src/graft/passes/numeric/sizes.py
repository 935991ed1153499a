"""Sizes to try: what a graph leaves open (tokens, sequences) is one thing in a decode step and another in a prompt.

A replacement may be wrong for one token alone, above a tile, or at one odd number, so every number up to two tiles of
64 is tried where that is cheap; larger ones are a prime above any tile and a large number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from graft.base.errors import NumericCheckError
from graft.ir.evaluate import example_size
from graft.ir.nodes import leaves, val

Sizes = Mapping[str, int]  # what each symbol stands for; one that is missing is as in the example
RECORDED: Sizes = {}
SWEPT = 130  # two tiles of 64, and two more
SWEEP: Sequence[int] = range(1, SWEPT + 1)
SWEPT_OTHERS = 40  # of sizes before the last in a shape: sequences, where the last is tokens
ABOVE_TILES, LARGE = 257, 521  # primes: no tile divides them; 256 is the largest tile of any kernel here
SEVERAL, OF_SEVERAL = 3, 175  # sequences of a prompt each: more tokens together than one of a short context may have


def size_with(size: Any, node: Node, sizes: Sizes) -> int:
    """The size with the symbols as given."""
    if not isinstance(size, torch.SymInt) or not sizes or size.node.hint is None:
        return example_size(size, node)
    expression = size.node.expr
    if expression.is_Symbol and expression.name in sizes:  # nearly all of them
        return sizes[expression.name]
    free = expression.free_symbols
    known = {s: sympy.Integer(sizes[s.name] if s.name in sizes else example_of(s, size)) for s in free}
    found = expression.xreplace(known)
    if not found.is_Integer or found < 0:
        raise NumericCheckError(f"the size {size} has no value for {sizes_text(sizes)}")
    return int(found)


def example_of(symbol: Any, size: torch.SymInt) -> int:
    """torch 2.13 has another name for what 2.11 calls var_to_val."""
    environment = size.node.shape_env
    known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    return int(known[symbol])


def open_sizes(nodes: Iterable[Node], most: int | None) -> dict[str, int]:
    """The symbols in the shapes of these nodes, each with the largest value that it may have.

    most: of any of them."""
    found: dict[str, int] = {}
    for node in nodes:
        for value in leaves(val(node)):
            for size in (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
                if isinstance(size, torch.SymInt) and size.node.hint is not None:
                    for symbol in size.node.expr.free_symbols:
                        upper = size.node.shape_env.var_to_range[symbol].upper
                        bounds = [int(upper)] if upper.is_Integer else []  # else it is infinite
                        found[str(symbol)] = min([*bounds, *([most] if most else []), LARGE])
    return found


def needed_sizes(upper: Mapping[str, int]) -> list[Sizes]:
    """One token, two, an odd number, each size another one, one sequence and several."""
    names = list(upper)
    alike = [dict.fromkeys(names, count) for count in (1, 2)]
    apart = [{name: 3 + 2 * ((index + shift) % len(names)) for index, name in enumerate(names)} for shift in (0, 1)]
    return [sizes for sizes in distinct([*alike, *apart]) if fits(sizes, upper)]


def further_sizes(upper: Mapping[str, int]) -> list[Sizes]:
    """In the order of what they are worth: a prime above any tile and a large number, several prompts, then every one
    up to SWEPT."""
    last = list(upper)[-1:]
    several = dict.fromkeys(upper, SEVERAL) | dict.fromkeys(last, OF_SEVERAL)

    def alone(counts: Iterable[int]) -> list[Sizes]:
        """One size of so many, the others 1."""
        chosen = [(name, count) for count in counts for name in upper if name in last or count <= SWEPT_OTHERS]
        return [dict.fromkeys(upper, 1) | {name: count} for name, count in chosen]

    together = [several] if upper else []
    ordered = distinct([*alone((65, ABOVE_TILES, LARGE)), *together, *alone(SWEEP)])
    return [sizes for sizes in ordered if fits(sizes, upper)]


def distinct(ordered: Sequence[Sizes]) -> list[Sizes]:
    return list({tuple(sizes.items()): sizes for sizes in ordered}.values())


def fits(sizes: Sizes, upper: Mapping[str, int]) -> bool:
    return all(1 <= count <= upper[name] for name, count in sizes.items())


def sizes_text(sizes: Sizes) -> str:
    return "recorded sizes" if not sizes else "sizes " + " × ".join(str(count) for count in sizes.values())
