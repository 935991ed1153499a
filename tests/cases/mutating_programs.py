"""Random programs that write in place: mutating custom ops, ATen writes, views, clones, returned aliases."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@torch.library.custom_op("fuzz::scale_", mutates_args=("x",))
def scale_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("fuzz::blend_", mutates_args=("x",))
def blend_(x: Tensor, y: Tensor) -> Tensor:
    """Reads y after it wrote x, so that a y in the memory of x shows."""
    x.mul_(0.5)
    x.add_(y)
    return x.sum()


@torch.library.custom_op("fuzz::swap_", mutates_args=("x", "y"))
def swap_(x: Tensor, y: Tensor, factor: float) -> None:
    old = x.clone()
    x.copy_(y * factor)
    y.copy_(old)


@torch.library.custom_op("fuzz::write_row_", mutates_args=("cache",))
def write_row_(cache: Tensor, row: Tensor, index: int) -> None:
    cache[index].copy_(row)


scale_.register_fake(lambda x, factor: None)
blend_.register_fake(lambda x, y: x.new_empty(()))
swap_.register_fake(lambda x, y, factor: None)
write_row_.register_fake(lambda cache, row, index: None)

PURE = ("{a} + {b}", "{a}.sin()", "{a} * 0.5 - {b}", "{a}.clone()", "{a}.clone()", "{b}.clone()")
VIEWS = (
    "{a}[0]",
    "{a}[1:]",
    "{a}[:-1]",
    "{a}.t()",
    "{a}.unsqueeze(0)[0]",
    "{a}.reshape(-1)[:24].view(4, 6)",
    "{a}.reshape(-1)",
    "{a}[:, 1:4]",
    "{a}[:, ::2]",
    "{a}.as_strided((2, 6), (6, 1), 6)",
)
READS = "{v} = torch.ops.fuzz.blend_({a}, {b})"
CUSTOM = (
    "torch.ops.fuzz.scale_({a}, 1.25)",
    "torch.ops.fuzz.scale_({a}, 0.75)",
    READS,
    "{v} = torch.ops.fuzz.blend_({a}, {b}.clone())",
    "torch.ops.fuzz.swap_({a}, {b}, 0.5)",
    "torch.ops.fuzz.swap_({a}, {a}.clone(), 0.5)",
    "torch.ops.fuzz.swap_({a}[0], {a}[1], 0.5)",
    "torch.ops.fuzz.write_row_({a}, {b}[0].clone(), 1)",
)
ATEN = (
    "{a}.mul_(1.5)",
    "{a}.add_({b})",
    "{a}.copy_({b})",
    "{a}.copy_({b}.clone())",
    "{a}.index_put_((index,), {b}[:2].clone())",
    "{a}.index_put_((index,), {b}[0])",
    "{a}[1:] = {a}[:-1].clone()",
    "{a}[0] = {b}[0]",
    "{a}[:, 1:4] = {b}[:, :3].clone()",
)


@dataclass(frozen=True)
class Program:
    seed: int
    text: str
    function: Callable

    def inputs(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed)
        return (*(torch.randn(4, 6, generator=generator) for _ in range(3)), torch.tensor([2, 0]))


def build(text: str, seed: int = 0) -> Program:
    scope: dict = {"torch": torch}
    exec(text, scope)
    return Program(seed, text, scope["program"])


def program(seed: int) -> Program:
    """A program of 5 to 9 statements that eager can run; statements that eager refuses are left out."""
    choice = random.Random(seed)
    scope = {"torch": torch, **dict(zip(("p", "q", "r", "index"), Program(seed, "", print).inputs(), strict=True))}
    names, lines = ["p", "q", "r"], []
    wanted = choice.randint(5, 9)
    while len(lines) < wanted:
        kind = choice.choices((PURE, VIEWS, CUSTOM, ATEN), (3, 3, 4, 2))[0]
        new = f"v{len(lines)}"
        template, a, b = choice.choice(kind), choice.choice(names), choice.choice(names)
        line = template.format(a=a, b=b, v=new)
        line = line if kind in (CUSTOM, ATEN) else f"{new} = {line}"
        # what an op does that reads, through another argument, what it overwrites is not defined
        undefined = template == READS and scope[a].untyped_storage()._cdata == scope[b].untyped_storage()._cdata
        if not undefined and runs(line, scope):
            lines.append(line)
            names += [new] if new in scope else []
    returned = sorted(set(choice.choices(names[1:], k=choice.randint(1, 4))))
    last = f"return {', '.join(returned)}, {choice.choice(names)}.clone()"
    return build("\n    ".join(["def program(p, q, r, index):", *lines, last]), seed)


def runs(line: str, scope: dict) -> bool:
    """Runs the line in eager, or leaves everything as it was."""
    before = {name: value.clone() for name, value in scope.items() if isinstance(value, Tensor)}
    trial = dict(scope)
    try:
        exec(line, trial)
    except (RuntimeError, IndexError):
        for name, value in before.items():
            scope[name].copy_(value)
        return False
    scope.update(trial)
    return True
