"""The words of patterns: what a plain function cannot say by itself.

    def gated(x, weight, bias=None):
        y = one_of(lambda: F.linear(x, weight, bias), lambda: F.linear(x, weight) + bias)
        gate, up = y.chunk(2, -1)
        return choice("activation", silu=lambda: F.silu(gate), gelu=lambda: F.gelu(gate)) * up

    def gated_fused(x, weight, bias, activation: str): ...

A pattern with words stands for several straight ones, its variants: it runs once for every way to decide its words,
all in one trace. Each variant is in normal form by itself, so words and spelled-out lists of patterns find the same.
Run outside a trace, every word takes its first alternative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from graft.base.errors import PatternError


@dataclass
class Path:
    """How the words of a pattern are decided in one run (the first alternative where it ends), and what they said."""

    decisions: tuple[int, ...] = ()
    widths: list[int] = field(default_factory=list)  # how many alternatives each word had
    chosen: dict[str, str] = field(default_factory=dict)
    constants: list[torch.Tensor] = field(default_factory=list)
    constant_inputs: tuple[int, ...] = ()  # the positions of those among the inputs of the trace
    found: bool = False  # the run is for a match: lists are as long as the graph has them

    @property
    def whole(self) -> tuple[int, ...]:
        """A decision for every word that was met."""
        return (*self.decisions, *[0] * (len(self.widths) - len(self.decisions)))

    def following(self) -> tuple[int, ...] | None:
        """The decisions of the next run: the last word that has another alternative takes it."""
        whole = self.whole
        last = next((i for i in reversed(range(len(whole))) if whole[i] + 1 < self.widths[i]), None)
        return None if last is None else (*whole[:last], whole[last] + 1)


_path: ContextVar[Path | None] = ContextVar("path", default=None)


@contextmanager
def deciding(path: Path) -> Iterator[Path]:
    """Within it, words are decided by `path` and leave what they say there."""
    token = _path.set(path)
    try:
        yield path
    finally:
        _path.reset(token)


def decide(width: int) -> int:
    path = _path.get()
    if path is None:
        return 0
    index = len(path.widths)
    path.widths.append(width)
    return path.decisions[index] if index < len(path.decisions) else 0


def one_of(*spellings: Callable[[], Any]) -> Any:
    """Any of several spellings of one thing; which of them, the replacement need not know.

        root = one_of(lambda: torch.rsqrt(v), lambda: 1 / torch.sqrt(v))

    They are tried in order. An argument that only one of them reads needs a default, which it has in a match of
    another.
    """
    if not spellings:
        raise PatternError("one_of needs at least one spelling, as a function without arguments")
    return spellings[decide(len(spellings))]()


def choice(name: str, **alternatives: Callable[[], Any]) -> Any:
    """Different things that one replacement covers: it takes the name of the one found as its argument `name`.

    a = choice("activation", silu=lambda: F.silu(gate), gelu=lambda: F.gelu(gate))     # in the pattern
    def fused(gate, up, activation: str): return torch.ops.graft.swiglu(gate, up, activation)
    """
    if not alternatives:
        raise PatternError(f"the choice {name!r} needs at least one alternative, as name=function")
    picked, part = list(alternatives.items())[decide(len(alternatives))]
    path = _path.get()
    if path is not None and path.chosen.setdefault(name, picked) != picked:
        raise PatternError(f"the choice {name!r} is made twice; keep its result, or give the second another name")
    return part()


def optional(part: Callable[[], Any], otherwise: Any = None) -> Any:
    """A part that may be missing; `otherwise` stands there then.

        y = optional(lambda: y * scale, y)         # scale: float = 1.0, which a match without it has
        return normed, optional(lambda: total)     # a result that nobody may read

    With the part is tried first. An optional argument of an op needs no word: annotate it `Tensor | None`.
    """
    return one_of(part, lambda: otherwise)


def repeated(*lists: Sequence[Any]) -> Iterator[Any]:
    """A part for each item of arguments that are lists, as often as the graph has it: the longest that fits.

        def projections(x, weights: list[Tensor], biases: list[Tensor | None]):
            return tuple(F.linear(x, w, b) for w, b in repeated(weights, biases))

    Shapes say how often at most: {"weights": "n d *3", "biases": "n *3"}. The replacement gets lists as long as the
    graph has parts, and goes over them with a plain `for`.
    """
    most = min(len(items) for items in lists)
    left_out, path = decide(most), _path.get()
    count = most if path is not None and path.found else most - left_out
    return iter(lists[0][:count] if len(lists) == 1 else list(zip(*lists, strict=False))[:count])


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """An argument that must be a parameter or buffer of the module: nothing that the graph computes fits.

    y = F.linear(x, constant(weight))
    """
    path = _path.get()
    if path is not None:
        path.constants.append(tensor)
    return tensor
