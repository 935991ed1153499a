"""Random statements over the state of a module, drawn by hypothesis; eager says which of them are valid.

Every number is a small whole one and stays one (LIMIT), so that float32, bfloat16 and integers are exact in any order
of operations, and eager and compiled must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from state_programs import ARGUMENTS, LAYOUTS, STEPS, Program

LIMIT = 120  # int8 holds it, and bfloat16 every whole number up to 256
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8)


@dataclass
class Writer:
    """Writes a program line by line; `scope` holds what eager has by then, for shapes and for who shares memory."""

    draw: Callable[..., Any]
    program: Program
    scope: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scope = {"torch": torch, "self": self.program.module()}
        self.scope |= dict(zip(ARGUMENTS, self.program.caller().args(0), strict=True))

    def value(self, name: str) -> Tensor:
        return eval(name, self.scope)

    def names(self) -> list[str]:
        """Tensors to view, read and write; what the program made counts twice."""
        made = [name for name in self.scope if name.startswith("v")]
        return ["self.a", "p", "self.b", "q", *made, *made, "x"]

    def pick(self, values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, max(low, high)))

    def name(self) -> tuple[str, Tensor]:
        name = self.pick(self.names())
        return name, self.value(name)

    def add(self, line: str) -> None:
        """Keeps the line if eager can run it."""
        trial = dict(self.scope)
        try:
            exec(line, trial)
        except (RuntimeError, IndexError, ValueError):
            return
        if all(value.numel() for value in trial.values() if isinstance(value, Tensor)):
            self.scope = trial
            self.lines.append(line)

    def new(self, expression: str) -> None:
        self.add(f"v{len(self.lines)} = {expression}")

    def span(self, size: int) -> str:
        """`1:3`, `::2`, `:`."""
        first = self.number(0, size - 1)
        last = self.number(first + 1, size)
        return f"{first or ''}:{last if last < size else ''}{self.pick(['', '', ':2'])}"

    def spans(self, value: Tensor) -> str:
        """A part of some of the first dims."""
        return ", ".join(self.span(size) for size in value.shape[: self.number(1, value.dim())])

    def dim(self, value: Tensor, at_least: int = 1) -> int:
        """A dim with `at_least` places, counted from either end; one that is too small if there is none."""
        dims = [d for d in range(value.dim()) if value.shape[d] >= at_least] or [0]
        return self.pick(dims) - value.dim() * self.number(0, 1)

    def source(self, target: Tensor) -> str:
        """An expression of the target's shape. What shares memory with the target is copied or computed: eager does
        not promise in which order it would read and write."""
        name, value = self.name()
        shape, count = tuple(target.shape), prod(target.shape)
        text = name
        if tuple(value.shape) != shape and value.numel() >= count:
            first = self.number(0, value.numel() - count)
            text = f"{name}.flatten()[{first}:{first + count}].reshape({shape})"
        elif tuple(value.shape) != shape:
            text = f"{name}.sum().expand({shape})"
        if value.untyped_storage()._cdata == target.untyped_storage()._cdata:
            return self.pick([f"{text}.clone()", f"({text} + 1)", f"{text}.neg()"])
        return self.pick([text, text, f"{text}.clone()", f"({text} - 1)", f"{text}.abs()"])


def add_view(w: Writer) -> None:
    name, value = w.name()
    if not value.dim():
        return w.new(f"{name}.unsqueeze(0)")
    d, size = w.dim(value), value.shape[0]
    half = value.shape[d] // 2
    forms: list[Callable[[], str]] = [
        lambda: f"{name}[{w.spans(value)}]",
        lambda: f"{name}[{w.spans(value)}]",
        lambda: f"{name}[{w.number(-1, size - 1)}]",
        lambda: f"{name}.select({d}, {w.number(0, value.shape[d] - 1)})",
        lambda: f"{name}.transpose(0, -1)",
        lambda: f"{name}.narrow({d}, {half}, {value.shape[d] - half})",
        lambda: f"{name}.unsqueeze({d})",
        lambda: f"{name}[:1].squeeze(0)",
        lambda: f"{name}.reshape(-1)",
        lambda: f"{name}.reshape({size}, -1)",
        lambda: f"{name}.flatten()[{w.span(value.numel())}]",
        lambda: f"{name}[:1].expand({(2, *[-1] * (value.dim() - 1))})",
        lambda: f"{name}.split({max(1, size // 2)})[{w.number(0, 1)}]",
        lambda: f"{name}.chunk(2, {d})[-1]",
        lambda: f"{name}.unbind({d})[0]",
        lambda: f"{name}.contiguous()",
        lambda: f"{name}.diagonal(0, 0, -1)",
        lambda: name,
    ]
    return w.new(w.pick(forms)())


def add_read(w: Writer) -> None:
    name, value = w.name()
    forms: list[Callable[[], str]] = [
        lambda: f"{name}.clone()",
        lambda: f"{name}.clone()",
        lambda: f"{name} - {w.source(value)}",
        lambda: f"torch.maximum({name}, {w.source(value)})",
        lambda: f"torch.where({name} > 0, {w.source(value)}, {name})",
        lambda: f"{name}.neg()",
        lambda: f"{name}.sum(0).clamp(-9, 9)",
        lambda: f"{name}.to({w.program.dtype})",
        lambda: f"{name}.flip(0)",
        lambda: f"({name} + self.n).to({w.program.dtype})",
        lambda: f"{name}.index_select(0, at)",
        lambda: f"torch.cat(({name}, {w.source(value)}))[{w.span(2 * value.shape[0] if value.dim() else 1)}]",
        lambda: functional_write(w, name, value),
    ]
    w.new(w.pick(forms)())


def add_write(w: Writer) -> None:
    name, value = w.name()
    if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        return None  # one place for many elements: what eager leaves there is not defined
    if not value.dim():
        return w.add(f"{name}.add_({w.source(value)})")
    part = f"{name}[{w.spans(value)}]"
    d, source = w.dim(value, 3), w.source(value.narrow(0, 0, 1))
    forms: list[Callable[[], str]] = [
        lambda: f"{part} = {w.source(w.value(part))}",
        lambda: f"{part}.copy_({w.source(w.value(part))})",
        lambda: f"{part}.add_({w.source(w.value(part))})",
        lambda: f"{name}.copy_({w.source(value)})",
        lambda: f"{name}.sub_({w.source(value)})",
        lambda: f"{part}.neg_()",
        lambda: f"{part}.mul_({w.number(-2, 2)})",
        lambda: f"{part}.fill_({w.number(-3, 3)})",
        lambda: f"{name}.zero_()",
        lambda: f"{name}.masked_fill_({name} > 1, -1)",
        lambda: f"{name}.index_copy_({d}, at, {w.source(picked(value, d))})",
        lambda: f"{name}.index_add_({d}, at, {w.source(picked(value, d))})",
        lambda: f"{name}.index_fill_({d}, at, 3)",
        lambda: f"{name}[at] = {w.source(picked(value, 0))}",
        lambda: f"{name}.index_put_((at,), {w.source(picked(value, 0))}, accumulate={w.pick([True, False])})",
        lambda: f"{name}[:, at] = {w.source(picked(value, 1))}",
        lambda: f"{name}.scatter_({d}, {places(value, d)}, {w.source(picked(value, d))})",
        lambda: f"{name}.copy_(torch.roll({name}, {w.pick([1, -1])}, {d}))",
        lambda: f"{name}.copy_(torch.cat(({name}[1:], {source})))",
        lambda: f"{name}.copy_({functional_write(w, name, value)})",
        lambda: f"{name}.copy_({functional_write(w, name, value)})",
    ]
    return w.add(w.pick(forms)())


def add_state(w: Writer) -> None:
    """Buffers assigned anew, and the counter, also as a position."""
    buffer = w.pick(["self.a", "self.b"])
    value = w.value(buffer)
    forms: list[Callable[[], str]] = [
        lambda: f"{buffer} = {w.source(value)}.to({w.program.dtype}) - 1",
        lambda: f"{buffer} = {functional_write(w, buffer, value)}",
        lambda: "self.n += 1",
        lambda: "self.n.add_(1)",
        lambda: f"{buffer}.index_copy_(0, self.n % 3, {w.source(value[:1])})",
        lambda: f"{buffer}[self.n % 3] = {w.source(value[:1])}",
    ]
    w.add(w.pick(forms)())


def functional_write(w: Writer, name: str, value: Tensor) -> str:
    """A write that gives a new tensor and leaves `name` alone."""
    if not value.dim():
        return f"{name}.neg()"
    d = w.dim(value, 3)
    first = w.number(0, value.shape[d] - 1)
    forms: list[Callable[[], str]] = [
        lambda: f"torch.slice_scatter({name}, {w.source(value.narrow(d, first, 1))}, {d}, {first}, {first + 1})",
        lambda: f"torch.select_scatter({name}, {w.source(value.select(d, first))}, {d}, {first})",
        lambda: f"{name}.index_copy({d}, at, {w.source(picked(value, d))})",
        lambda: f"torch.index_put({name}, (at,), {w.source(picked(value, 0))})",
        lambda: f"{name}.scatter({d}, {places(value, d)}, {w.source(picked(value, d))})",
        lambda: f"{name}.index_add({d}, at, {w.source(picked(value, d))})",
    ]
    return w.pick(forms)()


def picked(value: Tensor, dim: int) -> Tensor:
    """As many places along `dim` as there are positions; the whole tensor where it has no such dim."""
    return value.narrow(dim, 0, min(2, value.shape[dim])) if dim < value.dim() else value


def places(value: Tensor, dim: int) -> str:
    """The positions as an index for scatter."""
    shape = [1] * value.dim()
    shape[dim] = 2
    return f"at.view({shape}).expand({tuple(picked(value, dim).shape)})"


KINDS = (add_view, add_view, add_view, add_read, add_read, add_write, add_write, add_write, add_write, add_state)


@st.composite
def programs(draw: Callable[..., Any], dtype: torch.dtype) -> Program:
    """A program that eager can run STEPS times without leaving the numbers that all dtypes hold."""
    empty = Program(("return None",), dtype, draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 99)))
    writer = Writer(draw, empty)
    for _ in range(draw(st.integers(2, 9))):
        draw(st.sampled_from(KINDS))(writer)
    names = [*writer.names(), "self.n"]
    returned = [draw(st.sampled_from(names)) for _ in range(draw(st.sampled_from((1, 2, 3, 2, 3, 0))))]
    writer.lines.append(f"return {', '.join(returned)}{',' if returned else 'None'}")
    return tame(replace(empty, lines=tuple(writer.lines)))


def tame(program: Program) -> Program:
    """Takes away lines that add, subtract or multiply in place, from the last, until all numbers stay small."""
    while not stays_small(program):
        grows = [i for i, line in enumerate(program.lines) if any(f"{name}(" in line for name in GROWING)]
        if not grows:
            return replace(program, lines=("return p + 1,",))
        program = replace(program, lines=tuple(line for i, line in enumerate(program.lines) if i != grows[-1]))
    return program


GROWING = ("add_", "sub_", "mul_", "index_put_")


def stays_small(program: Program) -> bool:
    """Runs line by line in eager and looks at every name after every line."""
    module, caller = program.module(), program.caller()
    for step in range(STEPS):
        scope = {"torch": torch, "self": module, **dict(zip(ARGUMENTS, caller.args(step), strict=True))}
        for line in program.lines[:-1]:
            exec(line, scope)
            values = [*module.buffers(), *(v for v in scope.values() if isinstance(v, Tensor))]
            if any(v.abs().amax() > LIMIT for v in values):
                return False
    return True
